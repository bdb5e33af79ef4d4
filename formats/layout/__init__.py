"""The layout algebra: patterns, boxes, tables of rules, pieces, the logical tensors and their axes."""
