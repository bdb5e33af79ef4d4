"""The data of a training: records, tokens, masks, packs."""
