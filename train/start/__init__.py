"""Where a training run starts: its weights and its run folder."""
