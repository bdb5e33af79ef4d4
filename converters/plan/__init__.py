"""Join two layouts, prove coverage: every kind of plan."""
