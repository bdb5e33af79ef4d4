"""Sizes that config.json spells by others: the codecs of their keys.

Facts: transformers 5.23.0, models/bamba/configuration_bamba.py (a head of a state space), models/lfm2/modeling_lfm2.py
`Lfm2MLP` (an MLP that is two thirds as wide as the config says, rounded up), models/deepseek_v2/modeling_deepseek_v2.py
`DeepseekV2TopkRouter` (groups of experts).
"""

from __future__ import annotations

from formats.errors import UnsupportedError, short
from formats.model.codec import Codec, Context, Spelled
from formats.model.values import real, whole


def expanded(key: str, expansion: str, width: str) -> Codec:
    """Elements of a head; `auto` is those of all heads, which are so many hidden sizes, divided by their number."""

    def read(spelled: Spelled, context: Context) -> object:
        if spelled.get(key, "auto") != "auto":
            return spelled[key]
        hidden, heads = (whole(context.values[name], name, context.where) for name in ("hidden", "state_heads"))
        times = whole(spelled.get(expansion, 2), expansion, context.where)
        return whole(spelled.get(width, times * hidden), width, context.where) // heads

    return Codec(read, lambda value, _: {key: value})


GREEDY, LIMITED = "greedy", "group_limited_greedy"
"""How the best experts are taken: of all, or out of the best groups."""


def limited(method: str, key: str) -> Codec:
    """A number of groups of experts, which is one unless the method is that which divides them."""

    def read(spelled: Spelled, context: Context) -> object:
        known = spelled.get(method, GREEDY)
        if known not in (GREEDY, LIMITED) or context.file.get(method, GREEDY) is None:
            raise UnsupportedError(f"{context.where}: {method} = {short(known)}, it is {GREEDY} or {LIMITED}")
        return spelled.get(key) if known == LIMITED else 1

    def write(value: object, context: Context) -> Spelled:
        return {method: LIMITED if context.values["router_groups"] > 1 else GREEDY, key: value}

    return Codec(read, write)


def adjusted(key: str, adjusts: str, multiplier: str, multiple: str) -> Codec:
    """The width of an MLP, which is adjusted unless the config says that it is not."""

    def read(spelled: Spelled, context: Context) -> object:
        if spelled.get(adjusts, True) is False:
            return spelled.get(key)
        said, unit = (
            whole(spelled.get(key), key, context.where),
            whole(spelled.get(multiple, 256), multiple, context.where),
        )
        width = int(real(spelled.get(multiplier, 1.0), multiplier, context.where) * int(2 * said / 3))
        return -(-width // unit) * unit

    return Codec(read, lambda value, _: {key: value, adjusts: False})
