"""The settings of a training run, its learning rate schedule and its batches."""
