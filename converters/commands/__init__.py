"""The commands of `convert`: one file a section of its help."""
