"""Read and write blocks: open files, and the leaves of a tensor, gathered into a tile or scattered from one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from converters.move.casts import Array
from converters.move.codebooks import read_f32
from converters.move.crc32 import Checksums
from converters.move.dequantize import read_halves
from converters.move.descriptors import Descriptors
from converters.move.products import read_product
from converters.move.quantize import read_coded
from converters.move.regions import Nearby, region, runs
from converters.move.scratch import Scratch
from converters.move.source_checks import SourceChecks
from converters.move.turns import Turns
from formats.checkpoint import OutputFile
from formats.disk.handle import Handle
from formats.disk.safetensors import DTYPES, Fragment, read_into, write_from
from formats.disk.threads import Threads
from formats.disk.zstd_stream import Reader, Stream
from formats.torch_files.crc32 import crc_of

DEQUANTIZE = {"BF16": read_halves, "F16": read_halves, "F32": read_f32}
"""The element type that quantized elements are read as: the function that reads them."""
SPARSEST = 8
"""A strided region is read, or an interleaved one written, by one call if at least one element in so many is wanted."""


@dataclass
class Files:
    """Open files, shared by all threads.

    Attributes:
        sums: the checksums of the storages that are written.
        checks: the checksums of the archive entries that are read.
        locks: locked descriptors, which every process that writes these files keeps.
        scratch: where chunks are decoded.
        turns: the turns of those that write to one file.
        unchanged: called with each file that was read from; raises if it is not the file that it was.
    """

    sums: Checksums | None = None
    checks: SourceChecks | None = None
    locks: tuple[int, ...] = ()
    scratch: Scratch = field(default_factory=Scratch)
    turns: Turns = field(default_factory=Turns)
    descriptors: Descriptors = field(default_factory=Descriptors)
    streams: dict[tuple[Path, Stream], Reader] = field(default_factory=dict)
    interleaved_lock: threading.Lock = field(default_factory=threading.Lock)
    unchanged: Callable[[Path], None] | None = None

    @contextmanager
    def open(self, path: Path, writable: bool = False) -> Iterator[Handle]:
        """The descriptor of a file, to be used while the context is entered; what is written to it is synced."""
        with self.descriptors.open(path, writable) as handle:
            yield handle
        if self.unchanged is not None:
            self.unchanged(path)

    def read(self, fragment: Fragment, at: int, buffer: memoryview) -> None:
        """Fill a buffer from a physical tensor, `at` bytes from its start. A stream is read by one thread at a time."""
        if fragment.scales is not None:
            DEQUANTIZE[fragment.dtype](self.open, fragment, fragment.scales, at, buffer)
            return
        if fragment.product is not None:
            read_product(self.read, fragment, fragment.product, at, buffer)
            return
        if fragment.coded is not None:
            read_coded(self.read, fragment.coded, at, buffer)
            return
        if fragment.pieces:
            self._read_pieces(fragment, at, buffer)
            return
        self.read_stored(fragment, at, buffer)
        if self.checks is not None:
            self.checks.passed(fragment, at, buffer)

    def _read_pieces(self, fragment: Fragment, at: int, buffer: memoryview) -> None:
        """Fill a buffer from a fragment that consists of pieces."""
        size = DTYPES[fragment.dtype]
        for first, piece in fragment.pieces:
            low, high = max(at, first * size), min(at + len(buffer), first * size + piece.nbytes)
            if low < high:
                self.read(piece, low - first * size, buffer[low - at : high - at])

    def read_stored(self, fragment: Fragment, at: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes as they are stored; they are not counted for checksums."""
        offset = fragment.offset + at
        if fragment.stream is None:
            path = self.scratch.decoded(fragment, fragment.chunk) if fragment.chunk else fragment.path
            with self.open(path) as fd:
                read_into(fd, buffer, offset, path)
            if fragment.chunk and self.unchanged is not None:
                self.unchanged(fragment.path)
            return
        key = (fragment.path, fragment.stream)
        with self.open(fragment.path) as fd:
            reader = self.streams.pop(key, None) or Reader(fd, fragment.path, fragment.stream)
            reader.fd = fd
            reader.read_into(buffer, offset)
        if reader.position < fragment.offset + fragment.nbytes:
            self.streams[key] = reader

    def write(self, fragment: Fragment, at: int, piece: memoryview) -> None:
        """Write a piece of a physical tensor, `at` bytes from its start."""
        with self.open(fragment.path, writable=True) as fd:
            assert isinstance(fd, int)
            with self.turns(fragment.path, fd):
                write_from(fd, piece, fragment.offset + at)
        if self.sums:
            self.sums.add(fragment, at, piece)

    @contextmanager
    def interleaved_write(self, fragment: Fragment) -> Iterator[None]:
        """Hold the lock for interleaved regions. Their checksum is computed from disk afterwards."""
        if self.sums:
            self.sums.forget(fragment)
        with self.interleaved_lock:
            yield

    def sync(self) -> None:
        """Force to disk what was written since the last time."""
        self.descriptors.sync()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.descriptors.close()
        self.scratch.close()


