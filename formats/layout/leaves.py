"""Leaves: affine maps between the coordinates of a logical tensor and the addresses of a physical one.

    address = base + sum(stride * (coordinate - start))

in elements of the physical tensor, over a box of coordinates. Two layouts of the same logical tensor are maps from the
same coordinates, so nothing else is needed to move data between them, in any direction: there are no inverses to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple


class Span(NamedTuple):
    """Coordinates [start, stop) of an axis, `stride` elements apart in the physical tensor."""

    axis: str
    start: int
    stop: int
    stride: int

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Leaf:
    """An affine map from a box of a logical tensor to addresses of a physical one.

    `base` is the address of the box's first corner. Leaves that `lower` makes are nested: sorted by stride, each
    stride is at least as wide as all spans with smaller strides together. `clip` relies on this and preserves it.
    """

    tensor: str
    spans: tuple[Span, ...]
    base: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of the leaf."""
        return prod(span.size for span in self.spans)

    @property
    def width(self) -> int:
        """Distance from the first address to the one after the last."""
        return sum(span.stride * (span.size - 1) for span in self.spans) + 1


def clip(leaf: Leaf, low: int, high: int) -> Iterator[Leaf]:
    """The parts of a leaf whose addresses are in [low, high). At most 2k - 1 boxes for k axes.

    Every cut of a tensor is made this way: a tensor-parallel cut inside an attention group, an interval of a flat
    optimizer partition, a rectangle.
    """
    if not leaf.numel or high <= leaf.base or low >= leaf.base + leaf.width:
        return
    if low <= leaf.base and leaf.base + leaf.width <= high:
        yield leaf
        return
    outer = max(range(len(leaf.spans)), key=lambda i: (leaf.spans[i].size > 1, leaf.spans[i].stride))
    span = leaf.spans[outer]

    def part(start: int, stop: int) -> Leaf:
        spans = list(leaf.spans)
        spans[outer] = span._replace(start=span.start + start, stop=span.start + stop)
        return replace(leaf, spans=tuple(spans), base=leaf.base + start * span.stride)

    inner = leaf.width - span.stride * (span.size - 1)
    first = max(0, -((leaf.base - low) // span.stride))  # ceil((low - base) / stride)
    last = min(span.size, (high - inner - leaf.base) // span.stride + 1)
    touched_first = max(0, (low - leaf.base) // span.stride)
    touched_last = min(span.size, -(-(high - leaf.base) // span.stride))
    if first >= last:
        for index in range(touched_first, touched_last):
            yield from clip(part(index, index + 1), low, high)
        return
    for index in range(touched_first, first):
        yield from clip(part(index, index + 1), low, high)
    yield part(first, last)
    for index in range(last, touched_last):
        yield from clip(part(index, index + 1), low, high)


def cut(leaves: Iterable[Leaf], low: int, high: int) -> list[Leaf]:
    """The parts of some leaves whose addresses are in [low, high), with addresses counted from `low`."""
    return [replace(piece, base=piece.base - low) for leaf in leaves for piece in clip(leaf, low, high)]
