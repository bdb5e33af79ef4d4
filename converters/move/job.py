"""One job: a tensor passes through a buffer in constant memory.

In canonical order, tile by tile: source leaves are read into the tile, the tile is cast if necessary, hashed, and
written to the target leaves. So each source byte is read once and each target byte is written once, whatever the two
layouts are, and the digest needs no further read. Tensors are never memory-mapped and never in memory as a whole; a
thread has a tile, a second one for casts and replicas, and a scratch buffer. Where copies are summed or averaged, their
total takes as many floats again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

from converters.move import casts
from converters.move.blocks import Files, scatter
from converters.move.casts import WORDS, Array
from converters.move.combined import combination
from converters.move.hashing import hasher
from converters.move.moments import Moments
from converters.move.reading import Box, Buffers, Reading
from converters.move.regions import Nearby, tiles
from converters.move.replicas import Copies
from converters.plan.plan import Job
from converters.plan.request import Limits
from formats.disk.safetensors import DTYPES
from formats.errors import Interrupted, RefusedError, VerificationError
from formats.model.accepted import NORMS


def buffers_of(limits: Limits) -> Buffers:
    """The buffers of one thread, an equal share of the memory for all threads."""
    return Buffers(max(192 << 10, limits.room // limits.threads))


class Outcome(NamedTuple):
    """The result of a job: the digest of the tensor as it was written, and how far apart its averaged copies were."""

    digest: str
    drift: float = 0.0


class Piece(NamedTuple):
    """A part of a logical tensor as it is written: a box from `start`, of `shape`, and its elements row-major."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    values: Array


def pieces_of(
    job: Job,
    copies: Sequence[Copies],
    files: Files,
    buffers: Buffers,
    box: Box | None = None,
    accepted: Collection[str] = (),
) -> Iterator[Piece]:
    """The elements of a job's tensor as they are written, in canonical order; `copies` record copies that differ.

    Args:
        job: the job, which says what is read, summed, averaged, grown and cast.
        copies: the handling of further copies of each tensor that the job reads.
        files: open files.
        buffers: this thread's memory. Each piece is in it, and overwritten by the next.
        box: the part of the tensor, as a start and a stop along each axis; None for all of it.
        accepted: deviations that the user named.

    Raises:
        VerificationError: what was read is not what the manifest of the source records.
    """
    box = box or tuple((0, n) for n in job.shape)
    readings = [Reading(read, copy, files, buffers, box) for read, copy in zip(job.reads, copies, strict=True)]
    combined = combination(job, readings) if job.terms else None
    sums = ["F64"] if job.terms else []
    widest = max(DTYPES[dtype] for dtype in (job.dtype, *(read.source_dtype for read in job.reads), *sums))
    for at, shape in tiles(tuple(stop - start for start, stop in box), buffers.tile.nbytes // widest):
        start = tuple(low + offset for (low, _), offset in zip(box, at, strict=True))
        room = buffers.other.view(WORDS[DTYPES[job.dtype]])[: prod(shape)]
        if combined:
            values = combined(start, shape, room)
        elif job.shift > 0:
            values = casts.add_one(readings[0](start, shape), job.source_dtype, job.dtype)
        else:
            values = casts.cast(readings[0](start, shape), job.source_dtype, job.dtype, job.label, room)
        if job.shift < 0:
            values = casts.less_one(values, job.dtype, job.label, rounded=NORMS in accepted)
        yield Piece(start, shape, values)
    for reading in readings:
        reading.judge()


def run_job(
    job: Job, files: Files, buffers: Buffers, limits: Limits, advance: Callable[[int], None], stop: Callable[[], bool]
) -> Outcome:
    """Execute one job.

    Raises:
        VerificationError: copies of the tensor differ, and the policy does not say which one counts; elements are
            NaN or infinite, and the limits refuse these; or what was read is not what a manifest records.
        RefusedError: the tensor is a moment that no optimizer computes, or of an adapter, and NaN or infinite.
        Interrupted: `stop` was true.
    """
    job = job.made
    digest, targets = hasher(job.name, job.dtype, job.shape), Nearby(job.targets, len(job.shape))
    policies = [term.policy for term in job.terms] or [limits.replicas]
    copies = [Copies(read, files, policy) for read, policy in zip(job.reads, policies, strict=True)]
    moments = Moments(job, limits.accepted)
    for start, shape, values in pieces_of(job, copies, files, buffers, accepted=limits.accepted):
        moments.see(values)
        if stop():
            raise Interrupted("stopped by a signal", "run the same command again to resume")
        if (job.finite or limits.finite) and not casts.finite(values, job.dtype):
            kind = RefusedError if job.finite else VerificationError
            raise kind(f"{job.label} holds NaN or infinity", "the training has diverged; take an earlier one")
        digest.update((casts.add_one(values, job.dtype) if job.less_one[1] else values).data.cast("B"))
        if job.targets and len(values) and (not limits.fresh or values[0] or values.any()):
            scatter(files, targets, start, shape, values, buffers.scratch.view(values.dtype))
        advance(len(values) * DTYPES[job.source_dtype])
    for each in copies:
        each.judge()
    moments.judge()
    return Outcome(str(digest.hexdigest()), max(each.drift for each in copies))
