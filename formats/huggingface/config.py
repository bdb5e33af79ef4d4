"""Convert the config.json of transformers 4 and 5 to a spec and back.

A key that no table knows is residue: it stays in the config.json that is written beside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from formats.errors import short
from formats.families import family_named, family_of, find_family
from formats.families.family import Family
from formats.huggingface.nulls import MEANT, tokens_beyond
from formats.huggingface.quantized import method_of
from formats.huggingface.require import OF_ALL, WINDOW, class_names, require_copies, require_table
from formats.huggingface.rope import ORIGINAL, PARAMETERS, SCALING, THETA, Rope, assumed, note_default, own_value
from formats.huggingface.settings_table import USUAL, keys_of, keys_read, rows_of
from formats.model.checks import checked
from formats.model.codec import Context, read, write
from formats.model.settings import LISTS, corrected
from formats.model.spec import ModelSpec, Spec, Verbatim
from formats.model.untabled import language

RELATIVE = {
    "layers": LISTS,
    "ffn": ("reusing_ffn",),
    "kv_heads": ("window_kv_heads",),
    "full_layers": ("full_head_dim", "full_kv_heads"),
    "hidden": ("state_dim",),
    "state_heads": ("state_dim",),
    "expert_ffn": ("shared_ffn",),
    "head_dim": ("rope",),
}
"""Setting: the settings that a config may spell relative to it, such as the width of shared experts as a number of
experts. Where the setting changes, the same spelling means another value."""
APART = (*LISTS, "shared_ffn", "rope_theta", "rotary_fraction", "full_head_dim")
"""Settings whose codecs read the defaults of transformers themselves."""

DROPOUTS = {
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "resid_pdrop", "residual_dropout"),
}
"""Name of a dropout in Megatron and GPT-NeoX: the config keys for it. Megatron takes both from a checkpoint, whatever
its flags are (megatron/training/checkpointing.py `load_args_from_checkpoint`)."""

OF_NO_MODEL = (
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "layer_types", "_name_or_path",
)  # fmt: skip
"""Keys that do not affect the computation, or are checked separately (`require_table`)."""


def from_huggingface(config: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> ModelSpec:
    """Read a config.json of transformers 4 or 5.

    Args:
        config: the parsed file.
        settings: values that overrule those of the file.
        where: what to call the file in an error.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
    """
    family = family_of(config, where)
    require_table(config, family, where)
    values, notes = _values(config, family, where)
    rope = values.pop("rope")._asdict() if "rope" in values else {}
    return checked(values | rope | {"notes": tuple(notes)} | dict(settings), corrected(where, settings))


def _values(config: Mapping[str, Any], family: Family, where: str) -> tuple[dict[str, Any], list[str]]:
    """Every setting of a config, and notes on the settings that come from the defaults of transformers."""
    context = Context({"family": family.name}, where, config, [])
    filled, keys = _with_defaults(family, context), keys_of(family, config)
    values = read(rows_of(family, config), filled, (), where, context.values, context.notes)
    require_copies(config, family, values, where)
    heads, hidden = values["heads"], values["hidden"]
    values.setdefault("kv_heads", family.defaults.get("kv_heads", heads))
    if values.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads:
        silent = keys.get("head_dim") not in config  # null: hidden / heads, not the default of the family
        values["head_dim"] = (family.head_dim if silent else None) or hidden // heads
        if "head_dim" not in keys:  # the class may rotate by it all the same, as GPT-NeoX and Falcon do
            values["head_dim"] = config.get("head_dim") or values["head_dim"]
    values["own"] = {key: own_value(key, usual, config) for key, usual in family.own.items()}
    if family.window and family.window not in config:
        note_default(family.window, family.window_default, context)
    return values, context.notes


def _with_defaults(family: Family, context: Context) -> dict[str, Any]:
    """The config, with absent keys added that have a default in transformers; each is noted in `context.notes`."""
    filled, keys = dict(context.file), keys_of(family, context.file)
    for name in (name for name in keys if name in family.defaults and name not in APART):
        if keys[name] in MEANT and keys[name] in context.file:
            continue
        filled[keys[name]] = assumed(keys[name], family.defaults[name], context)
    if "kv_heads" in keys and (family.mha or keys["kv_heads"] in context.file):
        filled[keys["kv_heads"]] = assumed(keys["kv_heads"], filled.get(keys["heads"]), context)
    if family.ffn_ratio and type(filled.get(keys["hidden"])) is int:
        filled[keys["ffn"]] = assumed(keys["ffn"], family.ffn_ratio * filled[keys["hidden"]], context)
    if "tied" not in family.defaults:
        filled[keys["tied"]] = assumed(keys["tied"], False, context)
    return ({family.window: family.window_default} if family.window else {}) | filled


def dropouts(config: Mapping[str, Any]) -> dict[str, float]:
    """The dropout probabilities in a config (or in the yml of GPT-NeoX), by the names of Megatron."""
    values_of = {name: [config[key] for key in keys if key in config] for name, keys in DROPOUTS.items()}
    return {name: values[0] for name, values in values_of.items() if values and type(values[0]) in (int, float)}


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of a config that no table knows: they are kept as they are, and assumed not to affect the weights."""
    known = {*USUAL.values(), THETA, SCALING, PARAMETERS, WINDOW, *OF_ALL, *OF_NO_MODEL}
    family = find_family(config)
    if family:
        known |= keys_read(family)
    return sorted(set(config) - known - ({"quantization_config"} if method_of(config) else set()))


