"""Mistral's own files: consolidated safetensors with a params.json."""

from formats.format import Format

MISTRAL = Format(
    "mistral",
    "Mistral's own files: consolidated*.safetensors with params.json (mistral-inference, vLLM)",
    "for Mistral's own files use `convert mistral2hf`",
    "formats.mistral.folder",
    to_folder="mistral2hf",
)
