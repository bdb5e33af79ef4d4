"""The codec of the rotary settings of config.json, which have several keys.

transformers 4 has the keys `rope_theta`, `rope_scaling` and `partial_rotary_factor`, or a family's own names of these;
version 5 has `rope_parameters`, one map for all layers, or one for each kind of attention.
Facts: transformers 5.23.0, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.errors import SourceError, UnsupportedError, short
from formats.families import family_named
from formats.families.family import Family
from formats.huggingface.layers import FULL, SLIDING
from formats.huggingface.nulls import require_rotary_values
from formats.model.codec import Codec, Context, Spelled
from formats.model.values import positive_int

PARAMETERS, THETA, SCALING, PARTIAL = "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"
ORIGINAL, ORIGINAL_OF = "original_max_position_embeddings", ("llama3", "yarn", "longrope")
"""A config key that takes precedence over the same key in the rotary settings, and the types of scaling that have it
(`standardize_rope_params`). Without either it is `POSITIONS`."""
POSITIONS = "max_position_embeddings"
LOCAL = "rope_local_base_freq"
"""The key of the base of the layers with a sliding window, in a family with two bases; version 5 has it in the map of
these layers."""
ROTATING = "rotary_dim"
"""The key of the number of elements of a head that rotate, in a family with such a key."""
RENAMED = {"su": "longrope"}
"""Former name of a type of scaling: its present name. Phi-3 had `su` when it came out."""
PLAIN = {"rope_type": "default"}


class Rope(NamedTuple):
    """The rotary settings of a spec, under its names."""

    rope_theta: Any
    rope_scaling: Mapping[str, Any] | None
    rotary_fraction: Any


def rotary(parameters: str, theta: str, scaling: str, original: str, fraction: str = "") -> Codec:
    """The codec of `Rope`: `parameters` is the key of transformers 5, the others are the keys of version 4."""

    def read(_: Spelled, context: Context) -> Rope:
        family, config = family_named(context.values["family"]), context.file
        settings = _settings(family, context)
        base = settings.pop(THETA, None) or assumed(theta, family.rope_theta, context)
        kind = settings.pop("type", "default")
        kind = settings.pop("rope_type", kind)
        kind = RENAMED.get(str(kind), kind)
        if kind in ORIGINAL_OF:
            usual = config.get(POSITIONS, context.values.get("max_positions"))
            of_class = family.defaults.get(original)
            outer = assumed(original, of_class, context) if of_class else config.get(original)
            inner = settings.setdefault(original, usual if outer is None else outer)
            if outer is not None and inner != outer:
                values = f"{original} = {short(outer)}, and {short(inner)} in its rotary settings"
                hint = "transformers takes the first; correct either"
                raise SourceError(f"{context.where} contradicts itself: {values}", hint)
        beside = config.get(PARTIAL) if fraction in ("", PARTIAL) else None  # the class of another key reads that alone
        part = _fraction(settings.pop(PARTIAL, beside), fraction, family, context)
        return Rope(base, None if kind == "default" else {"rope_type": kind, **settings}, part)

    def write(rope: Rope, context: Context) -> Spelled:
        family = family_named(context.values["family"])
        length = (rope.rope_scaling or {}).get(original)
        outer = {original: length} if length and {original} & {*context.file, *family.defaults} else {}
        if parameters in context.file:
            maps = context.file[parameters]
            part = {} if rope.rotary_fraction is None else {PARTIAL: rope.rotary_fraction}
            settings = {THETA: rope.rope_theta, **part, **(rope.rope_scaling or PLAIN)}
            by_kind = LOCAL in family.own and _by_kind(maps)
            return {parameters: {**maps, FULL: settings} if by_kind else settings, **outer}
        unscaled = PLAIN if SCALING in family.defaults else None
        return {theta: rope.rope_theta, scaling: rope.rope_scaling or unscaled, fraction: rope.rotary_fraction, **outer}

    return Codec(read, write)


def own_value(key: str, usual: Any, config: Spelled) -> Any:
    """The value of a config key that no other format has; the second base may be in the map of its layers."""
    by_kind = key == LOCAL and _by_kind(config.get(PARAMETERS))
    return _spelled(config[PARAMETERS][SLIDING].get(THETA, usual) if by_kind else config.get(key, usual))


def _spelled(value: Any) -> Any:
    """A value with infinity as transformers 5 spells it: JSON has none, and version 4 wrote `Infinity`."""
    if isinstance(value, list):
        return [_spelled(part) for part in value]
    return {"__float__": "Infinity"} if value == math.inf else value


def assumed(key: str, fallback: Any, context: Context) -> Any:
    """The value of a key; if it is absent or null, the default of the family, which is noted in `context.notes`."""
    if context.file.get(key) is not None:
        return context.file[key]
    note_default(key, fallback, context)
    return fallback


def note_default(key: str, value: Any, context: Context) -> None:
    """Note that a key has the default of the family, and whose default that is."""
    family = family_named(context.values["family"])
    whose = f"of the family in {family.file}" if family.file else f"of transformers for {family.name}"
    context.notes.append(f"{key} = {value} (not in {context.where}: the default {whose})")


def _by_kind(maps: Any) -> bool:
    """Whether the rotary settings are a map for each kind of attention, as in a Gemma 3 of transformers 5."""
    return (
        isinstance(maps, dict)
        and set(maps) == {FULL, SLIDING}
        and {type(parameters) for parameters in maps.values()} == {dict}
    )


def _settings(family: Family, context: Context) -> dict[str, Any]:
    """The map of rotary settings for all layers, or for the layers without a sliding window.

    Raises:
        SourceError: the keys contradict each other, or the settings are no map or have null where they may not.
        UnsupportedError: the settings differ between layers, or those of layers with a window are scaled.
    """
    config, where = context.file, context.where
    settings = config.get(PARAMETERS) or config.get(SCALING) or {}
    if config.get(SCALING) not in (None, {}, settings):  # transformers 5.23.0 uses it, and drops the other
        raise SourceError(f"{where} has rope_parameters and a rope_scaling that differs", "remove one of them")
    for key in (THETA, PARTIAL) if isinstance(settings, dict) else ():
        value = settings.get(key)
        if value is not None and config.get(key) not in (None, value):  # transformers 5 takes this one, 4 the other
            raise SourceError(
                f"{where} contradicts itself: {key} = {short(config[key])} and {short(value)} in its rotary settings",
                "remove the one that the model was not trained with",
            )
    if not settings and config.get(PARAMETERS) is None and SCALING in family.defaults:
        settings = assumed(PARAMETERS, family.defaults[SCALING], context)
    if LOCAL in family.own and _by_kind(config.get(PARAMETERS)):
        settings, sliding = settings[FULL], settings[SLIDING]
        require_rotary_values(sliding, where)
        if set(sliding) - {THETA, "rope_type"} or sliding.get("rope_type", "default") != "default":
            raise UnsupportedError(f"{where}: scaled rotary embeddings of a sliding window are not supported")
    if not isinstance(settings, dict):
        raise SourceError(f"{where}: its rotary settings are {short(settings)}, they should be a map")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedError(f"{where}: rotary settings that differ between layers are not supported")
    require_rotary_values(settings, where)
    return dict(settings)


def _fraction(part: Any, key: str, family: Family, context: Context) -> Any:
    """The fraction of a head that rotates; None where the family has no setting for it."""
    config, where = context.file, context.where
    if part is None and key == PARTIAL and PARTIAL in config:  # null: all of a head, not the default of the family
        part = 1.0
    if part is None and ROTATING in family.own and config.get(ROTATING) is not None:
        width = positive_int(config.get("head_dim") or family.head_dim, "head_dim", where)
        part = positive_int(config[ROTATING], ROTATING, where) / width
    if key:
        return assumed(key, family.defaults["rotary_fraction"], context) if part is None else part
    if part not in (None, 1.0):
        raise UnsupportedError(f"{where}: partial_rotary_factor is not supported for {family.name}")
    return None
