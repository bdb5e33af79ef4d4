"""The edge from floats to FP8 with a scale for each block: elements and scales can be read from any offset on.

Facts: transformers 5.23.0, integrations/finegrained_fp8.py (`Fp8Quantize`): in float32, the factor is 448 over the
largest absolute value of a block, 1 for a block of zeros; elements times the factor are rounded to the nearest even;
the stored scale is the reciprocal of the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from converters.move import casts
from formats.disk.safetensors import DTYPES, Coded, Fragment
from formats.errors import RefusedError

LARGEST = np.float32(448)
"""The largest number of E4M3."""
PIECE = 1 << 18
"""Elements of a row of blocks that are read at a time: few enough to need little memory."""

Read = Callable[[Fragment, int, memoryview], None]
"""Fills a buffer from a fragment, starting at a byte offset."""


def read_coded(read: Read, coded: Coded, at: int, buffer: memoryview) -> None:
    """Fill a buffer with FP8 elements, or with their scales in float32, from byte `at` on.

    Raises:
        SourceError: a file ends before its elements do.
        RefusedError: an element is NaN or infinite.
    """
    if coded.scales:
        _fill_scales(read, coded, at // 4, np.frombuffer(buffer, np.float32))
    else:
        _fill_codes(read, coded, at, np.frombuffer(buffer, np.uint8))


def _fill_scales(read: Read, coded: Coded, start: int, out: NDArray[np.float32]) -> None:
    """Fill `out` with scales from number `start` on; of the first and last row of blocks, possibly only a part."""
    wide = coded.matrix.shape[1] // coded.block[1]
    for row in range(start // wide, -(-(start + len(out)) // wide)):
        low, high = max(start, row * wide), min(start + len(out), (row + 1) * wide)
        for first, blocks in _panels(read, coded, row, low - row * wide, high - row * wide):
            begin = row * wide + first - start
            out[begin : begin + blocks.shape[1]] = 1 / _factors(blocks)


def _fill_codes(read: Read, coded: Coded, start: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` with elements from number `start` on. Whole blocks are read: their largest element scales them."""
    columns, (tall, broad) = coded.matrix.shape[1], coded.block
    for row in range(start // (columns * tall), -(-(start + len(out)) // (columns * tall))):
        for first, blocks in _panels(read, coded, row, 0, columns // broad):
            codes = to_e4m3((blocks * _factors(blocks)[:, None]).reshape(tall, -1))
            width = codes.shape[1]
            for inside, line in enumerate(codes):
                begin = (row * tall + inside) * columns + first * broad - start
                low, high = max(begin, 0), min(begin + width, len(out))
                if low < high:
                    out[low:high] = line[low - begin : high - begin]


def _panels(read: Read, coded: Coded, row: int, low: int, high: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """A few blocks of a row of blocks at a time: the number of the first, and values as [rows, blocks, columns].

    Raises:
        RefusedError: an element is NaN or infinite.
    """
    matrix, (tall, broad) = coded.matrix, coded.block
    size, columns = DTYPES[matrix.dtype], matrix.shape[1]
    most = max(1, PIECE // (tall * broad))
    for first in range(low, high, most):
        count = min(most, high - first)
        words = np.empty((tall, count * broad), casts.WORDS[size])
        for inside, line in enumerate(words):
            read(matrix, ((row * tall + inside) * columns + first * broad) * size, line.view(np.uint8).data)
        values = casts.to_float(words.ravel(), matrix.dtype).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise RefusedError(
                f"{matrix.path}: a weight is NaN or infinite, which has no scale", "leave --quantize out"
            )
        yield first, values.reshape(tall, count, broad)


def _factors(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """The factor of the elements of each block, given as [rows, blocks, columns].

    Computed as torch divides a number by a tensor: the rounded reciprocal times the number. It is 1 where that is
    infinite: such a block is zeros in FP8. transformers writes 448 with the scale 0 then, which is zeros too, and NaN
    for each zero of the block.
    """
    largest = np.abs(blocks).max(axis=(0, 2))
    one = np.float32(1)
    with np.errstate(over="ignore"):
        factors: NDArray[np.float32] = one / np.where(largest > 0, largest, one) * LARGEST
    return np.where((largest > 0) & np.isfinite(factors), factors, one)


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The byte of E4M3 for each number, rounded to the nearest even; numbers beyond the largest become the largest."""
    bits = values.view(np.uint32)
    sizes = np.minimum(np.abs(values), LARGEST)
    normal = sizes.view(np.uint32)
    normal = ((normal + 0x7FFFF + (normal >> 20 & 1)) >> 20) - (127 - 7 << 3)
    small = np.rint(sizes * 512).astype(np.uint32)  # multiples of 2**-9 below 2**-6
    codes: NDArray[np.uint8] = (np.where(sizes < 2.0**-6, small, normal) | (bits >> 24 & 128)).astype(np.uint8)
    return codes
