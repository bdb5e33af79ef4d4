"""Mistral's own files: consolidated safetensors with a params.json."""
