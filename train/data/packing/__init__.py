"""Which documents share a row, and which labels are trained."""
