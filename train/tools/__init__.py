"""Programs beside the training: chat, evaluation of saved checkpoints, plots, preflight, Slurm jobs."""
