"""The commands of `convert`, their common options, and how they are carried out."""