def finish_files(targets: Iterable[OutputFile], files: Files, threads: int) -> None:
    """Write the headers of output files, with the checksums that a zip archive needs."""

    def finish(file: OutputFile) -> None:
        sums = {}
        with files.open(file.path, writable=True) as fd, files.open(file.path) as written:
            for name, (offset, nbytes) in file.checksums.items():
                counted = files.sums.get(file.path, offset) if files.sums else None
                sums[name] = crc_of(written, offset, nbytes, file.path) if counted is None else counted
            for offset, content in file.headers(sums):
                write_from(fd, memoryview(content), offset)

    with Threads(threads) as pool:
        list(pool.map(finish, targets))


# --- tiles -----------------------------------------------------------------------------------------------------------


def strided(buffer: Array, position: int, dims: tuple[tuple[int, int, int], ...], side: int) -> Array:
    """The elements of a region in a buffer, whose strides are in column `side` of its dims."""
    item = buffer.itemsize
    shape, strides = [dim[0] for dim in dims], [dim[side] * item for dim in dims]
    view: Array = np.ndarray(shape, buffer.dtype, buffer, position * item, strides)
    return view


def gather(
    files: Files, parts: Nearby, start: tuple[int, ...], shape: tuple[int, ...], tile: Array, scratch: Array
) -> None:
    """Read the leaves of one copy of a tensor into a tile."""
    item = tile.itemsize
    for part in parts(start, shape):
        where = region(part.leaf, start, shape)
        fragment = part.fragment
        for address, position, span, dims in runs(where, len(scratch), SPARSEST):
            if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
                files.read(fragment, address * item, tile[position : position + span].data.cast("B"))
            else:
                files.read(fragment, address * item, scratch[:span].data.cast("B"))
                strided(tile, position, dims, 2)[...] = strided(scratch, 0, dims, 1)


def scatter(
    files: Files, parts: Nearby, start: tuple[int, ...], shape: tuple[int, ...], tile: Array, scratch: Array
) -> None:
    """Write a tile to the leaves that hold it. For an interleaved leaf, elements in between are read and rewritten."""
    item = tile.itemsize
    for part in parts(start, shape):
        where, sparsest = region(part.leaf, start, shape), SPARSEST if part.interleaved else 1
        with files.interleaved_write(part.fragment) if part.interleaved else nullcontext():
            for address, position, span, dims in runs(where, len(scratch), sparsest):
                piece = scratch[:span].data.cast("B")
                if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
                    files.write(part.fragment, address * item, tile[position : position + span].data.cast("B"))
                    continue
                if prod(count for count, _, _ in dims) < span:
                    files.read(part.fragment, address * item, piece)
                strided(scratch, 0, dims, 1)[...] = strided(tile, position, dims, 2)
                files.write(part.fragment, address * item, piece)
