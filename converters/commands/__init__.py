"""The commands of `convert`, with the options that they share and how they are carried out."""
