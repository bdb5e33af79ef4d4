"""Read a logical tensor tile by tile: gathered from its leaves, with further copies settled and new rows filled in."""

from __future__ import annotations

import threading
from math import prod

import numpy as np
from blake3 import blake3

from converters.move import casts
from converters.move.blocks import Files, gather
from converters.move.casts import WORDS, Array
from converters.move.hashing import hasher
from converters.move.regions import Nearby, tiles
from converters.move.replicas import Copies, Tile
from converters.plan.plan import Job
from formats.checkpoint import MANIFEST
from formats.disk.safetensors import DTYPES, FLOATS
from formats.errors import RefusedError, VerificationError, short_memory

Box = tuple[tuple[int, int], ...]
"""A start and a stop along each axis of a logical tensor."""
SCRATCH = 512 << 10
"""Bytes of strided blocks, with the gaps between them, that are read at a time: they stay in the cache."""


class Buffers(threading.local):
    """One thread's memory: a tile, a second one for casts and further copies, and scratch for strided blocks."""

    def __init__(self, nbytes: int) -> None:
        around = min(SCRATCH, nbytes // 3 // 64 * 64)
        tile = (nbytes - around) // 2 // 64 * 64
        try:
            self.tile, self.other, self.scratch = (np.empty(size, np.uint8) for size in (tile, tile, around))
        except MemoryError:
            raise short_memory(f"there are no {nbytes} bytes for the buffers of a thread") from None


class Reading:
    """Reads the tiles of one job's tensor. A tile is in the thread's memory, and overwritten by the next one.

    Elements that no source has are zero: a summand may be of a part of the tensor.

    Args:
        job: the job that says what is read, and which rows are new.
        copies: the handling of further copies of the tensor.
        files: open files.
        buffers: this thread's memory.
        box: the part of the tensor that the tiles are in; only all of it is compared with what is recorded.
    """

    def __init__(self, job: Job, copies: Copies, files: Files, buffers: Buffers, box: Box) -> None:
        self.job, self.copies, self.files, self.buffers = job, copies, files, buffers
        word = WORDS[DTYPES[job.source_dtype]]
        self.tile, self.scratch = buffers.tile.view(word), buffers.scratch.view(word)
        self.sources = Nearby(job.sources, len(job.shape))
        self.whole = sum(part.leaf.numel for part in job.sources) >= prod(job.shape)
        self.grows = job.rows is not None and box[0][1] > job.rows
        make = last_row if job.last else mean_row
        self.fill = make(job, self.sources, files, self.tile, self.scratch) if self.grows else self.tile[:0]
        self.recorded = job.recorded if box == tuple((0, n) for n in job.shape) else None
        self.digest = blake3()

    def __call__(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """The elements of a tile, as words."""
        values = self.tile[: prod(shape)]
        if not self.whole:
            values[:] = 0
        gather(self.files, self.sources, start, shape, values, self.scratch)
        self.copies.settle(values, Tile(start, shape, self.buffers.other, self.buffers.scratch))
        if self.recorded:
            self._see(start, shape, values)
        if self.grows:
            _grow(values, self.job.rows or 0, self.fill, start, shape)
        return values

    def _see(self, start: tuple[int, ...], shape: tuple[int, ...], values: Array) -> None:
        """Feed the digest of the tensor as it is in the source; its first tile begins a new one."""
        job, rows = self.job, self.job.rows
        if self.recorded and not any(start):
            full = job.shape if rows is None else (rows, *job.shape[1:])
            self.digest = hasher(self.recorded.name, job.source_dtype, full)
        if rows is not None:
            values = values[: max(0, min(shape[0], rows - start[0])) * prod(shape[1:])]
        if len(values):
            self.digest.update((casts.add_one(values, job.source_dtype) if job.less_one[0] else values).data.cast("B"))

    def judge(self) -> None:
        """Compare what was read with what is recorded, after the last tile.

        Raises:
            VerificationError: they differ.
        """
        if self.recorded and self.digest.hexdigest() != self.recorded.digest:
            path = self.job.sources[0].fragment.path
            raise VerificationError(
                f"{path} is damaged: {self.job.label} differs from the {MANIFEST} of its checkpoint",
                "`convert verify` lists all that differs; copy it again",
            )


def _grow(values: Array, rows: int, fill: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Put the new row into the rows of a tile that are after the rows of the source."""
    (low, left), (tall, wide) = (*start, 0)[:2], (*shape, 1)[:2]
    new = min(tall, max(0, low + tall - rows))
    values.reshape(tall, wide)[tall - new :] = fill[left : left + wide]


def mean_row(job: Job, sources: Nearby, files: Files, tile: Array, scratch: Array) -> Array:
    """The mean of all rows of a matrix (or elements of a vector), taken in float64 and rounded once to its type."""
    rows, width = job.rows or 0, prod(job.shape[1:])
    if job.source_dtype not in FLOATS:
        raise RefusedError(f"{job.label} is {job.source_dtype}: its rows have no mean")
    total = np.zeros(width, np.float64)
    for start, shape in tiles((rows, *job.shape[1:]), tile.nbytes // tile.itemsize):
        values = tile[: prod(shape)]
        gather(files, sources, start, shape, values, scratch)
        left, wide = (*start, 0)[1], (*shape, 1)[1]
        for row in values.reshape(-1, wide):
            total[left : left + wide] += casts.to_float(row, job.source_dtype)
    mean: Array = casts.cast(casts.as_words(total / rows), "F64", job.source_dtype, job.label)
    return mean


def last_row(job: Job, sources: Nearby, files: Files, tile: Array, scratch: Array) -> Array:
    """The last row of a matrix (or element of a vector)."""
    rows, row = job.rows or 0, np.empty(prod(job.shape[1:]), tile.dtype)
    for start, shape in tiles((1, *job.shape[1:]), len(tile)):
        values = tile[: prod(shape)]
        gather(files, sources, (rows - 1, *start[1:]), shape, values, scratch)
        left = (*start, 0)[1]
        row[left : left + len(values)] = values
    return row
