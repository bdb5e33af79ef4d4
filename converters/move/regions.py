"""Regions: where a part of a tile is in a file, as strided blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from converters.plan.parts import Part
from formats.layout.leaves import Leaf

ALONE = 4
"""A contiguous block of more than a quarter of the limit is read by a call of its own: it is cheaper than a copy."""


class Region(NamedTuple):
    """A strided block: `dims` are (count, stride in the file, stride in the tile), in elements, widest stride first."""

    file: int
    tile: int
    dims: tuple[tuple[int, int, int], ...]


def tiles(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into (start, shape) pieces of at most `limit` elements, contiguous and in canonical order.

    A box without elements has none.
    """
    if 0 in shape:
        return
    inner, axis = 1, len(shape)
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    step = max(1, limit // inner)
    for outer in product(*(range(n) for n in shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            count = min(step, shape[axis - 1] - start)
            yield (*outer, start, *(0,) * (len(shape) - axis)), (*(1,) * (axis - 1), count, *shape[axis:])


class Nearby:
    """Finds the parts of a tensor that meet a tile: a tensor of a thousand ranks has as many parts."""

    def __init__(self, parts: Sequence[Part], axes: int) -> None:
        self.parts = tuple(parts)
        spans = [[(0, 1) if span.axis == "layer" else span[1:3] for span in part.leaf.spans] for part in self.parts]
        self.bounds = np.array(spans, np.int64).reshape(len(self.parts), axes, 2)

    def __call__(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Sequence[Part]:
        """The parts that meet a tile."""
        if len(self.parts) == 1:
            return self.parts
        low = np.array(start, np.int64)
        meets = (self.bounds[:, :, 0] < low + np.array(shape, np.int64)) & (self.bounds[:, :, 1] > low)
        return [self.parts[i] for i in np.flatnonzero(meets.all(axis=1)).tolist()]


def region(leaf: Leaf, start: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    """The region of a tile that a leaf holds, given that the two meet.

    `start` and `shape` are those of the tile, in the coordinates of the job's box. A `layer` span counts as coordinate
    0: a job has one layer.
    """
    address, position, dims, tile_stride = leaf.base, 0, [], 1
    for span, low, count in zip(reversed(leaf.spans), reversed(start), reversed(shape), strict=True):
        first, stop = (0, 1) if span.axis == "layer" else (span.start, span.stop)
        begin, end = max(first, low), min(stop, low + count)
        address += (begin - first) * span.stride
        position += (begin - low) * tile_stride
        if end - begin > 1:
            dims.append((end - begin, span.stride, tile_stride))
        tile_stride *= count
    dims.sort(key=lambda dim: -dim[1])
    merged: list[tuple[int, int, int]] = []
    for count, in_file, in_tile in dims:
        if merged and merged[-1][1] == count * in_file and merged[-1][2] == count * in_tile:
            merged[-1] = (merged[-1][0] * count, in_file, in_tile)
        else:
            merged.append((count, in_file, in_tile))
    return Region(address, position, tuple(merged))


def runs(where: Region, limit: int, sparsest: int) -> Iterator[tuple[int, int, int, tuple[tuple[int, int, int], ...]]]:
    """Cut a region into pieces whose elements are close together in the file.

    Args:
        where: the region.
        limit: most elements from the first to the last of a piece, unless it is contiguous on both sides.
        sparsest: most elements of the file for each element that is wanted; 1 for exact runs.

    Yields:
        (address in the file, position in the tile, elements from first to last, dims of the piece).
    """
    dims, inner, fit = where.dims, len(where.dims), 1
    span = useful = within = 1
    while inner and span * ALONE <= limit:
        count, in_file, in_tile = dims[inner - 1]
        whole = in_file == 0 or (in_file, in_tile) == (1, 1)  # stride 0: one element for all, as after torch's expand
        most = count if whole else min(count, (limit - span) // in_file + 1)
        wider = span + (most - 1) * in_file
        if most < 2 or wider > useful * most * sparsest:
            break
        within, span, useful, fit, inner = span, wider, useful * most, most, inner - 1
        if most < count:
            break
    count, far, wide = dims[inner] if inner < len(dims) else (1, 0, 0)
    cuts = [(begin, min(fit, count - begin)) for begin in range(0, count, fit)]
    for index in product(*(range(number) for number, _, _ in dims[:inner])):
        in_file = sum(i * stride for i, (_, stride, _) in zip(index, dims[:inner], strict=True))
        in_tile = sum(i * stride for i, (_, _, stride) in zip(index, dims[:inner], strict=True))
        for begin, some in cuts:
            rest = dims[inner + 1 :] if some == 1 else ((some, far, wide), *dims[inner + 1 :])
            first, position = where.file + in_file + begin * far, where.tile + in_tile + begin * wide
            yield first, position, within + (some - 1) * far, rest
