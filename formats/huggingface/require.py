"""Check a config.json against the table of its family: refuse a model that the table does not describe."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import SourceError, UnsupportedError, short
from formats.families import FAMILIES, family_of, find_family
from formats.families.family import Family
from formats.huggingface.nulls import require_values
from formats.huggingface.quantized import require_method
from formats.huggingface.rope import PARAMETERS, PLAIN, SCALING
from formats.huggingface.settings_table import keys_of, keys_read, rows_of
from formats.model import untabled

SYNONYMS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
"""Name of an activation: the usual name of the same function (transformers 5.23.0, activations.py ACT2CLS)."""

LAYER_CONFIG = "per_layer_config"
"""Config key by which transformers changes settings of single layers (5.23.0, integrations/heterogeneity)."""
OF_ALL: Mapping[str, Any] = {"is_causal": True, "kv_sharing_modes": None, "attention_chunk_size": None}
"""Config key that transformers reads of every model: the only value that tables describe, but of a family with such a
key of its own. With another value each token also sees the tokens after it, or layers share the keys of others, or
`generate` forgets tokens (transformers 5.23.0, masking_utils.py `create_causal_mask`, cache_utils.py
`get_layer_types_and_kwargs`)."""
WINDOW = "sliding_window"
"""Config key by which `generate` forgets tokens in every model without `layer_types`, also where its attention has no
window (as above)."""
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "num_attention_heads_per_layer")
"""Config key with a value for each layer (transformers 5.23.0, configuration_utils.py `validate_layer_type`, whose
`layer_types` are `layers_block_type` in configuration_zamba.py; configuration_laguna.py)."""


def class_names(config: Mapping[str, Any]) -> Any:
    """The `architectures` of a config, without the prefix `FSDP` that FSDP's wrapper leaves on a class.

    Only a whole prefix is removed: stripping the letters F, S, D and P would turn Phi3ForCausalLM into hi3ForCausalLM.
    """
    names = config.get("architectures")
    if not isinstance(names, list):
        return names
    return [name.removeprefix("FSDP") if isinstance(name, str) else name for name in names]


def require_class(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config that names another class of transformers than the one that the family's table describes.

    Raises:
        UnsupportedError: the config names a class without a table.
        SourceError: the config names the class of another family.
    """
    family, names = family_of(config, where), class_names(config)
    if names in ([family.architecture], [family.hub_class or family.architecture]):
        return
    others = [other.name for other in FAMILIES.values() if names == [other.hub_class or other.architecture]]
    if others:
        raise SourceError(
            f"{where} contradicts itself: the model type {family.name}, and the class of {others[0]}",
            "correct model_type or architectures, whichever is of another model",
        )
    if names:
        raise UnsupportedError(
            f"{where}: a model of the class {short(names)} has no table, only {family.architecture}: correct "
            "`architectures` if its tensors are the same"
        )


BIASES = {
    "qkv_bias": re.compile(r".*\.self_attn\.(?:[qkv]|q_a)_proj\.weight|.*\.self_attn\.kv_a_proj_with_mqa\.weight"),
    "output_bias": re.compile(r".*\.self_attn\.o_proj\.weight"),
    "mlp_bias": re.compile(r".*\.mlp\.(?:gate|up|down)_proj\.weight"),
}
"""Condition of layout: the weights that have a bias with it (modeling_llama.py, modeling_qwen3.py, 5.23.0)."""
BESIDE_LATENTS = ".q_proj.", ".kv_a_proj_with_mqa."
"""The first has no bias if the second is in the same layer (modeling_deepseek_v3.py, 5.23.0)."""
USUAL_BIASES = {"attention_bias": "qkv_bias output_bias", "mlp_bias": "mlp_bias"}
"""Config key: the conditions that it turns on in a family whose table has no biases."""


