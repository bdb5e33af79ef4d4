"""Sliding windows per layer in Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError, short
from formats.model.spec import some_layers


def windows_per_layer(args: Mapping[str, Any], layers: Any, where: str) -> list[bool]:
    """Whether each layer has a window, in any family.

    Raises:
        UnsupportedError: args say nothing of all layers.
    """
    numbers = some_layers(layers)
    if args.get("window_size") is None:
        return [False for _ in numbers]
    match args.get("window_attn_skip_freq"):
        case None:
            return [True for _ in numbers]
        case int(step) if type(step) is int and step > 0:
            return [bool((number + 1) % step) for number in numbers]
        case list(said) if len(said) == layers and all(type(one) in (int, bool) and one in (0, 1) for one in said):
            return [bool(one) for one in said]
        case other:
            raise UnsupportedError(
                f"{where}: window_attn_skip_freq = {short(other)} says nothing about {short(layers)} layers"
            )
