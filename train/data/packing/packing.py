"""Packing algorithms: which documents share a row. Functions of lengths and a seed; tokens are not read.

`best_fit` is best-fit decreasing, computed over the histogram of lengths: documents of equal length are exchangeable,
so whole runs of equal rows are filled at a time. The cost depends on the number of different lengths, not on the number
of documents. The other algorithms exist to resume runs of other programs, or to compare with them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import UsageError

Lengths = NDArray[np.int32]


class Rows(NamedTuple):
    """Rows of pieces of documents.

    Attributes:
        documents: the document of each piece, an index into the lengths, int32[p].
        offsets: first piece of each row, and p at the end, int64[r + 1].
        begins: first token of each piece in its document, int32[p]; None if all pieces are whole documents.
        lengths: number of tokens of each piece, int32[p]; None if all pieces are whole documents.
    """

    documents: NDArray[np.int32]
    offsets: NDArray[np.int64]
    begins: NDArray[np.int32] | None = None
    lengths: NDArray[np.int32] | None = None


def best_fit(lengths: Lengths, capacity: int, seed: int) -> Rows:
    """Best-fit decreasing: the longest document first, each into the fullest row that has room.

    Args:
        lengths: number of tokens of each document, from 1 to capacity.
        capacity: number of tokens of a row.
        seed: decides which of the documents of equal length go where.

    Returns:
        Rows in which longer documents come first.
    """
    _check(lengths, capacity)
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
    shuffled = lengths[order].astype(np.uint16 if capacity < 1 << 16 else np.int32)
    order = order[np.argsort(shuffled, kind="stable")[::-1]]
    firsts, rows, copies, slots, number = _place(np.bincount(shuffled, minlength=1), capacity)
    # Document d of the descending order belongs to the last placement that begins at or before it. A placement puts
    # `copies` documents into each of some consecutive rows, after the `slot` documents that they already have.
    counts = np.diff(firsts, append=len(order))
    inside = np.arange(len(order), dtype=np.int32) - np.repeat(firsts, counts)
    each = np.repeat(copies, counts)
    nth = inside // each
    row = np.repeat(rows, counts) + nth
    offsets = np.zeros(number + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=number), out=offsets[1:])
    documents = np.empty(len(order), np.int32)
    documents[offsets[row] + np.repeat(slots, counts) + inside - nth * each] = order
    return Rows(documents, offsets)


Placements = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]


def _place(histogram: NDArray[np.intp], capacity: int) -> Placements:
    """Fill rows, a run of equal rows at a time.

    A row that takes a document is then the fullest row for the next document of that length too, as long as there is
    room, so it takes all of them at once.

    Returns:
        For each placement: the first document in descending order, the first row, the number of documents that each row
        gets, and the number that the row already has. And the number of rows.
    """
    firsts: list[int] = []
    rows: list[int] = []
    copies: list[int] = []
    slots: list[int] = []
    free: list[int] = []  # different free spaces, ascending
    runs: dict[int, list[tuple[int, int, int]]] = {}  # free space: (first row, rows, documents in each)
    done = opened = 0
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            place = bisect_left(free, length)
            if place < len(free):
                space = free[place]
                row, many, placed = runs[space].pop()
                if not runs[space]:
                    del runs[space], free[place]
            else:
                space, row, placed = capacity, opened, 0
                many = -(-left // (capacity // length))
                opened += many
            each = space // length
            full = min(many, left // each)
            over = left - full * each if full < many else 0
            for first, number, taken in ((row, full, each), (row + full, 1, over)):
                if not (number and taken):
                    continue
                firsts.append(done)
                rows.append(first)
                copies.append(taken)
                slots.append(placed)
                done += number * taken
                left -= number * taken
                _keep(free, runs, space - taken * length, (first, number, placed + taken))
            used = full + (over > 0)
            if used < many:
                _keep(free, runs, space, (row + used, many - used, placed))
    return (*(np.array(column, np.int32) for column in (firsts, rows, copies, slots)), opened)  # type: ignore[return-value]


def _keep(free: list[int], runs: dict[int, list[tuple[int, int, int]]], space: int, run: tuple[int, int, int]) -> None:
    """Register rows that have some free space left."""
    if not space:
        return
    if space in runs:
        runs[space].append(run)
    else:
        runs[space] = [run]
        insort(free, space)


def next_fit(lengths: Lengths, capacity: int, seed: int) -> Rows:
    """Documents in random order, a new row whenever a document does not fit (`pack_until_overflow` of GPT-NeoX)."""
    _check(lengths, capacity)
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
    return Rows(order, _filled(lengths[order], capacity))


def longest_first(lengths: Lengths, capacity: int) -> Rows:
    """The longest document first, ties in file order, a new row when one does not fit (Megatron-LLM's `pack_docs`).

    A separator token is between two documents of a row. A document longer than a row is cut, and is alone in its row.

    Source: xingyaoww/Megatron-LLM 1b07577, tools/preprocess_instruct_data.py: the first document of a row needs room
    for a separator too, so that the branch that cuts writes a document which is exactly as long as a row.
    """
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    taken = np.minimum(lengths[order], capacity)
    return Rows(order, _filled(taken + 1, capacity + 1), np.zeros(len(order), np.int32), taken)


def _filled(lengths: Lengths, capacity: int) -> NDArray[np.int64]:
    """First document of each row, and the number of documents, for rows filled in order (next fit), int64[r + 1]."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    following = (np.searchsorted(ends, ends[:-1] + capacity, "right") - 1).tolist()
    offsets = [0]
    while offsets[-1] < len(lengths):
        offsets.append(following[offsets[-1]])
    return np.array(offsets, np.int64)


def concatenated(lengths: Lengths, capacity: int, seed: int) -> Rows:
    """Documents in random order, concatenated and cut wherever a row is full (`packed` of GPT-NeoX).

    The last token of a row is also the first token of the next row: it is a label in one and an input in the other.
    """
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    total, step = int(ends[-1]) if len(ends) else 0, capacity - 1
    lows = np.arange(0, max(total - 1, 1 if total else 0), step, dtype=np.int64)
    highs = np.minimum(lows + capacity, total)
    first, last = np.searchsorted(ends, lows, "right"), np.searchsorted(ends, highs, "left")
    counts = last - first + 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    piece = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - first, counts)
    base = ends[piece] - lengths[order[piece]]
    begins = np.maximum(np.repeat(lows, counts), base) - base
    stops = np.minimum(np.repeat(highs, counts), ends[piece]) - base
    return Rows(order[piece], offsets, begins.astype(np.int32), (stops - begins).astype(np.int32))


def _check(lengths: Lengths, capacity: int) -> None:
    if capacity < 1:
        raise UsageError(f"a row of {capacity} tokens holds nothing")
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise UsageError(
            f"documents of {int(lengths.min())} to {int(lengths.max())} tokens do not fit rows of {capacity}",
            "leave the others out first",
        )
