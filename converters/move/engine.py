"""The engine: executes jobs in constant memory.

Each job passes through a buffer in canonical order, tile by tile: source leaves are read into the tile, the tile is
cast if it has to be, hashed, and written out to the target leaves. So each source byte is read once and each target
byte written once, whatever the two layouts are, and the digest comes for free. Payloads are never mapped and never
held whole; a thread owns a tile, a second one for casts and replicas, and a scratch buffer. Where copies are summed or
averaged, their total is as many floats again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from math import prod
from typing import NamedTuple

import numpy as np

from converters.move import casts
from converters.move.blocks import Files, gather, scatter
from converters.move.casts import WORDS, Array
from converters.move.hashing import hasher
from converters.move.moments import Moments
from converters.move.regions import Nearby, tiles
from converters.move.replicas import Copies, Tile
from converters.move.source_checks import SourceChecks
from converters.plan.plan import Job
from converters.plan.request import Limits
from formats.disk.safetensors import DTYPES, FLOATS
from formats.errors import Interrupted, RefusedError, UsageError, VerificationError

Box = tuple[tuple[int, int], ...]
"""A start and a stop along each axis of a logical tensor."""

# --- jobs ------------------------------------------------------------------------------------------------------------


class Buffers(threading.local):
    """One thread's memory: a tile, another one for casts and further copies, and what is read around strided blocks."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.tile, self.other, self.scratch = (np.empty(nbytes, np.uint8) for _ in range(3))
        except MemoryError:
            raise UsageError(
                f"this machine has no {nbytes * 3} bytes for the buffers of a thread", "lower --memory, or raise -j"
            ) from None


