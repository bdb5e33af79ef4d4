"""Hugging Face folders, for the registry."""

from __future__ import annotations

from formats.format import Format, Reader


def _reader() -> Reader:
    from formats.huggingface import folder

    return folder


HUGGINGFACE = Format(
    "huggingface",
    "safetensors files with a config.json",
    "for Hugging Face use `convert hf2megatron`, `hf2fsdp`, `hf2neox` or `hf2hf`",
    _reader,
    reader_options=("verbatim", "allow_missing"),
)
