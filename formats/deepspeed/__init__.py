"""DeepSpeed: ZeRO states, universal checkpoints, and GPT-NeoX."""
