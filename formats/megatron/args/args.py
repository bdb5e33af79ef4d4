"""Convert the `args` of a Megatron checkpoint to the settings of a model, and back.

An argument that changes what a model computes and has no counterpart is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from formats.errors import RefusedError, UnsupportedError
from formats.families import family_named
from formats.megatron.args import ambiguous, fields, mlp
from formats.megatron.args.fitting import fitting
from formats.megatron.args.table import MARKS, TABLE, conditions, described, marks, values_of
from formats.megatron.args.versions import version_of
from formats.model.checks import checked, layers_of, lost_setting, require_same_settings
from formats.model.codec import read, write
from formats.model.settings import FIXED, corrected
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

POSITIONS, ROTARY = "position_embedding_type", "use_rotary_position_embeddings"
SCALING = [row for row in TABLE if row.setting == "rope_scaling"]
READ = [row for row in TABLE if row not in SCALING]
ALIKE = ("activation", "rope_scaling")
"""Settings that a config can spell in more ways than Megatron's args; those of `own` are too."""


def from_megatron(
    args: Mapping[str, Any],
    settings: Mapping[str, Any],
    base: ModelSpec | None,
    where: str,
    *,
    accept: Collection[str] = (),
    settled: bool = False,
    trained: bool = False,
) -> ModelSpec:
    """Read the `args` of a Megatron checkpoint.

    Args:
        args: the attributes of the namespace.
        settings: values that overrule the args.
        base: the spec of the Hugging Face config that travels with the checkpoint, if there is one.
        where: what to call the file in an error.
        accept: arguments that the user names, to be treated as if they had a value that is understood.
        settled: whether the model computes what the args specify, whichever version made them, such as args that a
            conversion wrote.
        trained: whether the args are those of a training though no parser of Megatron-LM made them.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: args and config contradict each other, or the version that made the args ignored some of them.
    """
    args = ambiguous.with_one_pattern(args, where)
    args = args if settled else ambiguous.with_both_names(args, settings, where)
    if args.get(POSITIONS) in (None, "learned_absolute") and args.get(ROTARY):
        args = {**args, POSITIONS: "rope"}  # in older trees the flag is all that tells
    if args.get(POSITIONS) is None:
        return _with_learned_positions(args, settings, base, where, accept, settled, trained)
    window = settings.get("sliding_window")
    if type(window) is int and window > 0:  # which layers have it depends on other arguments
        args = {**args, "window_size": [window - 1, 0]}
    traits = marks(args)
    holding = conditions(traits)
    judged = [row.keys for row in TABLE if row.condition in holding.intersection(MARKS)]
    understood = {name for keys in judged for names in keys for name in names}
    notes = fields.require_understood(args, where, understood=understood, accept=accept)
    values = read(READ, args, holding, where, known=described(traits))
    asked = not settled and (trained or version_of(args) is not None)
    notes += mlp.clamped(args, accept, where) if "sinks" in traits and asked else []

    def scaling(args: Mapping[str, Any]) -> Mapping[str, Any] | None:
        values = read(SCALING, args, holding, where)
        return values.get("rope_scaling") or None

    if "rope_scaling" not in settings:
        values["rope_scaling"] = scaling(args) if settled else ambiguous.rope_scaling(args, scaling, base, where)
    if asked:
        if "sliding_window" not in settings and "sinks" not in traits:  # which no fused softmax computes
            ambiguous.require_window(args, values["sliding_window"], where)
        if "activation" not in settings:
            ambiguous.require_gelu(args, values.get("activation"), where)
        if "rope_scaling" not in settings:
            ambiguous.require_scale(args, values["rope_scaling"], where)
        notes += ambiguous.require_centred(args, values, accept, where)
    if values["learned"] or "state" in traits:
        values |= dict.fromkeys(("rope_theta", "rope_scaling", "rotary_fraction"))
    # not `vocab_size`: older trees add a token to it, and most runs leave it to the tokenizer
    values["vocab"] = values["vocab"] or (base.vocab if base else None)
    values = _as_in_config(values, holding, base) if base else values
    return agreed(values | {"notes": notes}, holding, settings, base, where)


