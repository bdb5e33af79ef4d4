"""Statistics over a checkpoint of any format in the memory of one tensor: `norms_of_layers.py ANY`."""

import sys

import numpy as np

import vitruvian

for name, tensor in vitruvian.open(sys.argv[1]).tensors("huggingface"):
    if name.endswith("weight"):
        print(f"{np.linalg.norm(tensor.astype(np.float32)):10.4f}  {name}")
