"""Find the family of a model from Megatron's args, which do not name it.

A family fits if its table rows write the same args, and if it fixes no setting to another value than the args specify.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.families import FAMILIES, family_named
from formats.families.family import TRAITS, Family
from formats.huggingface.settings_table import required
from formats.megatron.args.rope import NONE
from formats.megatron.args.table import TABLE, conditions, described
from formats.model.checks import fixed_otherwise
from formats.model.codec import write
from formats.model.settings import FIXED
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

OPEN = ("sliding_window", "full_layers", "layer_types", "nope_layers", "rotary_fraction")
FREE = {name: FIXED.get(name) for name in OPEN}
"""Settings that only some families have, which distinguish families; and their value in the other families."""
FITTED = [row for row in TABLE if row.setting in (*TRAITS, *FREE, "-")]
SCALED = [row for row in TABLE if row.setting == "rope_scaling"]

Args = Mapping[str, Any]


def fitting(values: Args, holding: Collection[str], base: ModelSpec | None, where: str) -> tuple[str, tuple[str, ...]]:
    """The family of a model, and the biases that it has if the family allows a choice.

    Args:
        values: the settings and traits that were read from the args.
        holding: the conditions of the table rows that were read.
        base: the spec of the config that travels with the checkpoint; its family is the only candidate.
        where: what to call the file of the args in an error.

    Raises:
        RefusedError: a model of the config's family has other args.
        UnsupportedError: no family fits, or each that fits fixes a setting to another value.
    """
    args = write(FITTED, {"family": "model", **values}, holding, where)
    fits = _fits([family_named(base.family)] if base else FAMILIES.values(), values, args)
    if base and not fits:
        others = _ordered(_fits(FAMILIES.values(), values, args))
        raise RefusedError(
            f"{where} describes a model like {' or '.join(others) or 'none known'}, its config a {base.family}"
            f"{_differing(base, values, args)}"
        )
    if not fits:
        raise UnsupportedError(
            f"{where}: no known family has this combination of norms, biases, query/key norms, sliding window, partial "
            "rotary embedding or learned positions, and experts"
        )
    otherwise = {name: next(_otherwise(family_named(name), values, base, where), "") for name in _ordered(fits)}
    name = next((name for name, reason in otherwise.items() if not reason), None)
    if name is None:
        raise UnsupportedError(f"{where}: {next(iter(otherwise.values()))}")
    return name, fits[name]


def _fits(families: Iterable[Family], values: Args, args: Args) -> dict[str, tuple[str, ...]]:
    """The families whose models can have these args, each with the biases of such a model."""
    choices = {family.name: _biases(family, values, args) for family in families}
    return {name: biases for name, biases in choices.items() if biases is not None}


def _biases(family: Family, values: Args, args: Args) -> tuple[str, ...] | None:
    """The biases with which a model of a family has these args; None if there are no such biases."""
    choices = () if family.only_here else family.bias_choices()
    return next((biases for biases in choices if _written(family, biases, values) == args), None)


def _written(family: Family, biases: Collection[str], values: Args) -> Args | None:
    """The args (`FITTED`) of a model of a family with these settings; None if Megatron has no such model."""
    traits = family.traits_with(biases)
    fixed = {name: value for name, value in FREE.items() if name not in family.choices}
    with suppress(RefusedError):
        theirs = {**values, "family": family.name, **fixed, **described(traits)}
        return write(FITTED, theirs, conditions(traits), "")
    return None


def _scaling(family: Family, values: Args, where: str) -> str:
    """A rope scaling as arguments of Megatron-LM; as it is where Megatron-LM has none like it, as of Megatron-LLM."""
    try:
        scaled = write(SCALED, {"family": family.name, **values}, {"rotating"}, where)
    except RefusedError:
        return short(values["rope_scaling"])
    return ", ".join(f"{key} = {short(value)}" for key, value in scaled.items() if value != NONE.get(key, value))


def _otherwise(family: Family, values: Args, base: ModelSpec | None, where: str) -> Iterator[str]:
    """Error texts, one for each setting that a family fixes to another value than these settings.

    A config that travels with a checkpoint was one of a model, maybe of a transformers that did not check its sizes.
    """
    yield from fixed_otherwise(family, {name: value for name, value in values.items() if name not in FREE}, where)
    hidden = positive_int(values["hidden"], "hidden", where)
    if family.divided and base is None and hidden % values["heads"]:
        yield (
            f"a hidden size of {hidden} is no multiple of {values['heads']} heads, with which transformers "
            f"builds no {family.name}"
        )
    if not family.takes(values["rope_scaling"]):
        yield f"a {family.name} has no rope scaling like {_scaling(family, values, where)}"
    try:
        keys = required(family, values)
    except RefusedError as error:
        yield str(error)
        return
    for key, value in keys.items():
        if value != family.requires[key]:
            yield f"{key} = {short(value)} is not supported for {family.name}, only {short(family.requires[key])}"


def _ordered(fits: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The families that fit in order of preference: the user's own, general ones, then those with default biases."""

    def order(name: str) -> tuple[bool, bool, bool, bool]:
        family = family_named(name)
        other_biases = not family.general and fits[name] != family.biases_of({})
        return family.file is None, not family.general, other_biases, not family.general and bool(family.biases)

    return sorted(fits, key=order)


def _differing(base: ModelSpec, values: Args, args: Args) -> str:
    """The end of an error text: the arguments in which a model of the config's family differs; empty if not known."""
    theirs = _written(family_named(base.family), base.biases, values)
    names = [name for name, value in args.items() if theirs and value != theirs.get(name)]
    return ", which differs in " + ", ".join(f"{name} = {short(args[name])}" for name in names) if names else ""
