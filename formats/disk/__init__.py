"""Bytes on disk: safetensors files, JSON files, zstd streams, chunks of zarr."""
