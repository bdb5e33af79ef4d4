"""Codecs of the settings that config.json spells layer by layer, or as numbers of experts.

Facts: transformers 5.23.0, models/qwen2_moe/modeling_qwen2_moe.py (which layers are sparse),
models/dots1/modeling_dots1.py (the first layers are dense; the shared experts are one MLP, as wide as all of them),
models/llama4/configuration_llama4.py (the list is of the layers with experts, and takes precedence over the step),
models/hy_v3/configuration_hy_v3.py and models/qwen3_next/configuration_qwen3_next.py (a word for each layer),
models/ernie4_5_moe/modeling_ernie4_5_moe.py (from a layer to a layer, -1 being the last),
models/smollm3/configuration_smollm3.py (the step of layers without rotation),
models/nemotron_h/configuration_nemotron_h.py (a letter or a word for each layer),
models/bamba/configuration_bamba.py and models/lfm2/configuration_lfm2.py (a list of the layers with attention);
models/glm_moe_dsa/configuration_glm_moe_dsa.py (a word or a letter for each layer, or a step after some first layers),
models/kimi_linear/configuration_kimi_linear.py (two lists in a map, that count layers from 1),
models/minimax_m3_vl/configuration_minimax_m3_vl.py (a number for each layer, which is 0 where the layer has no experts,
or no indexer), models/gemma4/configuration_gemma4.py (how many of the last layers reuse keys and values);
configuration_utils.py `remap_legacy_layer_types`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from formats.errors import RefusedError, SourceError, short
from formats.families import family_named
from formats.model.codec import Codec, Context, Spelled
from formats.model.values import positive_int, some_layers

SLIDING, FULL = "sliding_attention", "full_attention"
"""The words in `layer_types` for a layer with a sliding window, and for a layer without."""
LINEAR = "linear_attention"
"""The word in `layer_types` for a layer with linear attention, or with a state space."""
MLP, MOE, CONV = "mlp", "moe", "conv"
"""The words in `layer_types` for a layer that is only an MLP, without and with experts, and for a short convolution."""
BLOCKS = "minimax_m3_sparse"
"""The word in `layer_types` for a layer whose attention sees blocks of keys."""
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
"""Letter in a pattern of layers: the word for this kind of layer."""
LETTERS_OF_INDEXERS = {"F": "full", "S": "shared"}
"""Letter in a pattern of indexers: the word for whether a layer has its own indexer, or shares one."""
OLD = {"mamba": LINEAR, "attention": FULL}
"""Former word for a kind of layer: its present word."""
STEP_WITHOUT_ROTATION = 4
"""The default distance between layers that do not rotate."""
STEP_OF_ATTENTION = 4
"""The default distance between layers with full attention in a model with linear attention."""


def _layers(context: Context) -> range:
    return some_layers(context.values["layers"])


def _default(setting: str, context: Context) -> Any:
    """The default of transformers for a setting, as the codec of the setting understands it; None if there is none."""
    return family_named(context.values["family"]).defaults.get(setting)


def _count(key: str, spelled: Spelled, context: Context, fallback: int | None) -> int:
    value = spelled.get(key)
    if value is None:
        return fallback or 0
    if type(value) is not int or not 0 <= value < 1_000_000:
        raise SourceError(f"{context.where} says {key} = {short(value)}, it should be a small whole number")
    return value


def _step(key: str, spelled: Spelled, context: Context) -> int:
    """How far layers of a kind are apart: transformers divides by it, and builds no model with 0."""
    value = _count(key, spelled, context, 1)
    if not value:
        raise SourceError(f"{context.where} says {key} = 0, it should be how far layers are apart: 1 or more")
    return value


def _list(key: str, spelled: Spelled, context: Context) -> list[int] | None:
    value = spelled.get(key)
    if value is not None and not (isinstance(value, list) and all(type(layer) is int for layer in value)):
        raise SourceError(f"{context.where} says {key} = {short(value)}, it should be a list of layers")
    return value


def word_per_layer(
    key: str, words: tuple[Any, Any], mark: Any, absent: Callable[[Spelled, Context], Any], longer: bool = False
) -> Codec:
    """The codec of the layers that have the word `mark` in a list with one of two words for each layer.

    Without a list `absent` returns the layers, as a tuple, or the list of words from another key. A `longer` list may
    have more words than the model has layers.
    """

    def read(spelled: Spelled, context: Context) -> Any:
        marks: Any = spelled.get(key)
        marks = absent(spelled, context) if marks is None else marks
        if isinstance(marks, tuple):
            return marks
        marks = [OLD.get(str(mark_of), mark_of) for mark_of in marks] if isinstance(marks, list) else marks
        count = len(marks) if isinstance(marks, list) and all(mark_of in words for mark_of in marks) else -1
        if not (count == context.values["layers"] or (longer and count >= len(_layers(context)))):
            raise SourceError(
                f"{context.where} says {key} = {short(marks)}, it should be {words[0]} or {words[1]} for each layer"
            )
        return tuple(layer for layer, mark_of in zip(_layers(context), marks, strict=False) if mark_of == mark)

    def write(some: Any, context: Context) -> Spelled:
        other = words[words[0] == mark]
        return {} if some is None else {key: [mark if layer in some else other for layer in _layers(context)]}

    return Codec(read, write)


def layers_without_window(key: str) -> Codec:
    """The codec of the layers without a sliding window: a word for each layer, or the first ones and every n-th."""

    def usual(_: Spelled, context: Context) -> Any:
        full = _default("full_layers", context)
        if not isinstance(full, dict):
            return full
        front, step = full.get("front", 0), positive_int(full.get("step"), "the step of full_layers", context.where)
        return tuple(layer for layer in _layers(context) if layer < front or not (layer + 1) % step)

    return word_per_layer(key, (SLIDING, FULL), FULL, usual)


def layers_without_rotation(key: str, step: str) -> Codec:
    """The codec of the layers without rotary embedding: a 0 or 1 for each layer, or the distance between them."""

    def by_step(spelled: Spelled, context: Context) -> tuple[int, ...]:
        distance = positive_int(spelled.get(step, STEP_WITHOUT_ROTATION), step, context.where)
        return tuple(layer for layer in _layers(context) if (layer + 1) % distance == 0)

    return word_per_layer(key, (0, 1), 0, by_step, longer=True)


def linear_layers_by_step(key: str, step: str) -> Codec:
    """The codec of the layers with linear attention: a word for each layer, or all but the last of each step."""

    def by_step(spelled: Spelled, context: Context) -> tuple[int, ...]:
        distance = positive_int(spelled.get(step, STEP_OF_ATTENTION), step, context.where)
        return tuple(layer for layer in _layers(context) if (layer + 1) % distance)

    return word_per_layer(key, (LINEAR, FULL), LINEAR, by_step)


def linear_layers_by_lists(lists: str, key: str) -> Codec:
    """The codec of the layers with linear attention: a word for each layer, or two lists in a map, counted from 1.

    One list has the layers with linear attention, the other the layers with full attention. Without either the first
    layer has linear attention, and of the others all but every fourth.
    """

    def by_lists(spelled: Spelled, context: Context) -> tuple[int, ...]:
        given = spelled.get(lists, {})
        if isinstance(given, dict) and {"full_attn_layers", "kda_layers"} <= {*given}:
            recurrent, full = (set(_list(name, given, context) or ()) for name in ("kda_layers", "full_attn_layers"))
            if recurrent & full or recurrent | full != {layer + 1 for layer in _layers(context)}:
                raise SourceError(
                    f"{context.where} says {lists} = {short(given)}, its lists should have each layer once"
                )
            return tuple(layer - 1 for layer in sorted(recurrent))
        return tuple(layer for layer in _layers(context) if not layer or layer % STEP_OF_ATTENTION)

    return word_per_layer(key, (LINEAR, FULL), LINEAR, by_lists)


def block_layers(lists: str, key: str) -> Codec:
    """The codec of the layers whose attention sees blocks of keys: a word for each layer, or a number in a map.

    Without either no layer has such attention.
    """

    def flags(spelled: Spelled, _: Context) -> Any:
        given = spelled.get(lists, {})
        numbers = given.get("sparse_attention_freq") if isinstance(given, dict) else None
        return [BLOCKS if flag else FULL for flag in numbers] if numbers else ()

    return word_per_layer(key, (BLOCKS, FULL), BLOCKS, flags)


def last_layers(key: str) -> Codec:
    """The codec of the last layers, spelled as their number."""

    def read(spelled: Spelled, context: Context) -> tuple[int, ...]:
        count = len(_layers(context))
        return tuple(_layers(context)[max(count - _count(key, spelled, context, 0), 0) :])

    return Codec(read, lambda some, _: {key: len(some)})


def state_layers(key: str) -> Codec:
    """The codec of the layers with a state space: a word for each layer; without words all layers."""
    return word_per_layer(key, (LINEAR, FULL), LINEAR, lambda _, context: tuple(_layers(context)))


def layers_not_listed(key: str) -> Codec:
    """The codec of the layers that are not in a list; without a list all layers."""

    def read(spelled: Spelled, context: Context) -> tuple[int, ...]:
        others = _list(key, spelled, context) or ()
        return tuple(layer for layer in _layers(context) if layer not in others)

    return Codec(read, lambda some, context: {key: [layer for layer in _layers(context) if layer not in some]})


def convolution_layers(key: str, attention: str) -> Codec:
    """The codec of the layers with a short convolution: a word for each layer, or a list of those with attention."""

    def by_list(spelled: Spelled, context: Context) -> tuple[int, ...]:
        return layers_not_listed(attention).read(spelled, context) if attention in spelled else ()

    return word_per_layer(key, (CONV, FULL), CONV, by_list)


def _kinds(key: str, spelled: Spelled, context: Context) -> list[str]:
    """The words for the kinds of the layers, each of which is a single block, from a pattern or from a list."""
    given = spelled.get(key)
    kinds = (
        [LETTERS.get(str(letter), OLD.get(str(letter), letter)) for letter in given]
        if isinstance(given, str | list)
        else []
    )
    if not kinds or not all(kind in LETTERS.values() for kind in kinds):
        raise SourceError(f"{context.where} says {key} = {short(given)}, it should be a pattern or a list of layers")
    return kinds


def _kind(layer: int, context: Context) -> str:
    layers_of = {name: context.values[name] or () for name in ("mlp_layers", "dense_layers", "state_layers")}
    if layer in layers_of["mlp_layers"]:
        return MOE if context.values["experts"] and layer not in layers_of["dense_layers"] else MLP
    return LINEAR if layer in layers_of["state_layers"] else FULL


def of_kind(*kinds_read: str) -> Callable[[str], Codec]:
    """The codec of the layers of some kinds, each a single block; without a kind, of the number of layers."""

    def of(key: str) -> Codec:
        def read(spelled: Spelled, context: Context) -> Any:
            kinds = _kinds(key, spelled, context)
            return tuple(layer for layer, kind in enumerate(kinds) if kind in kinds_read) if kinds_read else len(kinds)

        def write(_: Any, context: Context) -> Spelled:
            kinds = [_kind(layer, context) for layer in _layers(context)]
            letters = {kind: letter for letter, kind in LETTERS.items()}
            return {key: "".join(letters[kind] for kind in kinds) if key.endswith("pattern") else kinds}

        return Codec(read, write)

    return of


def dense_layers_by_word(key: str, count: str) -> Codec:
    """The codec of the dense layers: a word for each layer, or the number of dense layers at the start."""

    def front(spelled: Spelled, context: Context) -> tuple[int, ...]:
        return tuple(_layers(context)[: _count(count, spelled, context, _default("dense_layers", context))])

    return word_per_layer(key, ("dense", "sparse"), "dense", front)


def dense_layers_by_flag(flags: str, key: str) -> Codec:
    """The codec of the dense layers: a word for each layer, or a number, 0 for a dense layer; without either none."""

    def numbered(spelled: Spelled, _: Context) -> Any:
        given = spelled.get(flags)
        return ["sparse" if flag else "dense" for flag in given] if given else ()

    return word_per_layer(key, ("dense", "sparse"), "dense", numbered)


def layers_without_indexer(key: str, pattern: str, step: str, offset: str) -> Codec:
    """The codec of the layers without an indexer: a word or a letter for each, or the distance of those with one."""

    def by_pattern_or_step(spelled: Spelled, context: Context) -> Any:
        letters = spelled.get(pattern)
        if isinstance(letters, str):
            return [LETTERS_OF_INDEXERS.get(letter, letter) for letter in letters]
        if letters is not None:
            return letters
        distance = _count(step, spelled, context, 1) or 1  # transformers takes 0 as 1
        front = _count(offset, spelled, context, 2)
        return tuple(layer for layer in _layers(context) if max(layer - front + 1, 0) % distance)

    return word_per_layer(key, ("full", "shared"), "shared", by_pattern_or_step)


def leading_dense_layers(key: str) -> Codec:
    """The codec of the dense layers, all at the start, spelled as their number."""

    def write(dense: Iterable[int], _: Context) -> Spelled:
        if list(dense) != list(range(len(list(dense)))):
            raise RefusedError(f"the layers without experts are {list(dense)}, the family has them only in front")
        return {key: len(list(dense))}

    return Codec(
        lambda spelled, context: tuple(range(_count(key, spelled, context, _default("dense_layers", context)))), write
    )


def dense_layers_by_list(key: str, step: str) -> Codec:
    """The codec of the dense layers: a list of them, and the distance between the layers with experts."""

    def read(spelled: Spelled, context: Context) -> tuple[int, ...]:
        distance, dense = _step(step, spelled, context), _list(key, spelled, context) or ()
        return tuple(layer for layer in _layers(context) if layer in dense or (layer + 1) % distance)

    return Codec(read, lambda dense, _: {key: list(dense), step: 1})


def sparse_layers_by_list(key: str, step: str) -> Codec:
    """The codec of the dense layers: a list of the layers with experts, or the distance between these."""

    def read(spelled: Spelled, context: Context) -> tuple[int, ...]:
        sparse = _list(key, spelled, context)
        if sparse is None:
            distance = _step(step, spelled, context)
            return tuple(layer for layer in _layers(context) if (layer + 1) % distance)
        return tuple(layer for layer in _layers(context) if layer not in sparse)

    return Codec(read, lambda dense, context: {key: [layer for layer in _layers(context) if layer not in dense]})


def sparse_layers_by_range(first: str, last: str, step: str) -> Codec:
    """The codec of the dense layers: the first and last layer with experts, and the distance between such layers."""

    def read(spelled: Spelled, context: Context) -> tuple[int, ...]:
        most, distance = len(_layers(context)) - 1, _step(step, spelled, context)
        low = _count(first, spelled, context, _default("dense_layers", context))
        high = most if spelled.get(last) == -1 else _count(last, spelled, context, most)
        return tuple(layer for layer in _layers(context) if (layer + 1) % distance or not low <= layer <= high)

    def write(dense: Iterable[int], context: Context) -> Spelled:
        sparse = [layer for layer in _layers(context) if layer not in dense]
        distance = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        if sparse != [layer for layer in range(sparse[0], sparse[-1] + 1) if not (layer + 1) % distance]:
            raise RefusedError(f"the layers with experts are {sparse}, the family has them at equal distances")
        return {first: sparse[0], last: sparse[-1], step: distance}

    return Codec(read, write)


def shared_ffn(key: str) -> Codec:
    """The codec of the width of the shared experts, spelled as it is."""
    usual = lambda spelled, context: spelled.get(key, _default("shared_ffn", context))  # noqa: E731
    return Codec(usual, lambda shared, _: {key: shared})


def shared_expert_count(key: str) -> Codec:
    """The codec of the width of the shared experts, spelled as a number of experts."""

    def read(spelled: Spelled, context: Context) -> int | None:
        width, count = context.values["expert_ffn"], _count(key, spelled, context, _default("shared_ffn", context))
        return count * (width if type(width) is int else 0) or None

    def write(shared: int, context: Context) -> Spelled:
        width = context.values["expert_ffn"] or context.values["ffn"]
        if shared % width:
            raise RefusedError(f"what is shared is {shared} wide, which is no multiple of an expert's {width}")
        return {key: shared // width}

    return Codec(read, write)
