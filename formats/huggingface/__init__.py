"""Hugging Face: folders of safetensors, config.json, quantized weights, TOML families; Mistral, nanotron, MaxText."""

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
NANOTRON = Format(
    "nanotron",
    "nanotron: model/ with a file for each parameter and rank, and model_config.json",
    "for nanotron use `convert nanotron2hf`",
    "formats.huggingface.nanotron.checkpoint",
    "formats.huggingface.nanotron.optimizer",
    to_folder="nanotron2hf",
    signs=r"model_config\.json",
    ranked=True,
    folders="formats.huggingface.nanotron.checkpoint",
)
MAXTEXT = Format(
    "maxtext",
    "MaxText's checkpoints of Orbax: items/ with _METADATA; read, not written",
    "for MaxText use `convert maxtext2hf`",
    "formats.huggingface.maxtext.checkpoint",
    "formats.huggingface.maxtext.optimizer",
    to_folder="maxtext2hf",
    reader_options=("only",),
    signs="_METADATA",
    folders="formats.huggingface.maxtext.checkpoint",
)
