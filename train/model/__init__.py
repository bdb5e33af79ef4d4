"""The model, computed on packed rows in torch."""
