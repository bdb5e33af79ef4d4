"""Which family a model is that names none.

One fits if its rows write the arguments that were read, and if it fixes no setting to something else than they say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.families import FAMILIES, family_named
from formats.families.family import TRAITS, Family
from formats.huggingface.settings_table import required
from formats.megatron.args.table import TABLE, conditions, described
from formats.model.checks import fixed_otherwise
from formats.model.codec import write
from formats.model.settings import FIXED
from formats.model.spec import ModelSpec

OPEN = ("sliding_window", "full_layers", "layer_types", "nope_layers", "rotary_fraction")
FREE = {name: FIXED.get(name) for name in OPEN}
"""Settings that only some families have, by which they are told apart, and what holds in the others."""
FITTED = [row for row in TABLE if row.setting in (*TRAITS, *FREE, "-")]

Args = Mapping[str, Any]


def fitting(values: Args, holding: Collection[str], base: ModelSpec | None, where: str) -> tuple[str, tuple[str, ...]]:
    """The family of a model, and its biases, of those that the family leaves the choice of.

    Args:
        values: the settings and traits that were read.
        holding: the conditions under which they were.
        base: the spec of the config that travels along, whose family it then is.
        where: what to call the file of the args in an error.

    Raises:
        RefusedError: a model of the config's family has other args.
        UnsupportedError: no family fits, or each that does fixes a setting to another value.
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
    otherwise = {name: next(_otherwise(family_named(name), values, where), "") for name in _ordered(fits)}
    name = next((name for name, reason in otherwise.items() if not reason), None)
    if name is None:
        raise UnsupportedError(f"{where}: {next(iter(otherwise.values()))}")
    return name, fits[name]


def _fits(families: Iterable[Family], values: Args, args: Args) -> dict[str, tuple[str, ...]]:
    """Those of some families whose models can have these args, and the biases that they then have."""
    choices = {family.name: _biases(family, values, args) for family in families}
    return {name: biases for name, biases in choices.items() if biases is not None}


def _biases(family: Family, values: Args, args: Args) -> tuple[str, ...] | None:
    """The biases with which a model of a family has these args; None if it has not with any."""
    choices = () if family.only_here else family.bias_choices()
    return next((biases for biases in choices if _written(family, biases, values) == args), None)


def _written(family: Family, biases: Collection[str], values: Args) -> Args | None:
    """The args of a model of a family with these settings; None where Megatron has none for it."""
    traits = family.traits_with(biases)
    fixed = {name: value for name, value in FREE.items() if name not in family.choices}
    with suppress(RefusedError):
        theirs = {**values, "family": family.name, **fixed, **described(traits)}
        return write(FITTED, theirs, conditions(traits), "")
    return None


def _otherwise(family: Family, values: Args, where: str) -> Iterator[str]:
    """What a family fixes to something else than these settings say, each as the end of a sentence."""
    yield from fixed_otherwise(family, {name: value for name, value in values.items() if name not in FREE}, where)
    try:
        keys = required(family, values)
    except RefusedError as error:
        yield str(error)
        return
    for key, value in keys.items():
        if value != family.requires[key]:
            yield f"{key} = {short(value)} is not supported for {family.name}, only {short(family.requires[key])}"


def _ordered(fits: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The user's own families that fit, then the general ones, then those of which least has to be chosen."""

    def order(name: str) -> tuple[bool, bool, bool, bool]:
        family = family_named(name)
        other_biases = not family.general and fits[name] != family.biases_of({})
        return family.file is None, not family.general, other_biases, not family.general and bool(family.biases)

    return sorted(fits, key=order)


def _differing(base: ModelSpec, values: Args, args: Args) -> str:
    """The arguments in which a model of the config's family differs, as the end of a sentence."""
    theirs = _written(family_named(base.family), base.biases, values)
    names = [name for name, value in args.items() if theirs and value != theirs.get(name)]
    return ", which differs in " + ", ".join(f"{name} = {short(args[name])}" for name in names) if names else ""
