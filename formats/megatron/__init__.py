"""Megatron-LM: classic shards, torch_dist, Megatron-LLM, and their optimizers."""
