"""What a tensor holds of another one: leaves of the same coordinates, as boxes of the other tensor's dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.layout.columns import Cut
from formats.layout.leaves import Leaf


class Box(NamedTuple):
    """A box of a tensor, and where it is in another one.

    Attributes:
        part: the box, along the dimensions of the tensor.
        address: the element of the other tensor that holds its first corner.
        strides: elements from one to the next there, along each dimension.
    """

    part: Cut
    address: int
    strides: tuple[int, ...]

    def of(self, fragment: Fragment) -> Fragment:
        """What a fragment with the addresses of the other tensor holds of the box."""
        offset = fragment.offset + self.address * DTYPES[fragment.dtype]
        return fragment._replace(offset=offset, shape=self.part.shape, strides=self.strides)


def boxes_of(here: Leaf, there: Leaf, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of a row-major tensor of which another one holds the elements.

    Args:
        here: what the other tensor holds.
        there: what the row-major one holds, of the same logical tensor.
        shape: that of the row-major one.
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
    along, apart = dict[int, tuple[int, int]](), list[tuple[int, int, int]]()
    for step, stride, count in _joined(sorted(runs, reverse=True), steps, shape):
        if step in steps:
            along[_dimension(step, steps, shape)] = count, stride
        else:
            apart.append((step, stride, count))
    for place in product(*(range(count) for *_, count in apart)):
        first = index + sum(i * step for i, (step, _, _) in zip(place, apart, strict=True))
        start = address + sum(i * stride for i, (_, stride, _) in zip(place, apart, strict=True))
        corner = [first // step % size for step, size in zip(steps, shape, strict=True)]
        sides = [along.get(dim, (1, 0)) for dim in range(len(shape))]
        ranges = tuple((low, low + count) for low, (count, _) in zip(corner, sides, strict=True))
        yield Box(Cut(ranges), start, tuple(stride for _, stride in sides))


def _dimension(step: int, steps: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The dimension along which a row-major tensor has elements so far apart, of those that are longer than one."""
    return next(dim for dim, width in enumerate(steps) if shape[dim] > 1 and width <= step)


def _joined(
    runs: list[tuple[int, int, int]], steps: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Runs (step in the row-major tensor, stride in the other, count), those one that follow each other in both."""
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
