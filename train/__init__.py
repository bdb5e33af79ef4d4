"""Sharded fine-tuning and its data."""
