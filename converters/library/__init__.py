"""The library: checkpoints as Python objects, conversions and proofs as functions with typed results."""
