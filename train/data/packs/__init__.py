"""Data packs of a pre-training: phases cut into slices, slices merged, tokens counted."""
