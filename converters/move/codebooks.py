"""The edge from 8-bit codes to float32: the value of each code times the largest absolute value of its block.

bitsandbytes 0.50.2 reads its moments in this way, in float32 (functional.py `dequantize_blockwise`): the elements are
in one row, in blocks of 256.
"""

from __future__ import annotations

import numpy as np

from converters.move.dequantize import PIECE, Open
from formats.disk.safetensors import Fragment, Scales, read_into
from formats.errors import SourceError


def read_f32(opened: Open, fragment: Fragment, scales: Scales, at: int, buffer: memoryview) -> None:
    """Fill a buffer with the float32 elements of a row of codes, from byte `at` of the float32 elements on.

    Raises:
        SourceError: a file ends before its elements do, the value of a code or the largest of a block is not finite,
            the largest of a block is negative, or the values of the codes do not ascend.
    """
    out, wide = np.frombuffer(buffer, np.float32), scales.block[1]
    assert scales.values is not None
    values = _floats(opened, scales.values, 0, 256)
    if (np.diff(values) < 0).any():
        raise SourceError(f"{scales.values.path} holds values of 8-bit codes that do not ascend")
    for begin in range(0, len(out), PIECE):
        count, start = min(PIECE, len(out) - begin), at // 4 + begin
        codes = np.empty(count, np.uint8)
        with opened(fragment.path) as fd:
            read_into(fd, codes.data, fragment.offset + start, fragment.path)
        first, last = start // wide, (start + count - 1) // wide + 1
        factors = _floats(opened, scales.factors, first, last - first)
        if (factors < 0).any():
            raise SourceError(f"{scales.factors.path} holds a negative {scales.name}, which is the largest of a block")
        largest = np.repeat(factors, wide)[start - first * wide :][:count]
        np.multiply(values[codes], largest, out=out[begin : begin + count])


def _floats(opened: Open, fragment: Fragment, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Some of the float32 values of codes, or of the largest values of blocks."""
    numbers = np.empty(count, np.float32)
    with opened(fragment.path) as fd:
        read_into(fd, numbers.view(np.uint8).data, fragment.offset + 4 * first, fragment.path)
    if not np.isfinite(numbers).all():
        raise SourceError(f"{fragment.path} holds NaN or infinity among the numbers that its 8-bit moments are read by")
    return numbers
