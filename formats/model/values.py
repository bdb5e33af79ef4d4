"""Checks of the value of a single setting, by its type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from formats.errors import SourceError, short

MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000
MOST = 2**31
"""The largest size that is accepted; larger sizes are no model, and would only exhaust memory."""
LARGEST = 1e30
"""Upper bound of settings that are not integers."""


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number; True is none."""
    return type(value) in (int, float) and abs(value) < LARGEST


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_finite(value) and value > 0 and 0 < float(value) < LARGEST  # float(10**30) is above 10**30


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
    if not is_positive(value):
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


class Possible(NamedTuple):
    """What a value may be: a test of it, and its words in a sentence."""

    test: Callable[[Any], bool]
    words: str


POSITIVE = Possible(is_positive, "a finite number above 0")
FROM_ZERO = Possible(lambda value: is_finite(value) and value >= 0, "a finite number, and not negative")
TRUTH = Possible(lambda value: type(value) is bool, "true or false")
NUMBERS = Possible(lambda value: type(value) is list and all(map(is_positive, value)), "a list of numbers above 0")
SCALED = {
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "yarn": ("factor",),
}
"""Type of scaled rotary embeddings: the settings that it has no default for (transformers 5.23.0,
modeling_rope_utils.py, `ROPE_INIT_FUNCTIONS`, `_validate_dynamic_rope_parameters` and its like)."""
ROTARY = {
    "rope_type": Possible(lambda value: value in tuple(SCALED), f"one of {', '.join(SCALED)}"),
    "factor": POSITIVE, "original_max_position_embeddings": POSITIVE, "attention_factor": POSITIVE,
    "beta_fast": FROM_ZERO, "beta_slow": FROM_ZERO, "mscale": FROM_ZERO, "mscale_all_dim": FROM_ZERO, "truncate": TRUTH,
    "short_factor": NUMBERS, "long_factor": NUMBERS, "short_mscale": POSITIVE, "long_mscale": POSITIVE,
    "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE, "alpha": FROM_ZERO, "llama_4_scaling_beta": FROM_ZERO,
    "mrope_section": NUMBERS, "mrope_interleaved": TRUTH, "finetuned": TRUTH,
}  # fmt: skip
"""What `rope_scaling` may hold, and as which values besides null. It is what transformers 5.23.0 reads
(modeling_rope_utils.py, and the classes of models), or takes without reading it. Base and fraction are settings of
their own."""
ELSE = Possible(
    lambda value: isinstance(value, str | list | bool) or is_finite(value),
    "a text, a finite number, true, false or a list",
)
"""Values of a key that is in no class which is known here."""


def scaling(value: Any, name: str, where: str) -> Mapping[str, Any]:
    """A map of rotary settings with a `rope_type`. Raises what `positive_int` raises."""
    known = isinstance(value, dict) and len(value) <= 50 and isinstance(value.get("rope_type"), str)
    if not known or not all(isinstance(key, str) for key in value):
        raise _wrong(value, name, where, "none")
    for key, item in value.items():
        possible = ROTARY.get(key, ELSE)
        if item is not None and not possible.test(item):
            raise SourceError(
                f"{where} says {key[:80]} = {short(item)} in its rotary settings, it should be {possible.words}",
                f"correct it; --set {name}=none is for a model whose rotary embeddings are not scaled",
            )
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
