"""Hugging Face: folders of safetensors, config.json, quantized weights, a family in TOML."""
