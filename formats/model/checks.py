"""Checks whether settings make a model that has a layout here: a row for each bound on several settings together.

The bounds of a single setting follow from its type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from formats.errors import ContradictionError, SourceError, UnsupportedError, VitruvianError, short
from formats.families import family_named
from formats.families.family import Family
from formats.layout.table import MTP
from formats.model.codec import Row
from formats.model.settings import CHOICES, EVERY, FIXED, LISTS, NEEDED, TYPES
from formats.model.spec import ModelSpec, differences
from formats.model.values import KINDS, MOST_EXPERTS, MOST_LAYERS, positive_int, some_layers


class Check(NamedTuple):
    """A row: when a model `m` of a family is wrong, the error and its text, and the trait of the families checked."""

    error: type[VitruvianError]
    wrong: Callable[[ModelSpec, Family], object]
    sentence: str
    trait: str = ""


def _windowed(m: ModelSpec) -> bool:
    """Whether some layers have a sliding window. Without `layer_types`, classes that have that key assume some."""
    if "layer_types" in m.own:
        return m.own["layer_types"] is None or "sliding_attention" in m.own["layer_types"]
    return m.full_layers not in (None, (*range(m.layers),))


def _produced(m: ModelSpec) -> bool:
    """Whether layers with a sliding window, and layers without, each include one with keys and values of its own."""
    full, reusing = {*(m.full_layers or ())}, {*(m.reusing_layers or ())}
    own = {layer in full for layer in range(m.layers) if layer not in reusing}
    return not reusing or own == {layer in full for layer in range(m.layers)}


def _state_width(m: ModelSpec) -> object:
    """Elements of all heads of a state space, as the config says apart from the heads; None where it does not."""
    expansion = m.own.get("mamba_expand", m.own.get("expand"))
    return m.own.get("mamba_d_ssm", expansion * m.hidden if type(expansion) in (int, float) else expansion)


def _group(m: ModelSpec) -> int:
    """Number of experts in a group of a router."""
    return (m.experts or 0) // (m.router_groups or 1)


# fmt: off
CHECKS = (
    Check(SourceError, lambda m, _: m.layers > MOST_LAYERS, "{m.layers} layers are no model"),
    Check(SourceError, lambda m, _: m.heads % m.kv_heads,
          "{m.heads} heads do not divide into {m.kv_heads} key/value groups"),
    Check(SourceError, lambda m, _: any(m.heads % groups for groups in (m.full_kv_heads, m.window_kv_heads) if groups),
          "{m.heads} heads do not divide into {m.full_kv_heads} key/value groups of layers without a window, or "
          "{m.window_kv_heads} of those with one"),
    Check(SourceError, lambda m, _: not _produced(m),
          "layers {m.reusing_layers} reuse keys and values, and no layer of their kind before them has some"),
    Check(UnsupportedError, lambda m, _: (m.full_head_dim or 0) % 2,
          "a head dimension of {m.full_head_dim} is odd, and no table here has such heads"),
    Check(UnsupportedError, lambda m, _: m.head_dim % 2,
          "a head dimension of {m.head_dim} is odd, and no table here has such heads"),
    Check(UnsupportedError, lambda m, family: family.rope_theta is None and (m.rope_theta or m.rope_scaling),
          "a {m.family} has no rotary embedding"),
    Check(UnsupportedError, lambda m, family: not family.takes(m.rope_scaling),
          "a {m.family} has no rope scaling {m.rope_scaling[rope_type]}"),
    Check(UnsupportedError, lambda m, family: m.tied and family.requires.get("tie_word_embeddings") is False,
          "the head of a {m.family} is never tied"),
    Check(SourceError, lambda m, _: (m.rotary_fraction or 0) > 1,
          "rotary_fraction = {m.rotary_fraction} is more than all of a head"),
    Check(UnsupportedError, lambda m, _: int(m.head_dim * (m.rotary_fraction or 0)) % 2,
          "rotary_fraction = {m.rotary_fraction} turns an odd number of a head's {m.head_dim} elements, which is done "
          "in different ways"),
    Check(UnsupportedError, lambda m, family: m.sliding_window and not family.window,
          "a {m.family} has no sliding window"),
    Check(SourceError, lambda m, family: not m.sliding_window and family.window and _windowed(m),
          "it has layers with a sliding window, and does not say how wide that is"),
    Check(UnsupportedError, lambda m, _: not m.sparse_layers,
          "none of {m.layers} layers has experts, that is no {m.family}", "moe"),
    Check(SourceError, lambda m, _: (m.experts or 0) * m.layers > MOST_EXPERTS,
          "{m.experts} experts in each of {m.layers} layers are no model", "moe"),
    Check(SourceError, lambda m, _: (m.top_k or 0) > (m.experts or 0),
          "{m.top_k} of {m.experts} experts make no router", "moe"),
    Check(SourceError, lambda m, _: (m.experts or 0) % (m.router_groups or 1),
          "{m.experts} experts do not divide into {m.router_groups} groups", "moe"),
    Check(SourceError, lambda m, _: (m.router_top_groups or 1) > (m.router_groups or 1),
          "{m.router_top_groups} of {m.router_groups} groups of experts make no router", "moe"),
    Check(SourceError, lambda m, family: family.router == "sigmoid" and _group(m) < 2 <= (m.router_groups or 1),
          "{m.experts} experts in {m.router_groups} groups are no router: a sigmoid's groups are ranked by two experts",
          "moe"),
    Check(SourceError, lambda m, _: (m.top_k or 0) > (m.router_top_groups or 1) * _group(m),
          "a token's {m.top_k} experts are not in {m.router_top_groups} of {m.router_groups} groups of {m.experts}",
          "moe"),
    Check(UnsupportedError, lambda m, _: m.kv_heads != m.heads or (m.rope_dim or 0) % 2,
          "{m.heads} heads in {m.kv_heads} groups, of which {m.rope_dim} elements rotate, are not supported with "
          "latents", "latent"),
    Check(UnsupportedError, lambda m, _: not m.query_rank, "queries without a latent have no indexer here", "indexed"),
    Check(SourceError, lambda m, _: (m.rope_dim or 0) > (m.index_dim or 0),
          "{m.rope_dim} elements of an indexer's {m.index_dim} cannot rotate", "indexed"),
    Check(SourceError, lambda m, _: 0 in (m.shared_index_layers or ()),
          "the first layer has no indexer, and none is before it", "indexed"),
    Check(UnsupportedError, lambda m, _: not 0 < len(m.recurrent_layers or ()) < m.layers,
          "layers {m.recurrent_layers} of {m.layers} have linear attention, and a {m.family} mixes both", "recurrent"),
    Check(SourceError, lambda m, _: (m.linear_value_heads or 0) % (m.linear_key_heads or 1),
          "{m.linear_value_heads} value heads of linear attention do not divide over {m.linear_key_heads} key heads",
          "recurrent"),
    Check(SourceError, lambda m, _: (m.state_heads or 0) % (m.state_groups or 1),
          "{m.state_heads} heads of state spaces do not divide into {m.state_groups} groups", "state"),
    Check(SourceError, lambda m, _: _state_width(m) not in (None, (m.state_heads or 0) * (m.state_dim or 0)),
          "{m.state_heads} heads of state spaces with {m.state_dim} elements each are not as wide as the config says: "
          "mamba_d_ssm, or else mamba_expand (expand) times the hidden size of {m.hidden}", "state"),
    Check(SourceError, lambda m, _: {*(m.state_layers or ())} & {*(m.mlp_layers or ())},
          "layers {m.state_layers} have state spaces, and layers {m.mlp_layers} are an MLP: some are both", "state"),
)
# fmt: on


def checked(values: Mapping[str, Any], where: str) -> ModelSpec:
    """Build a spec from values that were read; each needed value has to be present and valid.

    Args:
        values: the settings by name, with the `family`, and `own`, `biases` and `notes` where there are some.
        where: name of the file that the values are from, for errors.

    Raises:
        SourceError: a setting is missing or invalid; the message names the flag that supplies the setting.
        UnsupportedError: the settings make a model that has no layout here.
    """
    family = family_named(values["family"])
    needed = {*NEEDED}.intersection((*EVERY, *family.keys)) | ({"rope_theta"} if family.rope_theta else set())
    settings: dict[str, Any] = {name: values.get(name) for name in TYPES}
    for name, value in settings.items():
        if name not in LISTS and (value is not None or name in needed):
            settings[name] = KINDS[TYPES[name]](value, name, where)
    settings |= layers_of(values, where)
    foreign = [name for name in CHOICES if settings[name] is not None and name not in family.keys]
    if foreign:
        raise UnsupportedError(f"{where}: {foreign[0]} is fixed for {family.name}")
    further = {name: values[name] for name in ("own", "biases", "mtp_layers", "notes") if name in values}
    spec = ModelSpec(family=family.name, **settings, **further)
    for check in CHECKS:
        if (not check.trait or check.trait in family.traits) and check.wrong(spec, family):
            raise check.error(f"{where}: {check.sentence.format(m=spec)}")
    if spec.mtp_layers and not any(MTP in rule.conditions for rule in family.tensors):
        raise UnsupportedError(f"{where}: a {family.name} with a layer that predicts further tokens has no table here")
    for reason in fixed_otherwise(family, settings, where):
        raise UnsupportedError(f"{where}: {reason}")
    return spec


def require_same_settings(
    spec: ModelSpec, base: ModelSpec, both: str, columns: str, may_differ: Collection[str] = ()
) -> None:
    """Refuse a config that contradicts the settings of the format that it travels with.

    Args:
        spec: the model as the format has it.
        base: the model as the config has it.
        both: what to call the two in the error.
        columns: what to call the two in the table of differences.
        may_differ: settings in which they may differ.

    Raises:
        ContradictionError: they differ in another setting.
    """
    contradictions = [line for line in differences(spec, base) if line.partition(":")[0] not in may_differ]
    hint = "decide with --set NAME=VALUE, or give the right config with --config"
    require_no_contradictions(contradictions, both, columns, hint)


def require_no_contradictions(differing: Iterable[str], both: str, columns: str, hint: str) -> None:
    """Refuse two descriptions of one model that differ, as `name: one | other`.

    Raises:
        ContradictionError: they differ.
    """
    if lines := [*differing]:
        raise ContradictionError(f"{both} contradict each other ({columns}): {'; '.join(lines)}", hint)


def layers_of(values: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...] | None]:
    """The settings in `LISTS`, with layers sorted and without duplicates.

    Raises:
        SourceError: a setting names numbers that are no layers of the model.
    """
    numbers, layers = some_layers(values.get("layers")), dict[str, tuple[int, ...] | None]()
    for name in LISTS:
        value = values.get(name)
        if value is not None and not (
            isinstance(value, list | tuple) and all(type(layer) is int and layer in numbers for layer in value)
        ):
            raise SourceError(f"{where} says {name} = {short(value)}, these are no layers of {len(numbers)}")
        layers[name] = None if value is None else tuple(sorted(set(value)))
    return layers


def fixed_otherwise(family: Family, values: Mapping[str, Any], where: str) -> list[str]:
    """The settings that contradict the values which a family fixes, each as the end of a sentence.

    Raises:
        SourceError: a size from which the family derives another is no valid size.
    """
    fixed = {name: only for name, only in FIXED.items() if name not in family.keys and only is not None}
    heads = positive_int(values["heads"], "heads", where)
    if family.keys.get("kv_heads") == "":
        fixed["kv_heads"] = family.defaults.get("kv_heads", heads)
    if family.keys.get("head_dim") == "" or family.square:
        hidden = positive_int(values["hidden"], "hidden", where)
        fixed["head_dim"] = hidden / heads if hidden % heads else hidden // heads
    return [
        f"{name} = {short(values[name])} is not supported for {family.name}, only {short(only)}"
        for name, only in fixed.items()
        if values.get(name) not in (None, only)
    ]


def lost_setting(table: Iterable[Row], conditions: Collection[str], spec: ModelSpec) -> str:
    """A setting that a format's table has no row for, and that differs from the fixed value; empty if there is none."""
    named = {row.setting for row in table if not row.condition or row.condition in conditions}
    silent = {name: getattr(spec, name) for name in CHOICES if name not in named}
    lost = (name for name, value in silent.items() if value not in (None, FIXED[name]))
    return next((f"{name} = {short(silent[name])}" for name in lost), "")
