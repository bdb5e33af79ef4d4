"""FSDP distributed checkpoints of torch, accelerate, axolotl, torchtitan and verl, and their optimizer."""

from formats.format import Format

FSDP = Format(
    "fsdp",
    "torch DCP (.metadata, .distcp), FSDP state dicts of accelerate, torchtitan, verl and others",
    "for FSDP use `convert fsdp2hf`",
    "formats.fsdp.checkpoint",
    "formats.fsdp.optimizer",
    "fsdp2hf",
    ("verbatim", "allow_missing", "drop", "only", "container", "adapter"),
    r".*\.(?:metadata|distcp|safetensors|bin|index\.json)|(?:pytorch_model|model_world_size)_.*\.pt",
)
