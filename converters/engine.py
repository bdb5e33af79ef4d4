"""The engine: executes jobs in constant memory.

Each job passes through a buffer in canonical order, tile by tile: source leaves are read into the tile, the tile is
cast if it has to be, hashed, and written out to the target leaves. So each source byte is read once and each target
byte written once, whatever the two layouts are, and the digest comes for free. Payloads are never mapped and never
held whole; a thread owns a tile, a second one for casts and replicas, and a scratch buffer.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from converters import edges
from converters.checksums import Checksums
from converters.digest import hasher
from converters.edges import WORDS, Array
from converters.plan import Job
from converters.regions import Nearby, region, runs, tiles
from formats.errors import Interrupted, OutputError, RefusedError, SourceError, VerificationError
from formats.storage import DTYPES, FLOATS, Fragment, read_into, write_from
from formats.streams import Reader, Stream

DEFAULT_MEMORY = 16 << 20
SPARSEST_READ = 8
"""A strided region is read in one go when at least one element in so many is wanted."""


@dataclass(frozen=True)
class Limits:
    """How much of the machine to use.

    Attributes:
        threads: jobs at a time.
        memory: bytes of all buffers together.
        replicas: what to do with further copies of a tensor: `verify`, `first` or `mean`.
        finite: refuse NaN and infinity.
    """

    threads: int = 2
    memory: int = DEFAULT_MEMORY
    replicas: str = "verify"
    finite: bool = False


@dataclass
class Files:
    """Open files, shared by all threads. `sums` keeps the checksums of what is written."""

    sums: Checksums | None = None
    descriptors: dict[tuple[Path, bool], int] = field(default_factory=dict)
    streams: dict[tuple[Path, Stream], Reader] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: Path, writable: bool = False) -> int:
        """The descriptor of a file, opened on first use."""
        with self.lock:
            if (path, writable) not in self.descriptors:
                try:
                    self.descriptors[path, writable] = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
                except OSError as error:
                    raise (OutputError if writable else SourceError)(f"{path}: {error.strerror}") from None
            return self.descriptors[path, writable]

    def read(self, fragment: Fragment, at: int, buffer: memoryview) -> None:
        """Fill a buffer from a physical tensor, `at` bytes from its start. A stream is read by one thread at a time."""
        fd, offset = self.get(fragment.path), fragment.offset + at
        if fragment.stream is None:
            read_into(fd, buffer, offset, fragment.path)
            return
        key = (fragment.path, fragment.stream)
        reader = self.streams.pop(key, None) or Reader(fd, fragment.path, fragment.stream)
        reader.read_into(buffer, offset)
        if reader.position < fragment.offset + fragment.nbytes:
            self.streams[key] = reader

    def write(self, fragment: Fragment, at: int, piece: memoryview) -> None:
        """Write a piece of a physical tensor, `at` bytes from its start."""
        write_from(self.get(fragment.path, writable=True), piece, fragment.offset + at)
        if self.sums:
            self.sums.add(fragment, at, piece)

    def sync(self) -> None:
        """Force what was written to disk."""
        with self.lock:
            written = [fd for (_, writable), fd in self.descriptors.items() if writable]
        for fd in written:
            os.fdatasync(fd)

    def __enter__(self) -> Files:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.descriptors.values():
            os.close(fd)


# --- tiles -----------------------------------------------------------------------------------------------------------


def _view(buffer: Array, position: int, dims: tuple[tuple[int, int, int], ...], side: int) -> Array:
    item = buffer.itemsize
    return np.lib.stride_tricks.as_strided(
        buffer[position:], [dim[0] for dim in dims], [dim[side] * item for dim in dims]
    )


def gather(
    files: Files, parts: Nearby, start: tuple[int, ...], shape: tuple[int, ...], tile: Array, scratch: Array
) -> None:
    """Read the leaves of one copy of a tensor into a tile."""
    item = tile.itemsize
    for part in parts(start, shape):
        where = region(part, start, shape)
        fragment = part.fragment
        for address, position, span, dims in runs(where, len(scratch), SPARSEST_READ):
            if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
                files.read(fragment, address * item, tile[position : position + span].data.cast("B"))
            else:
                files.read(fragment, address * item, scratch[:span].data.cast("B"))
                _view(tile, position, dims, 2)[...] = _view(scratch, 0, dims, 1)


def scatter(
    files: Files, parts: Nearby, start: tuple[int, ...], shape: tuple[int, ...], tile: Array, scratch: Array
) -> None:
    """Write a tile out to the leaves that hold it."""
    item = tile.itemsize
    for part in parts(start, shape):
        where = region(part, start, shape)
        for address, position, span, dims in runs(where, len(scratch), 1):
            if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
                files.write(part.fragment, address * item, tile[position : position + span].data.cast("B"))
            else:
                _view(scratch, 0, dims, 1)[...] = _view(tile, position, dims, 2)
                files.write(part.fragment, address * item, scratch[:span].data.cast("B"))


# --- jobs ------------------------------------------------------------------------------------------------------------


class _Buffers(threading.local):
    """One thread's memory."""

    def __init__(self, nbytes: int) -> None:
        self.tile, self.other, self.scratch = (np.empty(nbytes, np.uint8) for _ in range(3))


