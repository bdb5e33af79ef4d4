"""Training data: records, tokens, masks, packs."""