def _with_learned_positions(
    args: Mapping[str, Any],
    settings: Mapping[str, Any],
    base: ModelSpec | None,
    where: str,
    accept: Collection[str],
    settled: bool,
    trained: bool,
) -> ModelSpec:
    """The spec of args that say nothing of positions: older trees learn them then.

    Raises:
        UnsupportedError: the model has no layout here, or only with rotary positions.
    """

    def of(kind: str) -> ModelSpec:
        known = {**args, POSITIONS: kind}
        return from_megatron(known, settings, base, where, accept=accept, settled=settled, trained=trained)

    try:
        return of("learned_absolute")
    except (RefusedError, UnsupportedError):
        of("rope")  # raises what else there is
        raise UnsupportedError(
            f"{where} says neither {POSITIONS} nor {ROTARY}: Megatron then has learned positions, and no known model "
            "with its other arguments has them",
            "take args of the training that say it",
        ) from None


def agreed(
    values: Mapping[str, Any],
    holding: Collection[str],
    settings: Mapping[str, Any],
    base: ModelSpec | None,
    where: str,
    *,
    may_differ: Collection[str] = (),
) -> ModelSpec:
    """The spec of the settings in args, if the config that travels with them does not contradict it.

    Args:
        values: the settings and traits that were read from the args.
        holding: the conditions of the table rows that were read.
        settings: the user's values, which overrule the args.
        base: the spec of the config.
        where: what to call the file of the args in an error.
        may_differ: settings in which args and config may differ.

    Raises:
        RefusedError: args and config contradict each other.
    """
    values = {**values, **settings}
    values |= {name: fixed for name, fixed in FIXED.items() if values.get(name) is None}  # settings without an argument
    values |= layers_of(values, where)
    if values["sliding_window"] is not None:
        positive_int(values["sliding_window"], "sliding_window", where)
    values["family"], values["biases"] = fitting(values, holding, base, where)
    return confirmed(_as_in_family(values, settings, base), settings, base, where, may_differ=may_differ)


def confirmed(
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    base: ModelSpec | None,
    where: str,
    *,
    may_differ: Collection[str] = (),
) -> ModelSpec:
    """The spec of settings that name their family, if the config that travels with them does not contradict it.

    Args and errors are those of `agreed`.
    """
    values, notes = dict(values), [*values.get("notes", ())]
    rotary = family_named(values["family"]).rope_theta is not None  # else each position has a weight
    if rotary and base and values["max_positions"] != base.max_positions and "max_positions" not in settings:
        notes.append(f"max_positions = {base.max_positions} as in the config, {where} has {values['max_positions']}")
        values["max_positions"] = base.max_positions
    spec = checked(values | {"notes": tuple(notes)}, corrected(where, settings))
    if base:
        free = {*settings, *may_differ, "mtp_layers"}  # no config has it
        require_same_settings(spec, base, f"{where} and its config", "args | config", free)
    return spec


def _as_in_family(values: Mapping[str, Any], settings: Mapping[str, Any], base: ModelSpec | None) -> dict[str, Any]:
    """The settings in the form that the family has: None for those that the family fixes.

    In a model without dense layers `ffn` is not used, and Megatron may record any number: that of the config is taken.
    """
    family, values = family_named(values["family"]), dict(values)
    keys = family.keys
    values["own"] = {key: values[key] for key in family.own}
    if "moe" in family.traits and keys.get("expert_ffn") in (None, keys.get("ffn")):  # one key for both, or one width
        values["ffn"] = values["expert_ffn"]
    elif "moe" in family.traits and base and not values["dense_layers"]:
        values["ffn"] = base.ffn
    fixed = (name for name, only in FIXED.items() if name not in keys and (only is not None or name not in settings))
    return values | dict.fromkeys(fixed)


def _as_in_config(values: Mapping[str, Any], holding: Collection[str], base: ModelSpec) -> dict[str, Any]:
    """The settings; those of `ALIKE` are spelled as in the config if both are written as the same args."""
    known, spelled = values_of(base), dict(values)
    for row in TABLE:
        if row.setting in (*ALIKE, *base.own) and row.setting in values:
            with suppress(RefusedError):
                ours = write([row], values, holding, "")
                if ours and ours == write([row], known, holding, ""):  # a row that does not hold writes nothing
                    spelled[row.setting] = known[row.setting]
    return spelled


def to_megatron(spec: ModelSpec) -> dict[str, Any]:
    """The args of a Megatron namespace that describe a model, under both names if an argument has two.

    Raises:
        RefusedError: Megatron has no such model.
    """
    holding = conditions(spec.traits)
    if lost := lost_setting(TABLE, holding, spec):
        raise RefusedError(f"megatron-core has no {lost}")
    return write(TABLE, values_of(spec), holding, "")
