"""Pieces of a tensor as columns: what a thousand ranks hold of each tensor, without an object for each piece.

A piece is made when it is asked for. Tensors that are cut alike, as those of every layer are, share their boxes, and
with them what follows from these: the proof that they tile the tensor, and the leaves of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from blake3 import blake3

from formats.disk.safetensors import Fragment, Member, row_major
from formats.layout.boxes import overlap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.integer[Any]]"


class Cut(NamedTuple):
    """The part of a physical tensor that is stored in one place.

    A box (start and stop along each dimension), or, when `flat`, one interval of its elements in row-major order.
    """

    ranges: tuple[tuple[int, int], ...]
    flat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(stop - start for start, stop in self.ranges)


class Piece(NamedTuple):
    """A part of a tensor, and where it lies."""

    part: Cut
    fragment: Fragment


@dataclass(frozen=True, eq=False)
class Boxes:
    """Parts of a tensor: int64 [pieces, dimensions, 2], start and stop; intervals of its elements where `flat`.

    Equal ones are one object (`boxes`): what is worked out of one is worked out once.
    """

    ranges: Ints
    flat: bool

    def __len__(self) -> int:
        return len(self.ranges)

    def cuts(self) -> Iterator[Cut]:
        """Each part."""
        for box in self.ranges.tolist():
            yield Cut(tuple((low, high) for low, high in box), self.flat)

    def cut(self, number: int) -> Cut:
        """One part."""
        return Cut(tuple((low, high) for low, high in self.ranges[number].tolist()), self.flat)


_BOXES: WeakValueDictionary[tuple[object, ...], Boxes] = WeakValueDictionary()


def boxes(ranges: Ints, *, flat: bool = False) -> Boxes:
    """Boxes of int64 [pieces, dimensions, 2]: the same object for the same numbers."""
    key = (blake3(ranges.tobytes()).digest(16), ranges.shape, flat)
    known = _BOXES.get(key)
    if known is None:
        _BOXES[key] = known = Boxes(ranges, flat)
    return known


@dataclass(frozen=True, eq=False)
class Columns(Sequence[Piece]):
    """Pieces of one tensor, each row-major and without gaps.

    Attributes:
        dtype: their element type.
        boxes: which parts they are.
        paths: files.
        file: [pieces], which of `paths` holds each.
        offset: int64 [pieces], the first byte there.
        member: int64 [pieces, 3], the entry of an archive that holds each: `Member`. None where there are no archives.
    """

    dtype: str
    boxes: Boxes
    paths: Sequence[Path]
    file: Ints
    offset: Ints
    member: Ints | None

    def __len__(self) -> int:
        return len(self.boxes)

    def fragment(self, number: int, shape: tuple[int, ...]) -> Fragment:
        """Where a piece, whose shape is known, lies."""
        member = None if self.member is None else Member(*self.member[number].tolist())
        path, offset = self.paths[self.file[number]], int(self.offset[number])
        return Fragment(path, offset, self.dtype, shape, row_major(shape), member=member)

    def __getitem__(self, number: Any) -> Any:
        """One piece."""
        cut = self.boxes.cut(range(len(self))[number])
        return Piece(cut, self.fragment(number, cut.shape))

    def __iter__(self) -> Iterator[Piece]:
        for number, cut in enumerate(self.boxes.cuts()):
            yield Piece(cut, self.fragment(number, cut.shape))

    @property
    def files(self) -> list[Path]:
        """The files that hold a piece."""
        return [self.paths[number] for number in dict.fromkeys(self.file.tolist())]


@lru_cache(maxsize=256)
def tile(parts: Boxes, shape: tuple[int, ...]) -> bool:
    """Whether boxes hold each element of a tensor exactly once, and none of them is empty."""
    import numpy as np

    limit, ranges = np.array((prod(shape),) if parts.flat else shape, np.int64), parts.ranges
    if ranges.shape[1:] != (len(limit), 2) or not len(ranges):
        return False
    low, high = ranges[:, :, 0], ranges[:, :, 1]
    if (low < 0).any() or (low >= high).any() or (high > limit).any():
        return False
    if sum(map(prod, (high - low).tolist())) != prod(shape):  # of Python's integers, which do not overflow
        return False
    for axis in range(len(limit)):
        order = np.argsort(low[:, axis], kind="stable")
        if (low[order[1:], axis] >= high[order[:-1], axis]).all():
            return True
    return not overlap([cut.ranges for cut in parts.cuts()])
