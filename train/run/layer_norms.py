"""The gradient norm of each layer, over all ranks."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from train.distributed import World

LAYER = re.compile(r"(?:layers|h|blocks)\.\d+(?=\.)")


def layer_norms(model: Any, world: World) -> dict[str, float]:
    """The gradient norm of each layer, and of each module outside of layers, over all ranks. Collective.

    A shard is counted once, because replicas have equal gradients.
    """
    squares: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        if tensor.grad is None:
            continue
        match = LAYER.search(name)
        layer = match[0] if match else name.rpartition(".")[0].rpartition(".")[2]
        sharded = isinstance(tensor.grad, DTensor)
        local = tensor.grad.to_local() if sharded else tensor.grad
        copies = world.ranks // (_shards(tensor.grad) if sharded else 1)
        square = local.double().square().sum() / copies
        squares[layer] = squares[layer] + square if layer in squares else square
    sums = world.sums(*torch.stack(list(squares.values())).tolist())
    return {layer: math.sqrt(total) for layer, total in zip(squares, sums, strict=True)}


def _shards(tensor: DTensor) -> int:
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
