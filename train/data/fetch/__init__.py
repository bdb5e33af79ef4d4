"""Public sets: recipes, sources, filters."""
