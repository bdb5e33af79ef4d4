"""Tensors in pieces: rectangles of a sharded checkpoint, or intervals of a flat parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.errors import SourceError
from formats.layout.boxes import overlap
from formats.layout.columns import Columns, Cut, Piece, tile
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE, Slot


class Scattered(NamedTuple):
    """A tensor in pieces.

    Each of `copies` is a set of pieces that make up the tensor; the first copy is the original.
    """

    shape: tuple[int, ...]
    dtype: str
    copies: tuple[Sequence[Piece], ...]

    @property
    def files(self) -> list[Path]:
        """The files that have a piece of the first copy."""
        first = self.copies[0]
        return first.files if isinstance(first, Columns) else [piece.fragment.path for piece in first]

    @property
    def whole(self) -> Fragment:
        """A fragment that stands for the whole tensor: file of the first piece, shape and element type."""
        return Fragment(self.copies[0][0].fragment.path, 0, self.dtype, self.shape, row_major(self.shape))


def whole_part(shape: tuple[int, ...]) -> Cut:
    """The part that is the whole tensor."""
    return Cut(tuple((0, n) for n in shape))


def single_piece(name: str, fragment: Fragment) -> Scattered:
    """A tensor in one piece."""
    return from_pieces(name, fragment.shape, fragment.dtype, [Piece(whole_part(fragment.shape), fragment)])


def from_pieces(name: str, shape: tuple[int, ...], dtype: str, pieces: Iterable[Piece]) -> Scattered:
    """A tensor from its pieces. A part that occurs several times belongs to several copies of the tensor.

    Raises:
        SourceError: the pieces leave a hole or overlap, or differ in element type; the message names the files.
    """
    if isinstance(pieces, Columns) and pieces.dtype == dtype and tile(pieces.boxes, shape):
        return Scattered(shape, dtype, (pieces,))
    by_part: dict[Cut, list[Piece]] = {}
    for piece in pieces:
        if piece.fragment.dtype != dtype:
            raise SourceError(f"{piece.fragment.path} holds {name} as {piece.fragment.dtype}, it should be {dtype}")
        if prod(piece.part.shape) or not prod(shape):
            by_part.setdefault(piece.part, []).append(piece)
    files = sorted({str(piece.fragment.path) for same in by_part.values() for piece in same})
    where = f"{', '.join(files[:3])}{f' and {len(files) - 3} more files' if len(files) > 3 else ''}"
    for part in by_part:
        limit = (prod(shape),) if part.flat else shape
        if len(part.ranges) != len(limit) or not all(
            0 <= low <= high <= n for (low, high), n in zip(part.ranges, limit, strict=False)
        ):
            raise SourceError(f"{name} {list(shape)} has a piece {_text(part)} outside of it in {where}")
    clash = overlap([part.ranges for part in by_part if prod(part.shape)])
    if clash:
        raise SourceError(f"the pieces {_text(Cut(clash[0]))} and {_text(Cut(clash[1]))} of {name} overlap in {where}")
    covered = sum(prod(part.shape) for part in by_part)
    if covered != prod(shape) or not by_part:
        missing = prod(shape) - covered
        raise SourceError(
            f"{missing} of the {prod(shape)} elements of {name} {list(shape)} are missing: the others are in {where}",
            "a rank's file may be missing or cut off",
        )
    depth = max(len(same) for same in by_part.values())
    copies = tuple(tuple(same[min(i, len(same) - 1)] for same in by_part.values()) for i in range(depth))
    return Scattered(shape, dtype, copies)


def _text(part: Cut) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in part.ranges) + "]"


def unstack(tensor: Scattered, dim: int = 0) -> Iterator[Scattered]:
    """The tensors that are stacked along a dimension of a tensor, in order."""
    slices: list[list[list[Piece]]] = [[[] for _ in tensor.copies] for _ in range(tensor.shape[dim])]
    for number, copy in enumerate(tensor.copies):
        for piece in copy:
            for index in range(*piece.part.ranges[dim]):
                slices[index][number].append(_at(index, piece, dim))
    for copies in slices:
        yield Scattered(_without(tensor.shape, dim), tensor.dtype, tuple(map(tuple, copies)))


def repeat(tensor: Scattered, count: int) -> Scattered:
    """A stack of `count` equal tensors, each of which is the same bytes."""
    return Scattered(
        (count, *tensor.shape),
        tensor.dtype,
        tuple(tuple(_stacked(index, piece) for index in range(count) for piece in copy) for copy in tensor.copies),
    )


def _stacked(index: int, piece: Piece) -> Piece:
    """A piece at an index of a further first dimension."""
    fragment, part = piece.fragment, Cut(((index, index + 1), *piece.part.ranges))
    strides = (prod(fragment.shape), *fragment.strides)
    return Piece(part, fragment._replace(shape=(1, *fragment.shape), strides=strides))


def _at(index: int, piece: Piece, dim: int) -> Piece:
    """The part of a piece at an index of a dimension, without that dimension."""
    fragment, start = piece.fragment, piece.part.ranges[dim][0]
    offset = fragment.offset + (index - start) * fragment.strides[dim] * DTYPES[fragment.dtype]
    shape, strides = _without(fragment.shape, dim), _without(fragment.strides, dim)
    return Piece(Cut(_without(piece.part.ranges, dim)), fragment._replace(offset=offset, shape=shape, strides=strides))


def _without(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return values[:dim] + values[dim + 1 :]


def place_pieces(placed: Placed, tensor: Scattered) -> Iterator[Placed]:
    """A placed tensor for each piece of a tensor, or for each copy whose pieces are columns."""
    for number, copy in enumerate(tensor.copies):
        slot = placed.slot._replace(replica=placed.slot.replica._replace(number=number))
        if isinstance(copy, Columns):
            yield Placed(placed.key, slot, placed.fragment, columns=copy)
            continue
        for part, fragment in copy:
            yield Placed(placed.key, slot, fragment, part)


def match_pieces(
    slots: Iterable[Slot], tensors: Mapping[str, Scattered], drops: Sequence[str], where: Path
) -> tuple[list[Placed], tuple[Placed, ...], list[str]]:
    """Do `match` for tensors in one place. Returns the whole tensors, all their pieces, and the dropped keys."""
    placed, dropped = match(slots, {ALONE: {key: tensor.whole for key, tensor in tensors.items()}}, drops, where)
    return placed, tuple(piece for whole in placed for piece in place_pieces(whole, tensors[whole.key])), dropped
