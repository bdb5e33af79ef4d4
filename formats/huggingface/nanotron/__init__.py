"""nanotron: a folder for each module, a safetensors file for each parameter and rank."""
