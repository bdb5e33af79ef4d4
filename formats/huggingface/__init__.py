"""Hugging Face: folders of safetensors, config.json, quantized weights, a family in TOML."""

from formats.format import Format

HUGGINGFACE = Format(
    "huggingface",
    "safetensors files with a config.json",
    "for Hugging Face use `convert hf2megatron`, `hf2fsdp`, `hf2neox` or `hf2hf`",
    "formats.huggingface.folder",
    reader_options=("verbatim", "allow_missing", "drop"),
)
