"""Moving checkpoints between the formats: plan, engine, digest, command line."""