def config_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The differences of two configs of a model without a table, as `key: one | other`; any key may matter.

    A key that is null counts as absent, but for those with another default in every model (`OF_ALL`). A key of a config
    that is nested follows that of the config, as in `text_config.hidden_size`.
    """
    differences = list[str]()
    for name in dict.fromkeys([*first, *second]):
        ours, theirs = (config.get(name, OF_ALL.get(name)) for config in (first, second))
        if name == "use_cache" or (name in OF_NO_MODEL and name != "layer_types"):
            continue
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            differences += [f"{name}.{line}" for line in config_differences(ours, theirs)]
        elif ours != theirs:
            differences.append(f"{name}: {short(ours)} | {short(theirs)}")
    return differences


def _unwrapped(base: Mapping[str, Any]) -> dict[str, Any]:
    return dict(base) | ({"architectures": class_names(base)} if "architectures" in base else {})


def to_huggingface(spec: Spec, base: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a spec: `base` with every setting that differs replaced.

    With an empty base the spelling is that of transformers 4, which version 5 reads too.

    Raises:
        UnsupportedError: the config of the family's class cannot say a setting.
    """
    if isinstance(spec, Verbatim):
        config = deepcopy(_unwrapped(base))
        if bool(config.get("tie_word_embeddings")) != spec.tied:
            config["tie_word_embeddings"] = spec.tied
        inner = language(config)
        if spec.vocab not in (None, inner.get("vocab_size")):
            for part in (inner, *([config] if "vocab_size" in config else [])):
                part["vocab_size"] = spec.vocab
        return config
    family = family_named(spec.family)
    rope = Rope(spec.rope_theta, spec.rope_scaling, spec.rotary_fraction)
    values = {**vars(spec), "rope": rope, "dense_layers": spec.dense_layers or ()}
    config = _unwrapped(base) if base else _fixed(spec.layers, family, values)
    table = rows_of(family, config)
    known = _values(config, family, "the config")[0] if base else {}
    changed = {row.setting for row in table if not base or known[row.setting] != values[row.setting]}
    relative = {name for other in changed.intersection(RELATIVE) for name in RELATIVE[other]}
    if "max_positions" in changed and ORIGINAL in (spec.rope_scaling or {}):  # which it is where no key says it
        changed.add("rope")
    changed |= relative if "rotary_fraction" in family.keys else relative - {"rope"}
    config |= write((row for row in table if row.setting in changed), values, (), "the config", config)
    config |= {key: values[setting] for key, setting in family.copied.items() if key in config}
    require_table(config, family, "the config that is written")
    return config | (tokens_beyond(config, family, spec.vocab) if "vocab" in changed else {})


def _fixed(layers: int, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the configs of all models of a family have, those of the biases, and those of `own`."""
    fixed = {**family.requires, **family.marks, **({family.switch: False} if family.switch else {})}
    fixed |= write((row for row in rows_of(family, {}) if row.setting == "biases"), values, (), "the config")
    if family.full_until and not family.switch and layers > family.full_until[1]:
        fixed[family.full_until[0]] = layers
    own = {key: value for key, value in values["own"].items() if value != family.own[key]}
    return {"architectures": [family.architecture], "model_type": family.model_type or family.name, **fixed, **own}
