"""The settings of a training, its schedule and its batches."""
