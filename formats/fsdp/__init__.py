"""FSDP distributed checkpoints of torch, accelerate, axolotl, torchtitan, OLMo-core and verl, and their optimizer."""

from formats.format import Format

FSDP = Format(
    "fsdp",
    "torch DCP (.metadata, .distcp), FSDP state dicts of accelerate, torchtitan, OLMo-core, verl and others",
    "for FSDP use `convert fsdp2hf`",
    "formats.fsdp.checkpoint",
    "formats.fsdp.optimizer",
    "fsdp2hf",
    ("verbatim", "allow_missing", "drop", "only", "container", "adapter"),
    r".*\.(?:metadata|distcp|safetensors|bin|index\.json)|(?:pytorch_model|model_world_size)_.*\.pt",
    folders="formats.fsdp.optimizer",
)
