"""Megatron's arguments: what they mean, which release knows them, and the flags for one."""
