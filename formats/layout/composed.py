"""The elements of a logical tensor that two physical tensors share, as boxes along the dimensions of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.layout.columns import Cut
from formats.layout.leaves import Leaf


class Box(NamedTuple):
    """A box of a row-major tensor, and where its elements are in another tensor.

    Attributes:
        part: the box, along the dimensions of the row-major tensor.
        address: number of the element of the other tensor that is the first corner of the box.
        strides: distance of neighbours in the other tensor, along each dimension of the box, in elements.
    """

    part: Cut
    address: int
    strides: tuple[int, ...]

    def of(self, fragment: Fragment) -> Fragment:
        """The part of a fragment with the addresses of the other tensor that has the elements of the box."""
        offset = fragment.offset + self.address * DTYPES[fragment.dtype]
        return fragment._replace(offset=offset, shape=self.part.shape, strides=self.strides)


def boxes_of(here: Leaf, there: Leaf, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of a row-major tensor whose elements another tensor has.

    Args:
        here: leaf of the other tensor.
        there: leaf of the row-major tensor, of the same logical tensor.
        shape: shape of the row-major tensor.
    """
    address, index = here.base, there.base
    runs: list[tuple[int, int, int]] = []
    for near, far in zip(here.spans, there.spans, strict=True):
        low, high = max(near.start, far.start), min(near.stop, far.stop)
        if low >= high:
            return
        address += (low - near.start) * near.stride
        index += (low - far.start) * far.stride
        if high - low > 1:
            runs.append((far.stride, near.stride, high - low))
    steps = row_major(shape)
    along, rest = dict[int, tuple[int, int]](), list[tuple[int, int, int]]()
    for step, stride, count in _joined(sorted(runs, reverse=True), steps, shape):
        if step in steps:
            along[_dimension(step, steps, shape)] = count, stride
        else:
            rest.append((step, stride, count))
    for place in product(*(range(count) for *_, count in rest)):
        first = index + sum(i * step for i, (step, _, _) in zip(place, rest, strict=True))
        start = address + sum(i * stride for i, (_, stride, _) in zip(place, rest, strict=True))
        corner = [first // step % size for step, size in zip(steps, shape, strict=True)]
        sides = [along.get(dim, (1, 0)) for dim in range(len(shape))]
        ranges = tuple((low, low + count) for low, (count, _) in zip(corner, sides, strict=True))
        yield Box(Cut(ranges), start, tuple(stride for _, stride in sides))


def _dimension(step: int, steps: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The dimension, among those longer than one, along which elements of a row-major tensor are `step` apart."""
    return next(dim for dim, width in enumerate(steps) if shape[dim] > 1 and width <= step)


def _joined(
    runs: list[tuple[int, int, int]], steps: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Runs (step in the row-major tensor, stride in the other, count), joined where they are contiguous in both."""
    joined: list[tuple[int, int, int]] = []
    for step, stride, count in runs:
        if joined:
            outer_step, outer_stride, outer_count = joined[-1]
            same = _dimension(step, steps, shape) == _dimension(outer_step, steps, shape)
            if same and (outer_step, outer_stride) == (step * count, stride * count):
                joined[-1] = (step, stride, outer_count * count)
                continue
        joined.append((step, stride, count))
    return joined
