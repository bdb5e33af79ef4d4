"""What a setting may be by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from formats.errors import SourceError, short

MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000
MOST = 2**31
"""Larger sizes are no model: they would only exhaust memory."""
LARGEST = 1e30
"""No setting that is a fraction is as large."""


def whole(value: Any, name: str, where: str) -> int:
    """A size: a natural number above 0.

    Raises:
        SourceError: it is missing or no such number; the message names the flag that supplies it.
    """
    _require(value, name, where)
    if type(value) is not int or not 0 < value <= MOST:
        raise _wrong(value, name, where)
    return value


def real(value: Any, name: str, where: str) -> float:
    """A finite number above 0. Raises as `whole` does."""
    _require(value, name, where)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LARGEST or not 0 < float(value) < LARGEST:  # float(10**30) is above 10**30
        raise _wrong(value, name, where)
    return float(value)


def truth(value: Any, name: str, where: str) -> bool:
    """True or false. Raises as `whole` does."""
    _require(value, name, where, "true or false")
    if not isinstance(value, bool):
        raise _wrong(value, name, where, "true or false")
    return value


def text(value: Any, name: str, where: str) -> str:
    """A name. Raises as `whole` does."""
    _require(value, name, where)
    if not isinstance(value, str):
        raise _wrong(value, name, where)
    return value


def scaling(value: Any, name: str, where: str) -> Mapping[str, Any]:
    """A map of rotary settings with a type. Raises as `whole` does."""
    kinds = (str, int, float, list, type(None))
    known = isinstance(value, dict) and len(value) <= 50 and isinstance(value.get("rope_type"), str)
    if not known or not all(isinstance(key, str) and isinstance(item, kinds) for key, item in value.items()):
        raise _wrong(value, name, where, "none")
    return dict(value)


def some_layers(count: Any) -> range:
    """So many layers, as far as that is a number of layers: a model of another number is refused later."""
    return range(count if type(count) is int and 0 < count <= MOST_LAYERS else 0)


KINDS: Mapping[str, Callable[[Any, str, str], Any]] = {
    "int": whole,
    "float": real,
    "bool": truth,
    "str": text,
    "Mapping[str, Any]": scaling,
}
"""Type of a setting: what makes it of a value, for its name and the file that says it. Layers are checked with their
number (`checks.py`)."""


def _require(value: Any, name: str, where: str, way: str = "VALUE") -> None:
    if value is None:
        raise SourceError(f"{where} does not say {name}, and there is no safe default", f"add --set {name}={way}")


def _wrong(value: Any, name: str, where: str, way: str = "VALUE") -> SourceError:
    return SourceError(f"{where} says {name} = {short(value)}", f"correct it with --set {name}={way}")
