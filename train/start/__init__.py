"""Where a training begins: its weights and its run folder."""
