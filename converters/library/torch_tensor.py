"""Make torch tensors from the bits of their elements."""

from __future__ import annotations

import torch

from converters.move.casts import Array
from formats.errors import UnsupportedError
from formats.torch_files.pickle_values import DTYPES

TorchTensor = torch.Tensor
TORCH = {name: torch_name for torch_name, name in DTYPES.items()}
"""Element type by its name in safetensors: its name in torch."""


def dtype_of(dtype: str) -> torch.dtype:
    """The torch dtype of an element type.

    Raises:
        UnsupportedError: torch has no such dtype.
    """
    if dtype not in TORCH:
        raise UnsupportedError(f"torch has no element type {dtype}", "take the tensor with numpy()")
    dtype_of_torch: torch.dtype = getattr(torch, TORCH[dtype])
    return dtype_of_torch


def as_torch(words: Array, dtype: str) -> torch.Tensor:
    """A torch tensor of an element type that shares the memory of words, unsigned integers of an element's size."""
    return torch.from_numpy(words.view(f"i{words.itemsize}")).view(dtype_of(dtype))
