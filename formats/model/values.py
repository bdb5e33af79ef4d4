"""Checks of the value of a single setting, by its type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from formats.errors import SourceError, short

MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000
MOST = 2**31
"""The largest size that is accepted; larger sizes are no model, and would only exhaust memory."""
LARGEST = 1e30
"""Upper bound of settings that are not integers."""


def equal(value: Any, known: Any) -> bool:
    """Whether two plain values are equal; True is not equal to 1."""
    return bool(value == known) and isinstance(value, bool) is isinstance(known, bool)


def positive_int(value: Any, name: str, where: str) -> int:
    """A size: an integer above 0.

    Raises:
        SourceError: the value is missing or no such number; the message names the flag that supplies the setting.
    """
    _require(value, name, where)
    if type(value) is not int or not 0 < value <= MOST:
        raise _wrong(value, name, where)
    return value


def positive_float(value: Any, name: str, where: str) -> float:
    """A finite number above 0. Raises what `positive_int` raises."""
    _require(value, name, where)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LARGEST or not 0 < float(value) < LARGEST:  # float(10**30) is above 10**30
        raise _wrong(value, name, where)
    return float(value)


def boolean(value: Any, name: str, where: str) -> bool:
    """True or false. Raises what `positive_int` raises."""
    _require(value, name, where, "true or false")
    if not isinstance(value, bool):
        raise _wrong(value, name, where, "true or false")
    return value


def text(value: Any, name: str, where: str) -> str:
    """A name. Raises what `positive_int` raises."""
    _require(value, name, where)
    if not isinstance(value, str):
        raise _wrong(value, name, where)
    return value


def scaling(value: Any, name: str, where: str) -> Mapping[str, Any]:
    """A map of rotary settings with a `rope_type`. Raises what `positive_int` raises."""
    kinds = (str, int, float, list, type(None))
    known = isinstance(value, dict) and len(value) <= 50 and isinstance(value.get("rope_type"), str)
    if not known or not all(isinstance(key, str) and isinstance(item, kinds) for key, item in value.items()):
        raise _wrong(value, name, where, "none")
    return dict(value)


def some_layers(count: Any) -> range:
    """The layers of a model of `count` layers; empty if the count is invalid, because such a model is refused later."""
    return range(count if type(count) is int and 0 < count <= MOST_LAYERS else 0)


KINDS: Mapping[str, Callable[[Any, str, str], Any]] = {
    "int": positive_int,
    "float": positive_float,
    "bool": boolean,
    "str": text,
    "Mapping[str, Any]": scaling,
}
"""Type of a setting: function that checks a value, for the setting's name and the file that has it. Lists of layers are
checked together with the number of layers (`checks.py`)."""


def _require(value: Any, name: str, where: str, way: str = "VALUE") -> None:
    if value is None:
        raise SourceError(f"{where} does not say {name}, and there is no safe default", f"add --set {name}={way}")


def _wrong(value: Any, name: str, where: str, way: str = "VALUE") -> SourceError:
    return SourceError(f"{where} says {name} = {short(value)}", f"correct it with --set {name}={way}")
