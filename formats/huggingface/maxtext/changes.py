"""Values that MaxText stores otherwise than transformers: of a parameter, and of Adam's moments of it.

Facts: those of `tables.py`. By the chain rule the gradient of c * stored + constant is that of the stored parameter
divided by c, and with it the first moment; the second is divided by c * c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

from formats.disk.chunks import Change
from formats.disk.safetensors import FLOATS
from formats.errors import UnsupportedError
from formats.huggingface.maxtext.tables import RAISED, ROOTED, SCALED
from formats.layout.placed import Placed
from formats.model.spec import ModelSpec

POWERS = {"exp_avg": 1, "exp_avg_sq": 2}
"""State of Adam: the power of the gradient that it is a mean of."""


def query_scale(spec: ModelSpec) -> float:
    """The number by whose square root transformers divides attention scores."""
    return float(spec.own.get("query_pre_attn_scalar", spec.head_dim))


def _rooted(spec: ModelSpec) -> Change:
    return Change(sqrt(query_scale(spec)), 0.0, "multiply by the root by which attention scores are divided")


def _scaled(spec: ModelSpec) -> Change:
    return Change(1 / sqrt(spec.hidden), 0.0, "divide by the root of the hidden size, by which the source multiplies")


def _raised(_: ModelSpec) -> Change:
    return Change(1.0, -1.0, "subtract 1 from a norm that the source stores plus 1")


CHANGES: Mapping[str, Callable[[ModelSpec], Change]] = {ROOTED: _rooted, SCALED: _scaled, RAISED: _raised}
"""Condition of a table line: what makes the parameter of transformers of its tensor."""


def changed(placed: Placed, spec: ModelSpec, state: str = "") -> Placed:
    """Return a parameter, or Adam's `state` of it, as transformers has it; the change is made when a chunk is decoded.

    Raises:
        UnsupportedError: the tensor has an element type that is not computed with.
    """
    change, chunk = change_of(placed, spec), placed.fragment.chunk
    if state and change is not None:
        edge = f"divide {state} by the factor of its parameter{' squared' if POWERS[state] == 2 else ''}"
        change = None if change.factor == 1 else Change(change.factor ** -POWERS[state], 0.0, edge)
    if change is None or chunk is None:
        return placed
    if placed.fragment.dtype not in FLOATS:
        raise UnsupportedError(
            f"{placed.key} is {placed.fragment.dtype}, in which nothing is computed, and it takes to {change.edge}",
            "save the parameters in bfloat16 or float32",
        )
    return placed._replace(fragment=placed.fragment._replace(chunk=chunk._replace(change=change)))


def change_of(placed: Placed, spec: ModelSpec) -> Change | None:
    """What makes the parameter of transformers of a tensor; None if it is the same."""
    return next((CHANGES[name](spec) for name in placed.slot.rule.conditions if name in CHANGES), None)
