"""Products of two small matrices, a part at a time, in float64: the update that LoRA adds to a matrix.

The result does not depend on the BLAS, the order or the parts of the multiplication: both matrices are split into
numbers of so few bits that each sum of their products is exact in float64 (as in Ozaki, Ogita, Oishi and Rump,
"Error-free transformations of matrix multiplication", 2012). Left out of each term is what is less than 2**-42 of the
largest element of a row of the left matrix times the largest of a column of the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from converters.move import casts
from formats.disk.safetensors import DTYPES, Fragment, Product
from formats.errors import RefusedError

PIECE = 1 << 16
"""Elements of a product at a time: few enough to stay in the cache, and in little memory."""
WIDEST = 1 << 8
"""Columns of the product at a time: as many are read from each row of the right matrix."""
ALONE = 1 << 18
"""Multiplications that OpenBLAS does in one thread (interface/gemm.c): for more it starts threads, which slow ours."""
FLOAT64 = 53
"""Bits that a sum of products may have to be exact in float64."""

Matrix = NDArray[np.float64]
Read = Callable[[Fragment, int, memoryview], None]
"""Fills a buffer from a fragment, starting at a byte offset."""


def read_product(read: Read, fragment: Fragment, factors: Product, at: int, buffer: memoryview) -> None:
    """Fill a buffer with the float64 elements of a product, from byte `at` of the product on.

    Raises:
        SourceError: a file ends before its elements do.
        RefusedError: an element of one of the matrices is NaN or infinite.
    """
    out = np.frombuffer(buffer, np.float64)
    height, width = fragment.shape[-2:]
    for number, row, column, rows, columns in rectangles(at // 8, len(out), height, width):
        begin = (number * height + row) * width + column - at // 8
        high, wide = (column, row) if factors.transposed else (row, column)
        tall, broad = (columns, rows) if factors.transposed else (rows, columns)
        ranks = factors.right.shape[0] // factors.matrices
        left = _block(read, factors.left, range(high, high + tall), slice(number, None, factors.matrices))
        right = _block(read, factors.right, range(number * ranks, (number + 1) * ranks), slice(wide, wide + broad))
        for side, values in zip("BA", (left, right), strict=True):
            if not np.isfinite(values).all():
                raise RefusedError(
                    f"{factors.left.path} holds NaN or infinity in lora_{side} of {factors.name}",
                    "the training of the adapter has diverged",
                )
        made = multiplied(left, right) * factors.scale
        into = np.lib.stride_tricks.as_strided(out[begin:], (rows, columns), (8 * width, 8))
        into[...] = made.T if factors.transposed else made


def rectangles(start: int, count: int, height: int, width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(matrix, row, column, rows, columns) of rectangles that cover `count` elements of consecutive matrices."""
    stop = start + count
    while start < stop:
        row, column = divmod(start, width)
        number, inside = divmod(row, height)
        rows, columns = 1, min(width - column, stop - start)
        if columns == width:
            rows = min(height - inside, (stop - start) // width)
        high = max(1, PIECE // min(columns, WIDEST))
        for first, low in product(range(0, rows, high), range(0, columns, WIDEST)):
            yield number, inside + first, column + low, min(high, rows - first), min(WIDEST, columns - low)
        start += rows * columns


def _block(read: Read, fragment: Fragment, rows: range, columns: slice) -> Matrix:
    """Some rows and columns of a matrix, as float64."""
    size, (first, stop, step) = DTYPES[fragment.dtype], columns.indices(fragment.shape[1])
    words = np.empty((len(rows), stop - first), casts.WORDS[size])
    if first == 0 and stop == fragment.shape[1]:
        read(fragment, rows.start * stop * size, words.reshape(-1).view(np.uint8).data)
    else:
        for row, into in zip(rows, words, strict=True):
            read(fragment, (row * fragment.shape[1] + first) * size, into.view(np.uint8).data)
    values: Matrix = casts.to_float(words[:, ::step].ravel(), fragment.dtype).astype(np.float64)
    return values.reshape(len(rows), -1)


def multiplied(left: Matrix, right: Matrix) -> Matrix:
    """The product of two matrices, to 2**-42 of each term, and the same bits everywhere."""
    bits = (FLOAT64 - max(1, left.shape[1]).bit_length()) // 2
    (high, low), (top, rest) = _halves(left, 1, bits), _halves(right, 0, bits)
    return _times(high, top) + (_times(high, rest) + _times(low, top)) + _times(low, rest)


def _times(left: Matrix, right: Matrix) -> Matrix:
    """The product of two matrices that is exact in float64, a few rows at a time."""
    rows = max(1, ALONE // max(1, right.size))
    whole = len(left) // rows * rows
    stacked = np.matmul(left[:whole].reshape(-1, rows, left.shape[1]), right)
    rest = np.matmul(left[whole:, None], right)
    return np.concatenate([stacked.reshape(whole, right.shape[1]), rest.reshape(len(left) - whole, right.shape[1])])


def _halves(matrix: Matrix, axis: int, bits: int) -> tuple[Matrix, Matrix]:
    """A matrix as the sum of two whose elements, along an axis, have `bits` bits and one exponent."""
    largest = np.frexp(np.abs(matrix).max(axis, initial=0.0, keepdims=True))[1]
    unit = np.ldexp(1.0, largest - bits)
    high = np.rint(matrix / unit) * unit
    finer = np.ldexp(unit, -bits)
    return high, np.rint((matrix - high) / finer) * finer
