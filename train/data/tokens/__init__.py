"""Text to token files: records, tokenizers, labels."""
