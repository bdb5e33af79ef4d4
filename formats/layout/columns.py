"""Pieces of a tensor as columns: the pieces of a thousand ranks of each tensor, without an object for each piece.

A piece object is made when it is asked for. Tensors that are cut alike, as those of every layer are, share one `Boxes`
object, and with it everything that is computed from the boxes: the proof that they tile the tensor, and their leaves.
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
    """A part of a tensor, and the fragment of a file where its bytes are."""

    part: Cut
    fragment: Fragment


@dataclass(frozen=True, eq=False)
class Boxes:
    """Parts of a tensor: int64 [pieces, dimensions, 2], start and stop; intervals of its elements where `flat`.

    `boxes` returns one object for equal parts, so that results computed from the parts are computed once.
    """

    ranges: Ints
    flat: bool

    def __len__(self) -> int:
        return len(self.ranges)

    def cuts(self) -> Iterator[Cut]:
        """The parts, in order."""
        for box in self.ranges.tolist():
            yield Cut(tuple((low, high) for low, high in box), self.flat)

    def cut(self, number: int) -> Cut:
        """The part of this number."""
        return Cut(tuple((low, high) for low, high in self.ranges[number].tolist()), self.flat)


_BOXES: WeakValueDictionary[tuple[object, ...], Boxes] = WeakValueDictionary()


def boxes(ranges: Ints, *, flat: bool = False) -> Boxes:
    """The `Boxes` of int64 [pieces, dimensions, 2]: the same object for the same numbers."""
    key = (blake3(ranges.tobytes()).digest(16), ranges.shape, flat)
    known = _BOXES.get(key)
    if known is None:
        _BOXES[key] = known = Boxes(ranges, flat)
    return known


@dataclass(frozen=True, eq=False)
class Columns(Sequence[Piece]):
    """Pieces of one tensor, each row-major and without gaps.

    Attributes:
        dtype: element type of the pieces.
        boxes: the parts of the tensor that the pieces are.
        paths: files that have pieces.
        file: [pieces], the index in `paths` of the file of each piece.
        offset: int64 [pieces], the first byte of each piece in its file.
        member: int64 [pieces, 3], the archive entry of each piece, a `Member`. None where files are no archives.
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
        """The fragment of a piece whose shape is known."""
        member = None if self.member is None else Member(*self.member[number].tolist())
        path, offset = self.paths[self.file[number]], int(self.offset[number])
        return Fragment(path, offset, self.dtype, shape, row_major(shape), member=member)

    def __getitem__(self, number: Any) -> Any:
        """The piece of this number."""
        cut = self.boxes.cut(range(len(self))[number])
        return Piece(cut, self.fragment(number, cut.shape))

    def __iter__(self) -> Iterator[Piece]:
        for number, cut in enumerate(self.boxes.cuts()):
            yield Piece(cut, self.fragment(number, cut.shape))

    @property
    def files(self) -> list[Path]:
        """The files that have a piece."""
        return [self.paths[number] for number in dict.fromkeys(self.file.tolist())]


@lru_cache(maxsize=256)
def tile(parts: Boxes, shape: tuple[int, ...]) -> bool:
    """Whether boxes cover each element of a tensor exactly once, and none of the boxes is empty."""
    import numpy as np

    limit, ranges = np.array((prod(shape),) if parts.flat else shape, np.int64), parts.ranges
    if ranges.shape[1:] != (len(limit), 2) or not len(ranges):
        return False
    low, high = ranges[:, :, 0], ranges[:, :, 1]
    if (low < 0).any() or (low >= high).any() or (high > limit).any():
        return False
    if sum(map(prod, (high - low).tolist())) != prod(shape):  # Python's integers do not overflow
        return False
    for axis in range(len(limit)):
        order = np.argsort(low[:, axis], kind="stable")
        if (low[order[1:], axis] >= high[order[:-1], axis]).all():
            return True
    return not overlap([cut.ranges for cut in parts.cuts()])
