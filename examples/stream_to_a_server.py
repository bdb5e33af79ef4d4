"""Tensors one by one to a consumer that takes them as vLLM's `load_weights` does: `stream_to_a_server.py ANY`."""

import sys
from collections.abc import Iterable

import torch

import vitruvian.torch


def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Stands for a model of a serving stack."""
    return sum(tensor.nbytes for _, tensor in weights)


print(f"{load_weights(vitruvian.torch.iterate(sys.argv[1], prefetch=2))} bytes")
