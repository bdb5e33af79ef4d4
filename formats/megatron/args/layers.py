"""The codecs of layers that differ: in which nothing rotates, without a sliding window, without experts.

Megatron names them by 0 or 1 for each layer, or by a step. Facts: megatron-core 0.16.1,
transformer/transformer_config.py `no_rope_freq`, transformer/utils.py `is_layer_window_attention` and line 38,
models/gpt/gpt_layer_specs.py `get_gpt_decoder_layer_specs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.model.codec import Codec, Context, Spelled, scalar
from formats.model.spec import some_layers

SLIDING, FULL = "sliding_attention", "full_attention"
Layers = tuple[int, ...]


def _named(
    given: Any, key: str, context: Context, flag: int, at: Callable[[int, int], bool], *types: type, even: bool = False
) -> Layers:
    """The layers with a flag of 0 or 1 in a list of such types, or at a place in a step, `even` if it divides them all.

    Raises:
        UnsupportedError: the argument says nothing of all layers.
    """
    count, layers = context.values["layers"], some_layers(context.values["layers"])
    match given:
        case int(step) if type(step) is int and step > 0 and not (even and len(layers) % step):
            return tuple(layer for layer in layers if at(layer, step))
        case list(flags) if len(flags) == count and all(type(value) in types and value in (0, 1) for value in flags):
            return tuple(layer for layer in layers if flags[layer] == flag)
    raise UnsupportedError(f"{context.where}: {key} = {short(given)} says nothing about {short(count)} layers")


def _last(layer: int, step: int) -> bool:
    return (layer + 1) % step == 0


def _flags(layers: Layers, flag: int, context: Context) -> list[int]:
    """A list of 0 and 1 in which these layers have the flag."""
    return [flag if layer in layers else 1 - flag for layer in some_layers(context.values["layers"])]


def nope(key: str) -> Codec:
    """Nothing rotates in layers with a 1, or in the last of each step, which divides the layers."""

    def read(spelled: Any, context: Context) -> Layers:
        return () if spelled is None else _named(spelled, key, context, 1, _last, int, bool, even=True)

    return scalar(key, read, lambda layers, context: _flags(layers, 1, context) if layers else None)


def dense(key: str) -> Codec:
    """There are no experts in layers with a 0, or in all but the first of each step."""

    def read(_: Any, context: Context) -> Layers:
        return _named(context.file.get(key, 1), key, context, 0, lambda layer, step: bool(layer % step), int)

    return scalar(key, read, lambda layers, context: _flags(layers, 0, context) if layers else 1)


def full(key: str, window: str) -> Codec:
    """There is no window in layers with a 0, or in the last of each step; in none where no window is set."""

    def read(spelled: Spelled, context: Context) -> Layers:
        if window not in spelled:
            return tuple(some_layers(context.values["layers"]))
        return _named(spelled[key], key, context, 0, _last, int, bool) if key in spelled else ()

    def write(layers: Layers, context: Context) -> Spelled:
        return {key: _flags(layers, 0, context) if layers and context.values["sliding_window"] else None}

    return Codec(read, write)


def kinds(key: str) -> Codec:
    """The same layers as a list of kinds of attention: sliding and full in turn where a config has none."""

    def read(_: Any, context: Context) -> list[str]:
        layers = some_layers(context.values["layers"])
        return [FULL if layer in context.values["full_layers"] else SLIDING for layer in layers]

    def write(value: Any, context: Context) -> list[int]:
        count, family = context.values["layers"], context.values["family"]
        of = value or [FULL if layer % 2 else SLIDING for layer in some_layers(count)]
        known = isinstance(of, list) and len(of) == count and all(kind in (SLIDING, FULL) for kind in of)
        if not known or (SLIDING in of and not context.values["sliding_window"]):
            why = (
                f"layers are {SLIDING}, and no sliding_window is set"
                if known
                else f"of {count} layers each is {SLIDING} or {FULL}, this model's are {short(of)}"
            )
            raise RefusedError(f"megatron-core cannot compute this {family}: {why}")
        return [int(kind == SLIDING) for kind in of]

    return scalar(key, read, write)


def window(key: str) -> Codec:
    """Tokens that a token sees, itself included: Megatron counts those to its left."""

    def read(spelled: Any, context: Context) -> int | None:
        match spelled:
            case None | [-1, int()]:
                return None
            case [int(left), int(right)] if left >= 0 and right in (0, -1):
                return left + 1
        raise UnsupportedError(f"{context.where}: {key} = {short(spelled)} is not supported, only (left, 0)")

    return scalar(key, read, lambda tokens, _: None if tokens is None else (tokens - 1, 0))
