"""The commands of `train`, one file a concern."""