def run_job(
    job: Job, files: Files, buffers: Any, limits: Limits, advance: Callable[[int], None], stop: Callable[[], bool]
) -> str:
    """Execute one job.

    Returns:
        The digest of the tensor as it was written.

    Raises:
        VerificationError: copies of the tensor differ, and nothing said which one counts.
        Interrupted: `stop` was true.
    """
    word, digest = WORDS[DTYPES[job.source_dtype]], hasher(job)
    item = np.dtype(word).itemsize
    tile, other, scratch = buffers.tile.view(word), buffers.other.view(word), buffers.scratch.view(word)
    axes = len(job.shape)
    sources, targets = Nearby(job.sources, axes), Nearby(job.targets, axes)
    copies = {copy: Nearby(parts, axes) for copy, parts in job.replicas.items()} if limits.replicas != "first" else {}
    worst: dict[str, float] = {}
    fill = _mean_row(job, sources, files, tile, scratch) if job.rows is not None else tile[:0]
    widest = max(item, DTYPES[job.dtype])
    for start, shape in tiles(job.shape, buffers.tile.nbytes // widest):
        if stop():
            raise Interrupted("stopped by a signal", "the same command again goes on where this one stopped")
        count = prod(shape)
        values = tile[:count]
        gather(files, sources, start, shape, values, scratch)
        if copies and limits.replicas == "mean" and job.source_dtype in FLOATS:
            values = _mean(job, copies, files, start, shape, values, other[:count], scratch)
        else:
            for copy, parts in copies.items():
                gather(files, parts, start, shape, other[:count], scratch)
                held = count if job.rows is None else min(count, max(0, job.rows - start[0]) * (count // shape[0]))
                if not np.array_equal(values[:held], other[:held]):
                    distance = _distance(values[:held], other[:held], job.source_dtype)
                    worst[copy] = max(worst.get(copy, 0.0), distance)
        if job.rows is not None:
            _grow(values, job.rows, fill, start, shape)
        room = buffers.other.view(WORDS[DTYPES[job.dtype]])[:count]
        result = edges.cast(values, job.source_dtype, job.dtype, job.name, room)
        if limits.finite and not edges.finite(result, job.dtype):
            raise VerificationError(
                f"{job.name} holds NaN or infinity", "the training has diverged; take an earlier one"
            )
        digest.update(result.data.cast("B"))
        if job.targets and count and (result[0] or result.any()):  # a fresh file already reads as zeros
            scatter(files, targets, start, shape, result, buffers.scratch.view(result.dtype))
        advance(count * item)
    if worst:
        copy, distance = max(worst.items(), key=lambda pair: pair[1])
        paths = (str(parts[0].fragment.path) for parts in (job.sources, job.replicas[copy]))
        where = " and ".join(dict.fromkeys(paths))
        if copy == "copy":
            raise VerificationError(
                f"the output head should share {job.name} and differs from it by up to {distance:g} between {where}",
                "--set tied=false keeps both",
            )
        raise VerificationError(
            f"{job.name} differs between its copies in {len(worst)} of {len(copies)} places, most in {copy}: "
            f"by up to {distance:g} between {where}",
            "--replicas first takes the first copy, --replicas mean their mean in float32",
        )
    return str(digest.hexdigest())


def _grow(values: Array, rows: int, fill: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Put the mean row into what of a tile lies behind the rows of the source."""
    (low, left), (tall, wide) = (*start, 0)[:2], (*shape, 1)[:2]
    new = min(tall, max(0, low + tall - rows))
    values.reshape(tall, wide)[tall - new :] = fill[left : left + wide]


def _mean_row(job: Job, sources: Nearby, files: Files, tile: Array, scratch: Array) -> Array:
    """The mean of all rows of a matrix (or elements of a vector), taken in float64 and rounded once to its type."""
    rows, width = job.rows or 0, prod(job.shape[1:])
    if job.source_dtype not in FLOATS:
        raise RefusedError(f"{job.name} is {job.source_dtype}: its rows have no mean")
    total = np.zeros(width, np.float64)
    for start, shape in tiles((rows, *job.shape[1:]), tile.nbytes // tile.itemsize):
        values = tile[: prod(shape)]
        gather(files, sources, start, shape, values, scratch)
        left, wide = (*start, 0)[1], (*shape, 1)[1]
        for row in values.reshape(-1, wide):
            total[left : left + wide] += edges.to_float(row, job.source_dtype)
    mean: Array = edges.cast(edges.as_words(total / rows), "F64", job.source_dtype, job.name)
    return mean


def _mean(
    job: Job,
    copies_of: Mapping[str, Nearby],
    files: Files,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    values: Array,
    other: Array,
    scratch: Array,
) -> Array:
    """The mean of all copies of a tile; equal copies are left alone, so that no bit changes without need."""
    copies = [values.copy()]
    for parts in copies_of.values():
        gather(files, parts, start, shape, other, scratch)
        copies.append(other.copy())
    if all(np.array_equal(copies[0], copy) for copy in copies[1:]):
        return values
    return edges.mean(copies, job.source_dtype)


def _distance(one: Array, two: Array, dtype: str) -> float:
    """The largest absolute difference; infinity where a NaN meets a number."""
    if dtype not in FLOATS:
        return float((one != two).sum())
    a, b = edges.to_float(one, dtype), edges.to_float(two, dtype)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    return float(np.where(np.isnan(difference), np.inf, difference)[one != two].max())


def execute(
    jobs: Iterable[Job],
    files: Files,
    limits: Limits,
    *,
    done: Callable[[Job, str], None],
    advance: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Execute jobs in threads, the largest first.

    Args:
        jobs: what to do.
        files: open files.
        limits: how much of the machine to use.
        done: called in the calling thread with each finished job and its digest.
        advance: called with the bytes of each tile.
        stop: asked at every tile; when true, nothing further is done.

    Raises:
        Interrupted: `stop` was true before all jobs were done.
    """
    nbytes = max(64 << 10, limits.memory // (3 * limits.threads)) // 64 * 64
    buffers = _Buffers(nbytes)
    waiting = sorted(jobs, key=lambda job: -job.nbytes)[::-1]
    with ThreadPoolExecutor(limits.threads) as pool:
        running: dict[Future[str], Job] = {}
        while waiting or running:
            while waiting and len(running) < limits.threads and not stop():
                job = waiting.pop()
                running[pool.submit(run_job, job, files, buffers, limits, advance, stop)] = job
            if not running:
                raise Interrupted("stopped by a signal", "the same command again goes on where this one stopped")
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done(running.pop(future), future.result())


def digest_of(
    jobs: Iterable[Job],
    limits: Limits,
    advance: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """The digest of each tensor, by name."""
    found: dict[str, str] = {}

    def done(job: Job, digest: str) -> None:
        found[job.name] = digest

    with Files() as files:
        execute(jobs, files, limits, done=done, advance=advance, stop=stop)
    return found
