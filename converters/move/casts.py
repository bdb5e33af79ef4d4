"""Edges: the closed list of changes of value that a conversion may make. Everything else is a copy of bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.disk.safetensors import DTYPES, FLOATS
from formats.errors import RefusedError
from formats.model.accepted import NORMS

Array = NDArray[Any]
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of an element: the unsigned word that it is moved as. An element that is not cast is never interpreted."""

PIECE = 1 << 16
"""Elements that are cast at a time: few enough to stay in the cache, and in little memory."""


def cast(words: Array, source: str, target: str, name: str, out: Array | None = None) -> Array:
    """Cast elements between F64, F32, BF16 and F16, rounding to the nearest even.

    Args:
        words: the elements as unsigned words.
        source: their element type.
        target: the wanted element type.
        name: what to call the tensor in an error.
        out: where to put the result, as words of the target's size; by default in new memory.

    Raises:
        RefusedError: a finite value has no finite counterpart.
    """
    if source == target:
        return words
    result = np.empty(len(words), WORDS[DTYPES[target]]) if out is None else out
    for start in range(0, len(words), PIECE):
        piece = slice(start, start + PIECE)
        result[piece] = _cast(words[piece], source, target, name)
    return result


def _cast(words: Array, source: str, target: str, name: str) -> Array:
    values = original = to_float(words, source)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is refused below, a NaN is a value like any other
        if source == "F64" and target != "F64":
            values = values.astype(np.float32)  # in two steps, as torch does
    hint = "choose --dtype bf16, fp32 or keep" if target == "F16" else "leave --dtype out"
    return _narrowed(values, original, target, name, hint)


def _narrowed(values: Array, original: Array, target: str, name: str, hint: str) -> Array:
    """Floats as words of an element type.

    Raises:
        RefusedError: a value that is finite in the original has no finite counterpart.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "BF16":
            result = _to_bf16(values)
            finite = (result & 0x7F80) != 0x7F80
        else:
            floats = values.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[target], copy=False)
            finite = np.isfinite(floats)
            result = as_words(floats)
    if not finite.all():
        large = original[~finite & np.isfinite(original)]
        if len(large):
            raise RefusedError(
                f"{name} holds {large[0]:g}, which is too large for {target} ({len(large)} or more such values)",
                hint,
            )
    return result


def round_once(values: Array, target: str, name: str, out: Array) -> Array:
    """Round float64 to an element type, to the nearest even, without a step between.

    Args:
        values: the computed values, as float64.
        target: the wanted element type.
        name: what to call the tensor in an error.
        out: where to put the result, as words of the target's size.

    Raises:
        RefusedError: a finite value has no finite counterpart.
    """
    hint = "choose --dtype bf16 or fp32" if target == "F16" else "smaller --weights, or another lora_alpha"
    for start in range(0, len(values), PIECE):
        piece = values[start : start + PIECE]
        floats = _to_odd(piece) if target == "BF16" else piece
        out[start : start + PIECE] = _narrowed(floats, piece, target, name, hint)
    return out


def _to_odd(values: Array) -> Array:
    """Float64 rounded to odd: exact in float32, or the neighbour whose last bit is odd, which can be rounded again.

    Boldo and Melquiond, "When double rounding is odd" (2005).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        floats = values.astype(np.float32)
        back = floats.astype(np.float64)
        bits = as_words(floats).copy()
        bits -= np.abs(back) > np.abs(values)
        bits |= back != values
    odd: Array = bits.view(np.float32)
    return odd


def to_float(words: Array, dtype: str) -> Array:
    """The elements as float32 (float64 for F64), for arithmetic."""
    if dtype == "BF16":
        bits = words.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    return words.view(np.float32 if dtype == "F32" else np.float64)


def as_words(values: Array) -> Array:
    """The bits of numbers as unsigned words."""
    words: Array = values.view(WORDS[values.itemsize])
    return words


def _to_bf16(values: Array) -> Array:
    """Round to the nearest even on the bits; a NaN stays a NaN."""
    bits = values.view(np.uint32)
    rounded = bits >> 16  # and the rest in place: memory that is new for each piece costs as much as the arithmetic
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(values)
    if nan.any():
        rounded = np.where(nan, (bits >> 16) | 0x40, rounded)
    words: Array = rounded.astype(np.uint16)
    return words


def add_one(words: Array, dtype: str, target: str | None = None) -> Array:
    """The elements of a tensor that is stored minus 1, with 1 added in float64 and the sum rounded once.

    Args:
        words: the elements as unsigned words.
        dtype: their element type.
        target: the wanted element type; None for `dtype`.
    """
    target = target or dtype
    room = np.empty(len(words), WORDS[DTYPES[target]])
    return round_once(to_float(words, dtype).astype(np.float64) + 1, target, "a norm", room)


def less_one(words: Array, dtype: str, name: str, *, rounded: bool = False) -> Array:
    """The elements minus 1, such that adding 1 gives them back bit by bit.

    Args:
        words: the elements as unsigned words.
        dtype: their element type.
        name: what to call the tensor in an error.
        rounded: accept elements that adding 1 does not give back, rounded to the nearest even.

    Raises:
        RefusedError: adding 1 does not give some elements back, such as most of those below one half.
    """
    less = _rounded(to_float(words, dtype) - 1, dtype, name)
    lost = add_one(less, dtype) != words
    if lost.any() and not rounded:
        raise RefusedError(
            f"{name} holds {to_float(words[lost], dtype)[0]:g}: stored minus 1, as the target has it, that is another "
            f"number in {dtype} ({lost.sum()} or more such values)",
            f"--accept {NORMS} rounds them; in float32 (--dtype fp32) values of 16 bits mostly stay the same",
        )
    return less


def finite(words: Array, dtype: str) -> bool:
    """Whether no element is NaN or infinite, that is, has an exponent of ones only."""
    mask, exponent = {"F64": (2**63 - 1, 0x7FF << 52), "F32": (2**31 - 1, 0xFF << 23)}.get(
        dtype, (2**15 - 1, 0xFF << 7 if dtype == "BF16" else 0x1F << 10)
    )
    pieces = (words[start : start + PIECE] for start in range(0, len(words), PIECE))
    return dtype not in FLOATS or all(int((piece & words.dtype.type(mask)).max()) < exponent for piece in pieces)


def mean(copies: Iterable[Array], dtype: str) -> Array:
    """The mean of diverged replicas, taken in float32 (float64 for F64) and rounded once."""
    total, count = _total(copies, dtype)
    total /= count
    return _rounded(total, dtype, "the mean")


def add(copies: Iterable[Array], dtype: str) -> Array:
    """The sum of the summands of several ranks, taken in float32 (float64 for F64) and rounded once."""
    return _rounded(_total(copies, dtype)[0], dtype, "the sum")


def _total(copies: Iterable[Array], dtype: str) -> tuple[Array, int]:
    """The sum of copies, and how many there were; the next copy may overwrite the one before."""
    rest = iter(copies)
    total, count = to_float(next(rest), dtype).copy(), 1
    for copy in rest:
        total += to_float(copy, dtype)
        count += 1
    return total, count


def _rounded(values: Array, dtype: str, name: str) -> Array:
    return cast(as_words(values), "F64" if dtype == "F64" else "F32", dtype, name)
