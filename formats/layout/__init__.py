"""The layout algebra: patterns, leaves, boxes, tables of rules, pieces, the logical tensors and their axes."""
