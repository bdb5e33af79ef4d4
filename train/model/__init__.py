"""The model on packed rows, in torch."""
