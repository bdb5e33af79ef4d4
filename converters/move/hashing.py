"""The hash of a tensor's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3


def hasher(name: str, dtype: str, shape: Sequence[int]) -> Any:
    """A BLAKE3 hash that has been fed the name, element type and shape of a tensor, before its bytes."""
    return blake3(f"{name} {dtype} {list(shape)}\n".encode())
