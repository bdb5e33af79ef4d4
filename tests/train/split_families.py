"""How far the gradients of split models are from those of whole ones: `split_families.py FOLDER…`, of two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.train.test_families import CPU, documents
from tests.train.test_model import flat_of
from train.distributed import world
from train.model.parts import layers
from train.model.tensor_parallel import split, sum_partial
from train.model.trainee import Trainee, fill, fill_buffers, make, open_config


def gradients(folder, mesh):
    """Of the loss of some documents; a mesh splits the layers."""
    config = open_config(folder)
    model = make(config, "eager")
    if mesh is not None:
        split(layers(model), config, mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    fill_buffers(model, CPU)
    with torch.no_grad():
        fill(model, folder)
    Trainee(model, "eager").eval()(flat_of(documents()), CPU).backward()
    if mesh is not None:
        sum_partial(layers(model), config, mesh)
    grads = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}


if __name__ == "__main__":
    with world(1, 2, 1, 2) as ranks:
        apart = {}
        for folder in map(Path, sys.argv[1:]):
            of_one, of_two = gradients(folder, None), gradients(folder, ranks.mesh["tensor"])
            assert of_one.keys() == of_two.keys()
            far = (float((of_two[name] - grad).abs().max() / grad.abs().max()) for name, grad in of_one.items())
            apart[open_config(folder).model_type] = max(far)
        every = ranks.gathered(apart)
        if ranks.first:
            print(json.dumps({name: max(distances[name] for distances in every) for name in apart}))
