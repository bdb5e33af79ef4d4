"""Checkpoints of DeepSpeed and GPT-NeoX, for the registry."""

from __future__ import annotations

from formats.format import Format, Reader, Training


def _zero() -> Reader:
    from formats.deepspeed import zero

    return zero


def _neox() -> Reader:
    from formats.deepspeed.neox import checkpoint

    return checkpoint


def _training() -> Training:
    from formats.deepspeed import optimizer

    return optimizer


ZERO = Format(
    "zero",
    "DeepSpeed ZeRO stages 0 to 3 (DeepSpeed, HF Trainer, accelerate); written as universal checkpoints",
    "for DeepSpeed use `convert zero2hf`",
    _zero,
    _training,
    "zero2hf",
    reader_options=("verbatim", "allow_missing", "tag", "weights"),
)
NEOX = Format(
    "neox",
    "GPT-NeoX: global_stepN with mp_rank or layer files, and its ZeRO partitions",
    "for GPT-NeoX use `convert neox2hf`",
    _neox,
    _training,
    "neox2hf",
    reader_options=("tag", "weights", "gqa_layout"),
    writer_options=("tp", "pp", "layout"),
    ranked=True,
    replicas="drift",
)
"""The norms of GPT-NeoX drift apart between tensor parallel ranks in every long training: their mean is what is wanted,
and told."""
