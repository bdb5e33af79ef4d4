"""Publish: the checks before, the model card, the upload."""
