"""Megatron-DeepSpeed: the layer files of its pipeline, its arguments, the order of query, key and value."""
