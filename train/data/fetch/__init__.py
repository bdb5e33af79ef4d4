"""Public data sets: recipes, sources, filters."""
