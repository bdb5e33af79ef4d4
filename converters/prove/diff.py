"""Compare two checkpoints of any formats, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from converters.move.blocks import Files, gather
from converters.move.casts import WORDS, Array, add_one, to_float
from converters.move.regions import Nearby, tiles
from converters.move.replicas import Copies, Tile
from converters.move.source_checks import SourceChecks
from converters.plan.plan import Job, Plan
from converters.plan.request import Limits
from converters.prove.distances import Distances
from formats.disk.safetensors import DTYPES, FLOATS


@dataclass(frozen=True)
class Difference:
    """A tensor that differs: in what, in how many elements, by how much at most, and, if measured, the distances."""

    name: str
    what: str
    count: int = 0
    largest: float = 0.0
    distances: Distances | None = None


def compare(
    first: Plan, second: Plan, limits: Limits, advance: Callable[[int], None], *, measured: bool = False
) -> list[Difference]:
    """The tensors in which two checkpoints differ; if `measured`, with the distances between their elements.

    Tensors of one element type are compared bit by bit; tensors of different types as numbers, and reported even if the
    numbers are equal.

    Raises:
        DamagedError: an entry of an archive does not have the checksum that the archive records.
        VerificationError: copies of a tensor in a checkpoint differ, and the policy does not say which one counts.
    """
    left, right = {job.name: job for job in first.jobs}, {job.name: job for job in second.jobs}
    differences = [Difference(name, "only in the first") for name in left if name not in right]
    differences += [Difference(name, "only in the second") for name in right if name not in left]
    limit = max(64 << 10, limits.room // 4) // 64 * 64
    buffers = [np.empty(limit, np.uint8) for _ in range(4)]
    checks = SourceChecks([*first.jobs, *second.jobs], limits.replicas)
    with Files(checks=checks) as files:
        for name, job in left.items():
            if name in right:
                left_side, right_side = (
                    _Side(each, Nearby(each.sources, len(each.shape)), Copies(each, files, limits.replicas))
                    for each in (job, right[name])
                )
                difference = _compare(left_side, right_side, files, buffers, measured)
                differences += [difference] if difference else []
                advance(job.nbytes)
        checks.complete(files.read_stored, limits.threads)
    return differences


class _Side(NamedTuple):
    """A tensor of one of the checkpoints: its job, its parts, and the handling of its copies."""

    job: Job
    sources: Nearby
    copies: Copies

    def read(self, files: Files, tile: Tile, buffer: Array, *, add: bool) -> Array:
        """The settled elements of a tile, with 1 added if `add`: where only this side is stored minus 1."""
        word = WORDS[DTYPES[self.job.source_dtype]]
        values = buffer.view(word)[: prod(tile.shape)]
        gather(files, self.sources, tile.start, tile.shape, values, tile.scratch.view(word))
        self.copies.settle(values, tile)
        return add_one(values, self.job.source_dtype) if add else values


def _compare(left: _Side, right: _Side, files: Files, buffers: Sequence[Array], measured: bool) -> Difference | None:
    first, second = left.job, right.job
    if first.shape != second.shape:
        return Difference(first.name, f"shape {list(first.shape)} | {list(second.shape)}")
    dtypes, same = (first.source_dtype, second.source_dtype), first.source_dtype == second.source_dtype
    stored_otherwise = first.less_one[0] != second.less_one[0]
    both_float = dtypes[0] in FLOATS and dtypes[1] in FLOATS
    if not same and not both_float:
        return Difference(first.name, f"{dtypes[0]} | {dtypes[1]}")
    *rooms, other, scratch = buffers
    count, largest = 0, 0.0
    distances = Distances(first.axes, first.shape) if measured and both_float else None
    for start, shape in tiles(first.shape, len(other) // 8):
        tile = Tile(start, shape, other, scratch)
        words, others = (
            side.read(files, tile, room, add=stored_otherwise and side.job.less_one[0])
            for side, room in zip((left, right), rooms, strict=True)
        )
        if same and np.array_equal(words, others):
            continue
        if both_float:
            a, b = to_float(words, dtypes[0]), to_float(others, dtypes[1])
            numbers = (a != b) & ~(np.isnan(a) & np.isnan(b))
            with np.errstate(invalid="ignore"):
                distance = np.abs(a.astype(np.float64) - b)
            distance[~numbers] = 0.0
            distance[np.isnan(distance)] = np.inf
            largest = max(largest, float(distance.max(initial=0.0)))
            if distances:
                distances.add(start, shape, a, b, distance)
        count += int((words != others if same else numbers).sum())
    for side in (left, right):
        side.copies.judge()
    if not same:
        return Difference(first.name, f"{dtypes[0]} | {dtypes[1]}", count, largest, distances)
    what = "values" if largest or not both_float else "bits of zeros or NaN"
    return Difference(first.name, what, count, largest, distances) if count else None
