"""Bits as tensors of torch."""

from __future__ import annotations

import torch

from converters.move.casts import Array
from formats.errors import UnsupportedError
from formats.torch_files.pickle_values import DTYPES

TorchTensor = torch.Tensor
TORCH = {name: torch_name for torch_name, name in DTYPES.items()}
"""Element type as safetensors calls it: as torch does."""


def dtype_of(dtype: str) -> torch.dtype:
    """The type of torch.

    Raises:
        UnsupportedError: torch has none.
    """
    if dtype not in TORCH:
        raise UnsupportedError(f"torch has no element type {dtype}", "take the tensor with numpy()")
    dtype_of_torch: torch.dtype = getattr(torch, TORCH[dtype])
    return dtype_of_torch


def as_torch(words: Array, dtype: str) -> torch.Tensor:
    """Unsigned integers of the size of an element as a tensor of its type, which shares their memory."""
    return torch.from_numpy(words.view(f"i{words.itemsize}")).view(dtype_of(dtype))