def buffers_of(limits: Limits) -> Buffers:
    """The memory of each of some threads."""
    return Buffers(max(64 << 10, limits.memory // (3 * limits.threads)) // 64 * 64)


class Outcome(NamedTuple):
    """What came of a job: the digest of the tensor as it was written, and how far apart its averaged copies were."""

    digest: str
    drift: float = 0.0


class Piece(NamedTuple):
    """A part of a logical tensor as it is written: a box from `start`, of `shape`, and its elements row-major."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    values: Array


def pieces_of(
    job: Job, copies: Copies, files: Files, buffers: Buffers, box: Box | None = None, accepted: Collection[str] = ()
) -> Iterator[Piece]:
    """The elements of a job's tensor as they are written, in canonical order; `copies` knows at the end of any others.

    Args:
        job: what is read, summed, averaged, grown and cast.
        copies: what is done with its further copies.
        files: open files.
        buffers: this thread's memory. Each piece is in it, and overwritten by the next.
        box: the part of the tensor, as a start and a stop along each axis; None for all of it.
        accepted: deviations that the user named.
    """
    word = WORDS[DTYPES[job.source_dtype]]
    tile, scratch = buffers.tile.view(word), buffers.scratch.view(word)
    sources = Nearby(job.sources, len(job.shape))
    box = box or tuple((0, n) for n in job.shape)
    grows = job.rows is not None and box[0][1] > job.rows
    fill = (_last_row if job.last else _mean_row)(job, sources, files, tile, scratch) if grows else tile[:0]
    widest = max(tile.itemsize, DTYPES[job.dtype])
    for at, shape in tiles(tuple(stop - start for start, stop in box), buffers.tile.nbytes // widest):
        start = tuple(low + offset for (low, _), offset in zip(box, at, strict=True))
        values = tile[: prod(shape)]
        gather(files, sources, start, shape, values, scratch)
        copies.settle(values, Tile(start, shape, buffers.other, buffers.scratch))
        if grows:
            _grow(values, job.rows or 0, fill, start, shape)
        room = buffers.other.view(WORDS[DTYPES[job.dtype]])[: len(values)]
        values = casts.cast(values, job.source_dtype, job.dtype, job.name, room)
        yield Piece(start, shape, _shifted(job, values, accepted))


def _shifted(job: Job, values: Array, accepted: Collection[str]) -> Array:
    """The elements as the target stores them: the tensor, or the tensor less one."""
    if job.shift > 0:
        return casts.add_one(values, job.dtype)
    if job.shift < 0:
        return casts.less_one(values, job.dtype, job.name, rounded=casts.ROUNDED_NORMS in accepted)
    return values


def run_job(
    job: Job, files: Files, buffers: Buffers, limits: Limits, advance: Callable[[int], None], stop: Callable[[], bool]
) -> Outcome:
    """Execute one job.

    Raises:
        VerificationError: copies of the tensor differ, and nothing said which one counts.
        RefusedError: it is a moment that Adam does not compute.
        Interrupted: `stop` was true.
    """
    digest, targets, copies = hasher(job), Nearby(job.targets, len(job.shape)), Copies(job, files, limits.replicas)
    moments = Moments(job, limits.accepted)
    for start, shape, values in pieces_of(job, copies, files, buffers, accepted=limits.accepted):
        moments.see(values)
        if stop():
            raise Interrupted("stopped by a signal", "run the same command again to resume")
        if limits.finite and not casts.finite(values, job.dtype):
            raise VerificationError(
                f"{job.name} holds NaN or infinity", "the training has diverged; take an earlier one"
            )
        digest.update((casts.add_one(values, job.dtype) if job.less_one[1] else values).data.cast("B"))
        if job.targets and len(values) and (not limits.fresh or values[0] or values.any()):
            scatter(files, targets, start, shape, values, buffers.scratch.view(values.dtype))
        advance(len(values) * DTYPES[job.source_dtype])
    copies.judge()
    moments.judge()
    return Outcome(str(digest.hexdigest()), copies.drift)


def _grow(values: Array, rows: int, fill: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Put the new row into what of a tile is after the rows of the source."""
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
            total[left : left + wide] += casts.to_float(row, job.source_dtype)
    mean: Array = casts.cast(casts.as_words(total / rows), "F64", job.source_dtype, job.name)
    return mean


def _last_row(job: Job, sources: Nearby, files: Files, tile: Array, scratch: Array) -> Array:
    """The last row of a matrix (or element of a vector)."""
    rows, row = job.rows or 0, np.empty(prod(job.shape[1:]), tile.dtype)
    for start, shape in tiles((1, *job.shape[1:]), len(tile)):
        values = tile[: prod(shape)]
        gather(files, sources, (rows - 1, *start[1:]), shape, values, scratch)
        left = (*start, 0)[1]
        row[left : left + len(values)] = values
    return row


def execute(
    jobs: Iterable[Job],
    files: Files,
    limits: Limits,
    *,
    done: Callable[[Job, str], None],
    advance: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    drifted: Callable[[Job, float], object] = lambda *_: None,
) -> None:
    """Execute jobs in threads, the largest first.

    Args:
        jobs: what to do.
        files: open files.
        limits: how much of the machine to use.
        done: called in the calling thread with each finished job and its digest.
        advance: called with the bytes of each tile.
        stop: asked at every tile; when true, nothing further is done.
        drifted: called in the calling thread with each job whose copies were averaged, and how far apart they were.

    Raises:
        Interrupted: `stop` was true before all jobs were done.
    """
    buffers = buffers_of(limits)
    waiting = sorted(jobs, key=lambda job: -job.nbytes)[::-1]
    with ThreadPoolExecutor(limits.threads) as pool:
        running: dict[Future[Outcome], Job] = {}
        while waiting or running:
            while waiting and len(running) < limits.threads and not stop():
                job = waiting.pop()
                running[pool.submit(run_job, job, files, buffers, limits, advance, stop)] = job
            if not running:
                raise Interrupted("stopped by a signal", "run the same command again to resume")
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                job, outcome = running.pop(future), future.result()
                done(job, outcome.digest)
                if outcome.drift:
                    drifted(job, outcome.drift)


def digest_of(
    jobs: Iterable[Job],
    limits: Limits,
    advance: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    checked: bool = True,
) -> dict[str, str]:
    """The digest of each tensor, by name.

    Args:
        jobs: what to read.
        limits: how much of the machine to use.
        advance: called with the bytes of each tile.
        stop: asked at every tile; when true, nothing further is done.
        checked: compare the checksums of the archives that the tensors are in. The digests of what was just written
            are compared with those of what was read, which says more.

    Raises:
        DamagedError: a checksum differs.
    """
    found: dict[str, str] = {}
    every = list(jobs)
    checks = SourceChecks(every, limits.replicas) if checked else None

    def done(job: Job, digest: str) -> None:
        found[job.name] = digest

    with Files(checks=checks) as files:
        execute(every, files, limits, done=done, advance=advance, stop=stop)
        if checks is not None:
            checks.complete(files.read_stored, limits.threads, stop)
    return found
