"""The edge from quantized elements to BF16: those of MXFP4 exactly, those of FP8 times their scale, rounded once.

Facts: OCP Microscaling Formats (MX) 1.0: E2M1, E4M3 and E8M0, whose 0xFF is no number; E4M3 without infinities, as
torch's float8_e4m3fn. transformers and DeepSeek's own script multiply in float32 and round to the nearest even, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converters.move import casts
from formats.disk.handle import Handle
from formats.disk.safetensors import DTYPES, Fragment, Scales, read_into
from formats.errors import RefusedError

PIECE = 1 << 16
"""Elements at a time: few enough to stay in the cache, and in little memory."""
BITS = {"MXFP4": 4, "FP8": 8}

Words = NDArray[np.uint16]
Open = Callable[[Path], AbstractContextManager[Handle]]
"""The descriptor of a file."""


def _e4m3() -> NDArray[np.float32]:
    """The value of each byte of FP8: sign, four bits of exponent, three of mantissa."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _mxfp4() -> Words:
    """The BF16 of each scale and element of MXFP4, at 16 * scale + element."""
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    with np.errstate(over="ignore"):
        values = np.ldexp(np.concatenate([positive, -positive]), np.arange(256)[:, None] - 127)
    values[255] = np.nan
    words: Words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return words.ravel()


NO_NUMBER = 255
"""The scale of MXFP4 that is none."""
E4M3, MXFP4 = _e4m3(), _mxfp4()


def read_bf16(opened: Open, fragment: Fragment, scales: Scales, at: int, buffer: memoryview) -> None:
    """Fill a buffer with the BF16 elements of a quantized tensor, from `at` bytes after the first on.

    Raises:
        SourceError: a file ends before its elements or scales do.
        RefusedError: a scale is no finite positive number, or a product is NaN or too large for BF16.
    """
    out = np.frombuffer(buffer, np.uint16)
    for start, rows, columns in _pieces(at // 2, len(out), scales):
        count, begin = rows * columns, start - at // 2
        codes, factors = _codes(opened, fragment, start, count, scales), _factors(opened, start, columns, scales)
        words = out[begin : begin + count]
        if scales.method == "MXFP4":
            words[:] = MXFP4[factors.astype(np.uint16) << 4 | codes]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values = E4M3[codes].reshape(rows, columns) * casts.to_float(factors, scales.factors.dtype)
            words[:] = casts.cast(casts.as_words(values.ravel()), "F32", "BF16", fragment.path.name)
        if not casts.finite(words, "BF16"):
            nan = scales.method == "FP8" and bool(np.isnan(E4M3[codes]).any())
            wrong = "are NaN in FP8" if nan else "are too large for BF16"
            reason = f"{scales.factors.path}: elements times {scales.name} {wrong}"
            raise RefusedError(reason, "--verbatim carries every tensor as it is")


def _pieces(start: int, count: int, scales: Scales) -> Iterator[tuple[int, int, int]]:
    """(first element, rows, columns) of rectangles that have one row of factors: whole rows, or a part of one."""
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
    """Elements as they are coded, one a byte."""
    bits = BITS[scales.method]
    first, last = start * bits // 8, ((start + count) * bits + 7) // 8
    raw = np.empty(last - first, np.uint8)
    with opened(fragment.path) as fd:
        read_into(fd, raw.data, fragment.offset + first, fragment.path)
    if bits == 8:
        return raw
    return np.stack([raw & 15, raw >> 4], axis=1).ravel()[start % 2 :][:count]


def _factors(opened: Open, start: int, columns: int, scales: Scales) -> NDArray[np.generic]:
    """The factor of each element of a row, as words."""
    (high, wide), held = scales.block, scales.factors
    (row, column), each = divmod(start, scales.columns), -(-scales.columns // wide)
    matrix, inside = divmod(row, scales.rows)
    first, last = column // wide, (column + columns - 1) // wide + 1
    words = np.empty(last - first, casts.WORDS[DTYPES[held.dtype]])
    place = (matrix * -(-scales.rows // high) + inside // high) * each + first
    with opened(held.path) as fd:
        read_into(fd, words.view(np.uint8).data, held.offset + place * words.itemsize, held.path)
    _require_factors(words, place, scales)
    return np.repeat(words, wide)[column - first * wide :][:columns]


def _require_factors(words: NDArray[np.generic], place: int, scales: Scales) -> None:
    """Factors are finite and positive: a quantizer divides by each, or has it as a power of two.

    Args:
        words: some of them.
        place: the number of the first one.
        scales: what they are of.

    Raises:
        RefusedError: one is not.
    """
    held = scales.factors
    values = np.where(words == NO_NUMBER, np.nan, 1.0) if held.dtype == "U8" else casts.to_float(words, held.dtype)
    wrong = np.flatnonzero(~((values > 0) & np.isfinite(values)))
    if len(wrong):
        raise RefusedError(
            f"{held.path}: element {place + wrong[0]} of {scales.name} is {values[wrong[0]]:g}, and weights are "
            "quantized by finite and positive scales",
            "take the file from where it comes from; --verbatim carries every tensor as it is",
        )
