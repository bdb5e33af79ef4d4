"""The training around the engine: loop, checkpoints, evaluation, log, export."""
