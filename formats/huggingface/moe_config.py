"""Settings of a mixture of experts that transformers spells in more than one config key.

Facts: transformers 5.23.0, models/qwen2_moe/modeling_qwen2_moe.py (which layers are sparse),
models/dots1/modeling_dots1.py (the first ones are dense; the shared experts are one MLP, as wide as all of them),
models/llama4/configuration_llama4.py (the list is of those with experts, and goes before the step),
models/hy_v3/configuration_hy_v3.py (a word for each layer) and models/ernie4_5_moe/modeling_ernie4_5_moe.py (from a
layer to a layer, -1 being the last).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import RefusedError, SourceError, short
from formats.model.spec import ModelSpec, some_layers

FIRST, LISTED, STEP = "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step"
SPARSE, INTERLEAVED = "moe_layers", "interleave_moe_layer_step"
START, END, INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
WORDS, WORD = "mlp_layer_types", {False: "dense", True: "sparse"}
COUNTED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
BESIDE = {LISTED, STEP, INTERLEAVED, END, INTERVAL}
"""Keys beside the one that tells the rule."""
DERIVED = ("dense_layers", "shared_ffn")
"""The settings with rules of their own here."""


def found(
    keys: Mapping[str, str],
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """The settings of `DERIVED` that a family has.

    Args:
        keys: the config keys of each setting, the first of them in `DERIVED` telling the rule.
        config: the parsed config.json.
        values: the settings with a key of their own.
        defaults: what transformers assumes: how many layers in front are dense, how many experts are shared.
        where: what to call the file in an error.

    Raises:
        SourceError: the config says what makes no sense.
    """
    settings: dict[str, Any] = {}
    layers = some_layers(values["layers"])
    if keys.get("dense_layers") == FIRST:
        settings["dense_layers"] = tuple(range(_count(config, FIRST, defaults.get("dense_layers", 0), where)))
    elif keys.get("dense_layers") == SPARSE:
        step, sparse = _count(config, INTERLEAVED, 1, where), _listed(config, SPARSE, where)
        sparse = {n for n in layers if not (n + 1) % max(step, 1)} if sparse is None else sparse
        settings["dense_layers"] = tuple(n for n in layers if n not in sparse)
    elif keys.get("dense_layers") == WORDS:
        settings["dense_layers"] = _worded(config, defaults.get("dense_layers", 0), values["layers"], where)
    elif keys.get("dense_layers") == START:
        first, step = _count(config, START, defaults.get("dense_layers", 0), where), _count(config, INTERVAL, 1, where)
        last = len(layers) - 1 if config.get(END) == -1 else _count(config, END, len(layers) - 1, where)
        settings["dense_layers"] = tuple(n for n in layers if (n + 1) % max(step, 1) or not first <= n <= last)
    elif "dense_layers" in keys:
        step, dense = _count(config, STEP, 1, where), _listed(config, LISTED, where) or ()
        settings["dense_layers"] = tuple(n for n in layers if n in dense or (n + 1) % max(step, 1))
    if keys.get("shared_ffn") in COUNTED:
        width = values["expert_ffn"]
        count = _count(config, keys["shared_ffn"], defaults.get("shared_ffn", 0), where)
        settings["shared_ffn"] = count * (width if type(width) is int else 0) or None
    elif "shared_ffn" in keys:
        settings["shared_ffn"] = config.get(keys["shared_ffn"])
    return settings


def _worded(config: Mapping[str, Any], first: int, layers: Any, where: str) -> tuple[int, ...]:
    """The layers that a list calls dense; without one so many in front."""
    words = config.get(WORDS)
    if words is None:
        return tuple(some_layers(layers)[:first])
    if not isinstance(words, list) or len(words) != layers or not all(word in WORD.values() for word in words):
        raise SourceError(
            f"{where} says {WORDS} = {short(words)}, it should say dense or sparse of {short(layers)} layers"
        )
    return tuple(n for n, word in enumerate(words) if word == WORD[False])


def _listed(config: Mapping[str, Any], key: str, where: str) -> set[int] | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise SourceError(f"{where} says {key} = {short(value)}, it should be a list of layers")
    return set(value)


def _count(config: Mapping[str, Any], key: str, fallback: int, where: str) -> int:
    value = config.get(key)
    if value is None:
        return fallback
    if type(value) is not int or not 0 <= value < 1_000_000:
        raise SourceError(f"{where} says {key} = {short(value)}, it should be a small whole number")
    return value


def spelled(keys: Mapping[str, str], name: str, spec: ModelSpec) -> dict[str, Any]:
    """The config keys of one setting of `DERIVED`.

    Args:
        keys: the config keys of the family.
        name: the setting.
        spec: the model.

    Raises:
        RefusedError: the family cannot say it.
    """
    dense, shared, width = spec.dense_layers or (), spec.shared_ffn or 0, spec.expert_ffn or spec.ffn
    sparse = sorted(spec.sparse_layers)
    if name == "shared_ffn" and keys[name] not in COUNTED:
        return {keys[name]: shared}
    if name == "shared_ffn":
        if shared % width:
            raise RefusedError(f"what is shared is {shared} wide, which is no multiple of an expert's {width}")
        return {keys[name]: shared // width}
    if keys[name] == SPARSE:
        return {SPARSE: sparse}
    if keys[name] == WORDS:
        return {WORDS: [WORD[n in spec.sparse_layers] for n in range(spec.layers)]}
    if keys[name] == START:
        step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        if sparse != [n for n in range(sparse[0], sparse[-1] + 1) if not (n + 1) % step]:
            raise RefusedError(f"the layers with experts are {sparse}, the family has them at equal distances")
        return {START: sparse[0], END: sparse[-1], INTERVAL: step}
    if keys[name] != FIRST:
        return {LISTED: list(dense), STEP: 1}
    if dense != tuple(range(len(dense))):
        raise RefusedError(f"the layers without experts are {list(dense)}, the family has them only in front")
    return {FIRST: len(dense)}