def require_biases(config: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Refuse tensors that lack biases which the config turns on.

    Raises:
        SourceError: biases are missing, which transformers would initialize anew.
    """
    family = find_family(config)
    for name, usual in USUAL_BIASES.items():
        if family is None:
            return
        conditions = family.biases[name][0] if name in family.biases else usual
        if config.get(name) is not True or not (name in family.biases or family.requires.get(name) is False):
            continue
        weights = [key for key in keys if any(BIASES[condition].fullmatch(key) for condition in conditions.split())]
        weights = [key for key in weights if ".q_proj." not in key or key.replace(*BESIDE_LATENTS) not in keys]
        biases = [key.removesuffix("weight") + "bias" for key in weights]
        lost = [key for key in biases if key not in keys]
        if lost:
            raise SourceError(
                f"{where} says {name} = True, and {len(lost)} of {len(biases)} biases are missing, such as {lost[0]}: "
                "transformers would make them up",
                "it is the config of another model",
            )


def require_table(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Refuse a config with settings that change what the model computes and that its family's table does not cover.

    Raises:
        UnsupportedError: the config has such a setting.
        SourceError: the config contradicts itself, or has null in a key that may not be null.
    """
    require_method(config, where)
    if config.get("text_config"):
        raise UnsupportedError(f"{where}: models with a text_config are not supported")
    for key, only in {**OF_ALL, **family.requires}.items():
        if key in family.own:
            continue
        value = config.get(key, only)
        same = SYNONYMS.get(str(value), value) == SYNONYMS.get(str(only), only)
        if not same:
            raise UnsupportedError(f"{where}: {key} = {short(value)} is not supported for {family.name}, only {only!r}")
    require_values(config, family, keys_read(family), where)
    known_keys = {*family.own, *(key for row in rows_of(family, config) for names in row.keys for key in names)}
    if config.get(LAYER_CONFIG) and LAYER_CONFIG not in known_keys:
        raise UnsupportedError(
            f"{where}: {LAYER_CONFIG}, settings of single layers, is not supported for {family.name}"
        )
    layer_types = [] if "layer_types" in known_keys else config.get("layer_types") or []
    usual = "indexed_attention" if "indexed" in family.traits else "full_attention"
    others = [kind for kind in layer_types if kind != usual] if isinstance(layer_types, list) else [layer_types]
    if others:
        raise UnsupportedError(f"{where}: layers of type {short(others[0])} are not supported for {family.name}")
    window = config.get(family.window, family.window_default) if family.window else None
    if layer_types and window is not None:  # AutoConfig takes a Mistral with the first for a Ministral
        raise SourceError(
            f"{where} contradicts itself: layer_types, by which no layer has a window, and {family.window} = "
            f"{short(window)} for all of them",
            "remove the one that the model was not trained with",
        )
    _require_full(config, family, where)
    _require_no_stray(config, family, known_keys, where)
    for key in family.keys.values():
        values = {name: short(config[name]) for name in key.split() if name in config}
        if len({*values.values()}) > 1:
            words = " and ".join(f"{name} = {value}" for name, value in values.items())
            raise SourceError(
                f"{where} contradicts itself: {words}", "remove the one that the model was not trained with"
            )


def _require_full(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Refuse a sliding window in a family whose last layers may have one; `layer_types` is not checked here.

    Raises:
        UnsupportedError: some layers have a window.
    """
    on = not family.switch or config.get(family.switch) not in (None, False)
    windowed = on and config.get("sliding_window", family.window_default) is not None
    if not windowed or not (family.full_until or family.switch):
        return
    key, assumed = family.full_until or ("", 0)
    if family.full_until and config.get("layer_types"):
        return
    layers, full = config.get("num_hidden_layers"), config.get(key, assumed)
    if type(layers) is int and not (type(full) is int and full >= layers):
        why = f"{key} = {short(full)} of {layers} layers" if key else f"{family.switch} = {config.get(family.switch)}"
        raise UnsupportedError(f"{where}: {why}: a sliding window is not supported for {family.name}")


def _require_no_stray(config: Mapping[str, Any], family: Family, known_keys: Collection[str], where: str) -> None:
    """Refuse a sliding window in a family without one, and rotary settings in a family without rotation.

    Raises:
        UnsupportedError: the config has either.
    """
    windowed = family.switch or family.full_until or WINDOW in known_keys or "layer_types" in known_keys
    if config.get(WINDOW) is not None and not windowed:
        raise UnsupportedError(
            f"{where}: {WINDOW} = {short(config[WINDOW])} is not supported for {family.name}: its attention has no "
            "window, and generation with transformers forgets the tokens before one",
            f"remove {WINDOW} if the model was trained without it",
        )
    for key in (PARAMETERS, SCALING) if family.rope_theta is None else ():
        settings = config.get(key) or PLAIN
        kind = settings.get("rope_type", settings.get("type")) if isinstance(settings, Mapping) else None
        if key not in known_keys and kind != "default":
            raise UnsupportedError(
                f"{where}: {key} of type {short(kind)} is not supported for {family.name}, which has no rotation"
            )


def require_copies(config: Mapping[str, Any], family: Family, values: Mapping[str, Any], where: str) -> None:
    """Refuse a config in which the copy of a setting has another value than the setting.

    Raises:
        SourceError: they differ.
    """
    for key, setting in family.copied.items():
        if key in config and config[key] != values[setting]:
            name = keys_of(family, config)[setting]
            raise SourceError(
                f"{where} contradicts itself: {name} = {short(values[setting])} and {key} = {short(config[key])}, and "
                "transformers builds models in which they are equal",
                f"remove {key}: transformers then copies {name}",
            )


def require_lengths(config: dict[str, Any], where: str) -> None:
    """Refuse a config in which a list of `PER_LAYER` has another length than the model has layers.

    transformers loads few such models. Some classes have values of the layers that predict further tokens in the list
    too (5.23.0, configuration_step3p7.py). The number of layers may follow from a list (configuration_nemotron_h.py).
    Code of a model's own may mean something else.

    Raises:
        SourceError: the lengths differ.
    """
    text = untabled.language(config)
    family, layers, further = find_family(text), text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if "auto_map" in config or type(layers) is not int:
        return
    counting = family.keys.get("layers", "").split() if family else []
    for key in (key for key in PER_LAYER if isinstance(text.get(key), list) and key not in counting):
        if len(text[key]) not in (layers, layers + (further if type(further) is int else 0)):
            raise SourceError(
                f"{where} contradicts itself: num_hidden_layers = {layers}, and {key} of {len(text[key])} layers",
                "correct the one that is wrong",
            )
