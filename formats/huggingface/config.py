"""The config.json of transformers 4 and 5: which key is which setting.

What has no key in the table is residue: it stays in the file that travels with the weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from formats.errors import SourceError, UnsupportedError, short
from formats.families import FAMILIES, family_named, family_of, find_family
from formats.families.family import Family
from formats.huggingface import moe_config
from formats.huggingface.nulls import require_rotary_values, require_values, tokens_beyond
from formats.huggingface.quantized import method_of
from formats.model.spec import LISTS, ModelSpec, Spec, Verbatim, checked, some_layers, whole
from formats.model.untabled import language

HUGGINGFACE = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Setting: config key. The rotary settings and sliding_window have rules of their own, below."""
LOCAL = "rope_local_base_freq"
"""The base of the layers with a sliding window, where a family has two."""
ROTATING = "rotary_dim"
"""How many elements of a head rotate, where a family says that."""
PARTIAL, SCALING = "partial_rotary_factor", "rope_scaling"
ROTARY = ("rope_theta", SCALING, "rotary_fraction")
ORIGINAL, ORIGINAL_OF = "original_max_position_embeddings", ("llama3", "yarn", "longrope")
"""A key beside the rotary settings that goes before theirs, and the types that have it (transformers 5.23.0,
modeling_rope_utils.py `standardize_rope_params`)."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""What `layer_types` calls a layer with a sliding window, and one without."""
NOPE_STEP = "no_rope_layer_interval"
"""How far the layers are apart that do not rotate, where no list says it (transformers models/smollm3, 5.23.0)."""

RELATIVE = {
    "layers": ("dense_layers", "nope_layers", "full_layers"),
    "expert_ffn": ("shared_ffn",),
    "head_dim": ("rotary_fraction",),
}
"""Setting: those that a config may spell in terms of it, such as a number of experts for what is shared. Where it
changes, the same spelling means something else."""

DROPOUTS = {
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "resid_pdrop", "residual_dropout"),
}
"""What Megatron and GPT-NeoX call it: config keys. Megatron takes both from a checkpoint, whatever its flags say
(megatron/training/checkpointing.py `load_args_from_checkpoint`)."""

SYNONYMS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
"""Other names of an activation that compute the same (transformers 5.23.0, activations.py ACT2CLS)."""

OF_ALL: Mapping[str, Any] = {"is_causal": True}
"""Config keys that transformers reads of every model, and the only value with a table: with another one each token sees
those after it too (transformers 5.23.0, masking_utils.py `create_causal_mask`)."""

OF_NO_MODEL = (
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "layer_types",
    "_name_or_path",
)
"""Keys that say nothing about the computation, or are checked above."""


