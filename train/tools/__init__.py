"""Programs beside the training: chat, evaluation of a checkpoint, plots, preflight, jobs."""
