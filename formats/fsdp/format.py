"""FSDP checkpoints, for the registry."""

from __future__ import annotations

from formats.format import Format, Reader, Training


def _reader() -> Reader:
    from formats.fsdp import checkpoint

    return checkpoint


def _training() -> Training:
    from formats.fsdp import optimizer

    return optimizer


FSDP = Format(
    "fsdp",
    "torch DCP (.metadata, .distcp), FSDP state dicts of accelerate, torchtitan, verl and others",
    "for FSDP use `convert fsdp2hf`",
    _reader,
    _training,
    "fsdp2hf",
    reader_options=("verbatim", "allow_missing", "container"),
)
