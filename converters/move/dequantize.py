"""The edge from quantized elements to BF16, or F16: element times scale, exact for MXFP4, otherwise rounded once.

Facts: OCP Microscaling Formats (MX) 1.0: E2M1, E4M3 and E8M0, whose 0xFF is no number; E4M3 without infinities, as
torch's float8_e4m3fn. transformers and DeepSeek's own script multiply in float32 and round to the nearest even, too.
compressed-tensors 0.20.0 multiplies in BF16 or F16 where the scales are, which is the same: the product of two such
numbers is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from converters.move import casts
from formats.disk.handle import Handle
from formats.disk.safetensors import DTYPES, Fragment, Scales, read_into
from formats.errors import RefusedError, SourceError

PIECE = 1 << 16
"""Elements at a time: few enough to stay in the cache, and in little memory."""

Open = Callable[[Path], AbstractContextManager[Handle]]
"""Opens a file; the context gives its handle."""


def _e4m3() -> NDArray[np.float32]:
    """The value of each byte of FP8: sign, four bits of exponent, three of mantissa."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _e2m1() -> NDArray[np.float32]:
    """The value of each code of FP4: sign, two bits of exponent, one of mantissa."""
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([positive, -positive])


def _e8m0() -> NDArray[np.float32]:
    """The value of each byte of a scale that is a power of two; the last one is no number."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)


E4M3, E2M1, E8M0 = _e4m3(), _e2m1(), _e8m0()


class Method(NamedTuple):
    """How an element is coded: the number of bits, and the value of each code."""

    bits: int
    values: NDArray[np.float32]


METHODS = {
    "MXFP4": Method(4, E2M1),
    "NVFP4": Method(4, E2M1),
    "INT4": Method(4, np.arange(-8, 8, dtype=np.float32)),
    "FP8": Method(8, E4M3),
    "MXFP8": Method(8, E4M3),
    "INT8": Method(8, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)),
    "INT8 in words": Method(8, np.arange(-128, 128, dtype=np.float32)),
}


def read_halves(opened: Open, fragment: Fragment, scales: Scales, at: int, buffer: memoryview) -> None:
    """Fill a buffer with the BF16 or F16 elements of a quantized tensor, from byte `at` of these elements on.

    Raises:
        SourceError: a file ends before its elements or scales do, or its weight_shape is not that of the elements.
        RefusedError: a scale is no finite positive number, or a product is NaN or too large for the type.
    """
    if scales.stated and at == 0:  # each conversion reads the first element
        _require_shape(opened, *scales.stated)
    out = np.frombuffer(buffer, np.uint16)
    for start, rows, columns in _pieces(at // 2, len(out), scales):
        count, begin = rows * columns, start - at // 2
        method, codes = METHODS[scales.method], _codes(opened, fragment, start, count, scales)
        words, factors = out[begin : begin + count], _factors(opened, start, columns, scales)
        with np.errstate(over="ignore", invalid="ignore"):
            values = method.values[codes].reshape(rows, columns) * factors
        try:
            words[:] = casts.cast(casts.as_words(values.ravel()), "F32", fragment.dtype, fragment.path.name)
            finite = casts.finite(words, fragment.dtype)
        except RefusedError:
            finite = False
        if not finite:
            nan = bool(np.isnan(method.values[codes]).any())
            wrong = f"are NaN in {scales.method}" if nan else f"are too large for {fragment.dtype}"
            reason = f"{scales.factors.path}: elements times {scales.name} {wrong}"
            raise RefusedError(reason, "--verbatim carries every tensor as it is")


def _require_shape(opened: Open, stated: Fragment, shape: tuple[int, ...], name: str) -> None:
    """Refuse a shape, recorded as integers in a file, that is not that of the elements.

    Raises:
        SourceError: the two differ.
    """
    recorded = _read(opened, stated, 0, len(shape)).view(f"<i{DTYPES[stated.dtype]}").tolist()
    if recorded != [*shape]:
        raise SourceError(
            f"{stated.path}: the elements of {name} are {[*shape]}, and the weight_shape beside it says {recorded}",
            "take the file from where it comes from; --verbatim carries every tensor as it is",
        )


def _pieces(start: int, count: int, scales: Scales) -> Iterator[tuple[int, int, int]]:
    """(first element, rows, columns) of rectangles that share one row of factors: whole rows, or a part of a row."""
    stop = start + count
    while start < stop:
        row, column = divmod(start, scales.columns)
        rows, columns = 1, min(scales.columns - column, stop - start, PIECE)
        if columns == scales.columns:
            inside = row % scales.rows
            below = min(scales.block[0] - inside % scales.block[0], scales.rows - inside)
            rows = min(below, (stop - start) // columns, max(1, PIECE // columns))
        yield start, rows, columns
        start += rows * columns


def _codes(opened: Open, fragment: Fragment, start: int, count: int, scales: Scales) -> NDArray[np.uint8]:
    """The codes of some elements, one a byte."""
    bits = METHODS[scales.method].bits
    first, last = start * bits // 8, ((start + count) * bits + 7) // 8
    raw = np.empty(last - first, np.uint8)
    with opened(fragment.path) as fd:
        read_into(fd, raw.data, fragment.offset + first, fragment.path)
    if bits == 8:
        return raw
    return np.stack([raw & 15, raw >> 4], axis=1).ravel()[start % 2 :][:count]


def _factors(opened: Open, start: int, columns: int, scales: Scales) -> NDArray[np.float32]:
    """The factor of each element of a row."""
    (high, wide), grid = scales.block, scales.factors
    (row, column), each = divmod(start, scales.columns), -(-scales.columns // wide)
    matrix, inside = divmod(row, scales.rows)
    first, last = column // wide, (column + columns - 1) // wide + 1
    place = (matrix * -(-scales.rows // high) + inside // high) * each + first
    words = _read(opened, grid, place, last - first)
    values = _values(words, grid.dtype)
    _require_factors(values, place, scales.name, grid)
    if scales.whole is not None:
        divisor = _values(_read(opened, scales.whole, 0, 1), scales.whole.dtype)
        _require_factors(divisor, 0, f"the divisor of {scales.name}", scales.whole)
        values = values / divisor
    return np.repeat(values, wide)[column - first * wide :][:columns]


def _read(opened: Open, fragment: Fragment, first: int, count: int) -> casts.Array:
    """Some elements of a tensor as words."""
    words = np.empty(count, casts.WORDS[DTYPES[fragment.dtype]])
    with opened(fragment.path) as fd:
        read_into(fd, words.view(np.uint8).data, fragment.offset + first * words.itemsize, fragment.path)
    return words


def _values(words: casts.Array, dtype: str) -> NDArray[np.float32]:
    """Scales as float32: powers of two in U8, FP8, or floats."""
    if words.itemsize == 1:
        return np.take(E8M0 if dtype == "U8" else E4M3, words)
    values: NDArray[np.float32] = casts.to_float(words, dtype)
    return values


def _require_factors(values: NDArray[np.float32], place: int, name: str, fragment: Fragment) -> None:
    """Refuse factors that are not finite and positive: a quantizer divides by a factor, or has it as a power of two.

    Args:
        values: some factors.
        place: the number of the first one in its tensor.
        name: what to call the factors in an error.
        fragment: the tensor that the factors are in.

    Raises:
        RefusedError: a factor is not finite, or not positive.
    """
    wrong = np.flatnonzero(~((values > 0) & np.isfinite(values)))
    if len(wrong):
        raise RefusedError(
            f"{fragment.path}: element {place + wrong[0]} of {name} is {values[wrong[0]]:g}, and weights are "
            "quantized by finite and positive scales",
            "take the file from where it comes from; --verbatim carries every tensor as it is",
        )
