"""Hugging Face: folders of safetensors, config.json, quantized weights, a family in TOML; Mistral's own files."""

from formats.format import Format

HUGGINGFACE = Format(
    "huggingface",
    "safetensors files with a config.json",
    "for Hugging Face use `convert hf2megatron`, `hf2fsdp`, `hf2neox` or `hf2hf`",
    "formats.huggingface.folder",
    reader_options=("verbatim", "allow_missing", "drop", "only"),
)
MISTRAL = Format(
    "mistral",
    "Mistral's own files: consolidated*.safetensors with params.json (mistral-inference, vLLM)",
    "for Mistral's own files use `convert mistral2hf`",
    "formats.huggingface.mistral.folder",
    to_folder="mistral2hf",
)
