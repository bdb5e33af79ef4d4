"""Codecs of the sizes that config.json spells by other sizes.

Facts: transformers 5.23.0, models/bamba/configuration_bamba.py (a head of a state space), models/lfm2/modeling_lfm2.py
`Lfm2MLP` (an MLP that is two thirds as wide as the config says, rounded up), models/deepseek_v2/modeling_deepseek_v2.py
`DeepseekV2TopkRouter` (groups of experts), models/kimi_linear/configuration_kimi_linear.py and
models/minimax_m3_vl/configuration_minimax_m3_vl.py (a map takes precedence over keys),
models/gemma4/configuration_gemma4.py (heads of the layers without a window; a map of each layer takes precedence over
them), models/gemma4/modeling_gemma4.py
`Gemma4TextMLP` (twice as wide in layers that reuse keys), models/mimo_v2_flash/modeling_mimo_v2_flash.py (twice the
key/value heads in layers with a window).
"""

from __future__ import annotations

from collections.abc import Callable

from formats.errors import UnsupportedError, short
from formats.families import family_named
from formats.model.codec import Codec, Context, Spelled
from formats.model.values import positive_float, positive_int


def state_head_dim(key: str, expansion: str, width: str) -> Codec:
    """The codec of the elements of a state-space head; `auto`: the width of all heads divided by their number.

    The width is that of the key `width`, or the default of the family, or `expansion` times the hidden size.
    """

    def read(spelled: Spelled, context: Context) -> object:
        if spelled.get(key, "auto") != "auto":
            return spelled[key]
        hidden, heads = (positive_int(context.values[name], name, context.where) for name in ("hidden", "state_heads"))
        times = positive_int(spelled.get(expansion, 2), expansion, context.where)
        usual = family_named(context.values["family"]).own.get(width, times * hidden)
        return positive_int(spelled.get(width, usual), width, context.where) // heads

    return Codec(read, lambda value, _: {key: value})


GREEDY, LIMITED = "greedy", "group_limited_greedy"
"""Methods of choosing the best experts: of all experts, or of the experts in the best groups."""


def group_count(method: str, key: str) -> Codec:
    """The codec of a number of groups of experts, which is 1 unless the method is `LIMITED`."""

    def read(spelled: Spelled, context: Context) -> object:
        known = spelled.get(method, GREEDY)
        if known not in (GREEDY, LIMITED) or context.file.get(method, GREEDY) is None:
            raise UnsupportedError(f"{context.where}: {method} = {short(known)}, it is {GREEDY} or {LIMITED}")
        return spelled.get(key) if known == LIMITED else 1

    def write(value: object, context: Context) -> Spelled:
        return {method: LIMITED if context.values["router_groups"] > 1 else GREEDY, key: value}

    return Codec(read, write)


def adjusted_ffn(key: str, adjusts: str, multiplier: str, multiple: str) -> Codec:
    """The codec of the width of an MLP, which is adjusted unless the key `adjusts` is false.

    Adjusted it is two thirds of the stated width, times `multiplier`, rounded up to a multiple of `multiple`.
    """

    def read(spelled: Spelled, context: Context) -> object:
        if spelled.get(adjusts, True) is False:
            return spelled.get(key)
        width_of_key = positive_int(spelled.get(key), key, context.where)
        unit = positive_int(spelled.get(multiple, 256), multiple, context.where)
        width = int(positive_float(spelled.get(multiplier, 1.0), multiplier, context.where) * int(2 * width_of_key / 3))
        return -(-width // unit) * unit

    return Codec(read, lambda value, _: {key: value, adjusts: False})


def size_in_map(name: str) -> Callable[[str, str], Codec]:
    """Return a maker of codecs for a size that is `name` in a map of the family, or else under a key of its own."""

    def of(key: str, outer: str) -> Codec:
        def known(context: Context) -> Spelled:
            maps = family_named(context.values["family"]).keys.values()  # in other families the map has no effect
            given = context.file.get(outer) if outer in maps else None
            return given if isinstance(given, dict) else {}

        def write(value: object, context: Context) -> Spelled:
            return {key: value} | ({outer: {**known(context), name: value}} if name in known(context) else {})

        return Codec(lambda spelled, context: known(context).get(name, spelled.get(key)), write)

    return of


def doubled(key: str) -> Codec:
    """The codec of a number that is twice the value of another setting's key."""

    def read(spelled: Spelled, context: Context) -> int:
        return 2 * positive_int(spelled.get(key), key, context.where)

    return Codec(read, lambda *_: {})


def double_ffn(key: str) -> Codec:
    """The codec of the width of the MLP in some layers: a key for whether it is twice `ffn`; else None."""

    def read(spelled: Spelled, context: Context) -> int | None:
        return 2 * positive_int(context.values["ffn"], "ffn", context.where) if spelled.get(key) else None

    return Codec(read, lambda value, _: {key: value is not None})


def zero_or(key: str) -> Codec:
    """The codec of a size that is 0 in the config where the setting is None."""
    return Codec(lambda spelled, _: spelled.get(key) or None, lambda value, _: {key: value or 0})


def size_of_full_layers(setting: str, name: str) -> Callable[..., Codec]:
    """Return a maker of codecs for a size of the layers without a window: in a map of layers, or else under its key.

    Without the map the setting is None where the key `switch` is false or absent.
    """

    def of(key: str, by_layer: str, switch: str = "") -> Codec:
        def read(spelled: Spelled, context: Context) -> object:
            given = spelled.get(by_layer)
            if given is None:
                usual = family_named(context.values["family"]).defaults.get(setting)
                return spelled.get(key, usual) if spelled.get(switch, not switch) else None
            full = {str(layer) for layer in context.values["full_layers"]}
            layers = given if isinstance(given, dict) else {"": given}
            sizes = {layer.lstrip("0") or layer[-1:]: own for layer, own in layers.items() if own}  # saved as 05
            alike = len({repr(own) for own in sizes.values()}) < 2 and {*sizes} in (full, set())
            known = [
                own for own in sizes.values() if isinstance(own, dict) and {*own} <= {"head_dim", "num_key_value_heads"}
            ]
            if not alike or len(known) < len(sizes):
                raise UnsupportedError(
                    f"{context.where}: {by_layer} = {short(given)}: sizes of single layers are not supported, only of "
                    "all without a window"
                )
            return known[0].get(name) if known else None

        def write(value: object, context: Context) -> Spelled:
            if by_layer not in context.file:
                return {key: value}
            full, given = map(str, context.values["full_layers"]), context.file[by_layer] or {}
            own = {**next(iter(given.values()), {}), name: value}
            return {by_layer: {layer: {key: size for key, size in own.items() if size} for layer in full}}

        return Codec(read, write)

    return of
