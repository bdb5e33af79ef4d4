"""nanotron: a folder for each module, a safetensors file for each parameter and rank."""

TRACKER = "latest.txt"
"""The file of a run that names its last step."""