def _keys(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """The config key of each setting of a family, as a config spells it; those with rules of their own apart."""
    apart = (*ROTARY, *LISTS, *moe_config.DERIVED)
    keys = {name: key.split() for name, key in {**HUGGINGFACE, **family.keys}.items() if key and name not in apart}
    return {name: next((key for key in spellings if key in config), spellings[0]) for name, spellings in keys.items()}


def class_names(config: Mapping[str, Any]) -> Any:
    """The `architectures` of a config, without the prefix that FSDP's wrapper leaves on a class.

    It is taken off as a prefix: stripping the letters F, S, D and P would turn Phi3ForCausalLM into hi3ForCausalLM.
    """
    names = config.get("architectures")
    if not isinstance(names, list):
        return names
    return [name.removeprefix("FSDP") if isinstance(name, str) else name for name in names]


def require_class(config: Mapping[str, Any], where: str) -> None:
    """A table describes one class of transformers; a model of another one has other tensors.

    Raises:
        UnsupportedError: the config names another class.
        SourceError: it names that of another family.
    """
    family, names = family_of(config, where), class_names(config)
    others = [one.name for one in FAMILIES.values() if names == [one.architecture]]
    if others and names != [family.architecture]:
        raise SourceError(f"{where} contradicts itself: the model type {family.name}, and the class of {others[0]}")
    if names and names != [family.architecture]:
        raise UnsupportedError(
            f"{where}: a model of the class {short(names)} has no table, only {family.architecture}: correct "
            "`architectures` if its tensors are the same"
        )


BIASES = {
    "qkv_bias": re.compile(r".*\.self_attn\.[qkv]_proj\.weight"),
    "output_bias": re.compile(r".*\.self_attn\.o_proj\.weight"),
    "mlp_bias": re.compile(r".*\.mlp\.(?:gate|up|down)_proj\.weight"),
}
"""Condition of layout: the weights that then have a bias (modeling_llama.py and modeling_qwen3.py, 5.23.0)."""
USUAL_BIASES = {"attention_bias": "qkv_bias output_bias", "mlp_bias": "mlp_bias"}
"""Config key: what it turns on in a family whose table has no biases."""


def require_biases(config: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """The biases that a config asks for are there.

    Raises:
        SourceError: they are not: transformers would make them up.
    """
    family = find_family(config)
    for name, usual in USUAL_BIASES.items():
        if family is None:
            return
        chosen = family.biases[name][0] if name in family.biases else usual
        if config.get(name) is not True or not (name in family.biases or family.requires.get(name) is False):
            continue
        weights = [key for key in keys if any(BIASES[one].fullmatch(key) for one in chosen.split())]
        biases = [key.removesuffix("weight") + "bias" for key in weights]
        lost = [key for key in biases if key not in keys]
        if lost:
            raise SourceError(
                f"{where} says {name} = True, and {len(lost)} of {len(biases)} biases are missing, such as {lost[0]}: "
                "transformers would make them up",
                "it is the config of another model",
            )


def from_huggingface(config: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> ModelSpec:
    """Read a config.json of transformers 4 or 5.

    Args:
        config: the parsed file.
        settings: values that overrule it.
        where: what to call the file in an error.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
    """
    family = family_of(config, where)
    for key in ("quantization_config", "text_config"):
        quantized = key == "quantization_config"
        if config.get(key) and not (quantized and method_of(config)):
            known = ", only MXFP4 and FP8 with _scale_inv" if quantized else ""
            raise UnsupportedError(f"{where}: models with a {key} are not supported{known}")
    for key, only in {**OF_ALL, **family.requires}.items():
        value = config.get(key, only)
        same = SYNONYMS.get(str(value), value) == SYNONYMS.get(str(only), only)
        if not same:
            raise UnsupportedError(f"{where}: {key} = {short(value)} is not supported for {family.name}, only {only!r}")
    require_values(config, family, _read(family), where)
    apart = {*family.own, *family.keys.values()}
    layer_types = [] if "layer_types" in apart else config.get("layer_types") or []
    others = (
        [kind for kind in layer_types if kind != "full_attention"] if isinstance(layer_types, list) else [layer_types]
    )
    if others:
        raise UnsupportedError(f"{where}: layers of type {short(others[0])} are not supported for {family.name}")
    _require_full(config, family, where)
    for key in family.keys.values():
        said = [f"{one} = {short(config[one])}" for one in key.split() if one in config]
        if len({one.partition(" = ")[2] for one in said}) > 1:
            raise SourceError(f"{where} contradicts itself: {' and '.join(said)}")
    values, notes = _values(config, family, where)
    return checked(values | {"notes": tuple(notes)} | dict(settings), where)


def _require_full(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Every layer has full attention, in a family whose last ones may have a window; `layer_types` is checked apart.

    Raises:
        UnsupportedError: some have a window.
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
        told = f"{key} = {short(full)} of {layers} layers" if key else f"{family.switch} = {config.get(family.switch)}"
        raise UnsupportedError(f"{where}: {told}: a sliding window is not supported for {family.name}")


def _values(config: Mapping[str, Any], family: Family, where: str) -> tuple[dict[str, Any], list[str]]:
    """Every setting that a config says, and what had to come from the defaults of transformers."""
    notes: list[str] = []

    def get(key: str, fallback: Any) -> Any:
        if config.get(key) is not None:
            return config[key]
        notes.append(f"{key} = {fallback} (not in {where}: the default of transformers for {family.name})")
        return fallback

    values: dict[str, Any] = {"family": family.name}
    keys = _keys(family, config)
    values |= {name: config.get(key) for name, key in keys.items()}
    values |= {name: get(key, family.defaults[name]) for name, key in keys.items() if name in family.defaults}
    values |= moe_config.found(family.keys, config, values, family.defaults, where)
    heads, hidden, groups = values["heads"], values["hidden"], keys.get("kv_heads")
    if groups is None:
        values["kv_heads"] = family.defaults.get("kv_heads", heads)
    elif family.mha or groups in config:
        values["kv_heads"] = get(groups, heads)
    if family.ffn_ratio and type(hidden) is int:
        values["ffn"] = get(keys["ffn"], family.ffn_ratio * hidden)
    if values.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads:
        said = keys.get("head_dim") in config  # that it has none
        values["head_dim"] = (None if said else family.head_dim) or hidden // heads
    if "tied" not in family.defaults:
        values["tied"] = get(keys["tied"], False)
    values["biases"] = _biases(config, family, where)
    values["own"] = {key: config.get(key, default) for key, default in family.own.items()}
    if LOCAL in family.own and _layered(config):
        values["own"][LOCAL] = config["rope_parameters"]["sliding_attention"].get("rope_theta", family.own[LOCAL])
    values |= dict(zip(ROTARY, _rope(config, family, get, where), strict=True))
    if "nope_layers" in family.keys:
        values["nope_layers"] = _nope_layers(config, family.keys["nope_layers"], some_layers(values["layers"]), where)
    values["sliding_window"] = None
    if family.window:
        values["sliding_window"] = config.get(family.window, family.window_default)
        if family.window not in config:
            notes.append(f"{family.window} = {family.window_default} (not in {where}: the default of transformers)")
    if "full_layers" in family.keys:
        assumed = family.defaults.get("full_layers")
        values["full_layers"] = _full_layers(config, family.keys["full_layers"], assumed, values["layers"], where)
    return values, notes


def _biases(config: Mapping[str, Any], family: Family, where: str) -> tuple[str, ...]:
    """The biases that a config turns on.

    Raises:
        UnsupportedError: a key is neither true nor false.
    """
    said = {key: config.get(key, usual) for key, (_, usual) in family.biases.items()}
    for key, value in said.items():
        if not isinstance(value, bool):
            raise UnsupportedError(f"{where}: {key} = {short(value)} is neither true nor false")
    return family.biases_of(said)


def _spelled_biases(spec: ModelSpec, family: Family) -> dict[str, bool]:
    return {key: set(names.split()) <= set(spec.biases) for key, (names, _) in family.biases.items()}


def _rope(config: Mapping[str, Any], family: Family, get: Any, where: str) -> tuple[Any, dict[str, Any] | None, Any]:
    """The rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    if family.rope_theta is None:
        return None, None, None
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_scaling") not in (None, {}, parameters):  # transformers 5.23.0 heeds it, and drops the other
        raise SourceError(f"{where} has rope_parameters and a rope_scaling that differs", "remove one of them")
    if not parameters and config.get("rope_parameters") is None and SCALING in family.defaults:
        parameters = get("rope_parameters", family.defaults[SCALING])
    if LOCAL in family.own and _layered(config):
        parameters, sliding = parameters["full_attention"], parameters["sliding_attention"]
        require_rotary_values(sliding, where)
        if set(sliding) - {"rope_theta", "rope_type"} or sliding.get("rope_type", "default") != "default":
            raise UnsupportedError(f"{where}: scaled rotary embeddings of a sliding window are not supported")
    if not isinstance(parameters, dict):
        raise SourceError(f"{where}: its rotary settings are {short(parameters)}, they should be a map")
    parameters = dict(parameters)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError(f"{where}: rotary settings that differ between layers are not supported")
    require_rotary_values(parameters, where)
    theta = parameters.pop("rope_theta", None) or get(family.keys.get("rope_theta", "rope_theta"), family.rope_theta)
    old_type = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", old_type)
    rope_type = "longrope" if rope_type == "su" else rope_type  # its name when Phi-3 came out
    if rope_type in ORIGINAL_OF and ORIGINAL in config:
        inner = parameters.setdefault(ORIGINAL, config[ORIGINAL])
        if inner != config[ORIGINAL]:
            said = f"{ORIGINAL} = {short(config[ORIGINAL])}, and {short(inner)} in its rotary settings"
            raise SourceError(f"{where} contradicts itself: {said}", "transformers takes the first; correct either")
    fraction = parameters.pop(PARTIAL, config.get(PARTIAL))
    whole_heads = PARTIAL in config and family.keys.get("rotary_fraction") == PARTIAL
    if fraction is None and whole_heads:  # transformers takes null for all of a head, not for its default
        fraction = 1.0
    if fraction is None and ROTATING in family.own and config.get(ROTATING) is not None:
        width = whole(config.get("head_dim") or family.head_dim, "head_dim", where)
        fraction = whole(config[ROTATING], ROTATING, where) / width
    if "rotary_fraction" in family.keys:
        fraction = fraction or get(family.keys["rotary_fraction"], family.defaults["rotary_fraction"])
    elif fraction not in (None, 1.0):
        raise UnsupportedError(f"{where}: partial_rotary_factor is not supported for {family.name}")
    else:
        fraction = None
    return theta, None if rope_type == "default" else {"rope_type": rope_type, **parameters}, fraction


def _nope_layers(config: Mapping[str, Any], key: str, layers: range, where: str) -> tuple[int, ...]:
    """The layers in which nothing rotates: of the list under `key` those with a 0.

    Raises:
        SourceError: the config says nothing of some layers.
    """
    rotates = config.get(key)
    if rotates is None:
        step = whole(config.get(NOPE_STEP, 4), NOPE_STEP, where)
        return tuple(layer for layer in layers if (layer + 1) % step == 0)
    if not isinstance(rotates, list) or len(rotates) < len(layers) or any(one not in (0, 1) for one in rotates):
        raise SourceError(f"{where} says {key} = {short(rotates)}, it should be 0 or 1 for each layer")
    return tuple(layer for layer in layers if not rotates[layer])


def _full_layers(config: Mapping[str, Any], key: str, assumed: Any, layers: Any, where: str) -> Any:
    """The layers that no sliding window holds for.

    Raises:
        SourceError: the config says something else than whether there is one in each layer.
    """
    kinds = config.get(key)
    if kinds is None and assumed is not None:
        return assumed
    if not isinstance(kinds, list) or len(kinds) != layers or any(one not in (SLIDING, FULL) for one in kinds):
        raise SourceError(f"{where} says {key} = {short(kinds)}, it should be {SLIDING} or {FULL} for each layer")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)


def _layered(config: Mapping[str, Any]) -> bool:
    """Whether the rotary settings are those of Gemma 3 in transformers 5: one map for each kind of attention."""
    found = config.get("rope_parameters")
    kinds = {"full_attention", "sliding_attention"}
    return isinstance(found, dict) and set(found) == kinds and all(isinstance(one, dict) for one in found.values())


def dropouts(config: Mapping[str, Any]) -> dict[str, float]:
    """What a training drops out, in Megatron's terms, as far as a config (or the yml of GPT-NeoX) says."""
    said = {name: [config[key] for key in keys if key in config] for name, keys in DROPOUTS.items()}
    return {name: values[0] for name, values in said.items() if values and type(values[0]) in (int, float)}


def _read(family: Family) -> set[str]:
    """The keys that the table of a family reads, those of its rotary embedding apart."""
    keys = {*" ".join({**HUGGINGFACE, **family.keys}.values()).split(), *family.requires, *family.marks}
    keys |= {*family.biases, *family.own, family.switch, family.window}
    keys |= {NOPE_STEP} if "nope_layers" in family.keys else set()
    return keys | (moe_config.BESIDE if "dense_layers" in family.keys else set())


def residue(config: Mapping[str, Any]) -> list[str]:
    """The keys of a config that no table knows: they are kept as they are, and assumed to leave the weights alone."""
    known = {*HUGGINGFACE.values(), "rope_theta", "rope_scaling", "rope_parameters", *OF_ALL, *OF_NO_MODEL}
    family = find_family(config)
    if family:
        known |= _read(family)
    return sorted(set(config) - known - ({"quantization_config"} if method_of(config) else set()))


def _unwrapped(base: Mapping[str, Any]) -> dict[str, Any]:
    return dict(base) | ({"architectures": class_names(base)} if "architectures" in base else {})


def to_huggingface(spec: Spec, base: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a spec: `base` with every setting that differs put in its place.

    With an empty base the spelling is that of transformers 4, which version 5 reads too.
    """
    if isinstance(spec, Verbatim):
        config = deepcopy(_unwrapped(base))
        if bool(config.get("tie_word_embeddings")) != spec.tied:
            config["tie_word_embeddings"] = spec.tied
        inner = language(config)
        if spec.vocab not in (None, inner.get("vocab_size")):
            for held in (inner, *([config] if "vocab_size" in config else [])):
                held["vocab_size"] = spec.vocab
        return config
    family = family_named(spec.family)
    config = _unwrapped(base)
    if not base:
        own = {key: value for key, value in spec.own.items() if value != family.own[key]}
        kind = family.model_type or family.name
        fixed = {**family.requires, **family.marks, **({family.switch: False} if family.switch else {})}
        fixed |= _spelled_biases(spec, family)
        if family.full_until and not family.switch and spec.layers > family.full_until[1]:
            fixed[family.full_until[0]] = spec.layers
        config = {"architectures": [family.architecture], "model_type": kind, **fixed, **own}
    known = _values(config, family, "the config")[0] if base else {}
    keys = _keys(family, config)
    derived = [name for name in moe_config.DERIVED if name in family.keys]
    names = (*keys, *derived, *ROTARY, "nope_layers", "full_layers", "sliding_window")
    changed = {name for name in names if name not in known or known[name] != getattr(spec, name)}
    changed |= {name for other in changed.intersection(RELATIVE) for name in RELATIVE[other] if name in family.keys}
    for name, key in keys.items():
        if name in changed:
            config[key] = getattr(spec, name)
    if known.get("biases", spec.biases) != spec.biases:
        config |= _spelled_biases(spec, family)
    for name in (name for name in derived if name in changed):  # in their order, not that of a set
        config |= moe_config.spelled(family.keys, name, spec)
    if spec.nope_layers is not None and "nope_layers" in changed:
        config[family.keys["nope_layers"]] = [int(layer not in spec.nope_layers) for layer in range(spec.layers)]
    if spec.full_layers is not None and "full_layers" in changed:
        config[family.keys["full_layers"]] = [FULL if n in spec.full_layers else SLIDING for n in range(spec.layers)]
    if family.window and "sliding_window" in changed:
        config[family.window] = spec.sliding_window
    if changed & set(ROTARY) and family.rope_theta is not None:
        if "rope_parameters" in config:
            fraction = {} if spec.rotary_fraction is None else {"partial_rotary_factor": spec.rotary_fraction}
            scaling = spec.rope_scaling or {"rope_type": "default"}
            rotary = {"rope_theta": spec.rope_theta, **fraction, **scaling}
            layered = LOCAL in family.own and _layered(config)
            config["rope_parameters"] = {**config["rope_parameters"], "full_attention": rotary} if layered else rotary
        else:
            config |= {
                family.keys.get(name, name): getattr(spec, name)
                for name in ROTARY
                if name != "rotary_fraction" or name in family.keys
            }
            if SCALING in family.defaults:
                config[SCALING] = spec.rope_scaling or {"rope_type": "default"}
    return config | (tokens_beyond(config, family, spec.vocab) if "vocab" in changed else {})
