"""FSDP distributed checkpoints of torch, accelerate, axolotl, torchtitan and verl, and their optimizer."""
