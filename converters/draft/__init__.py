"""A family drafted from the classes of transformers, and judged by them: of a model that has no table yet."""
