"""Join two layouts, prove coverage: the plan into each format; whether a config and its weights are of one model."""
