"""Comparing two checkpoints, tensor by tensor, whatever formats they are in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from converters.blocks import Files, gather
from converters.edges import WORDS, Array, to_float
from converters.plan import Job, Plan
from converters.regions import Nearby, tiles
from formats.storage import DTYPES, FLOATS


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same: how many elements differ, and by how much at most."""

    name: str
    what: str
    count: int = 0
    largest: float = 0.0


def compare(one: Plan, two: Plan, memory: int, advance: Callable[[int], None]) -> list[Difference]:
    """The tensors in which two checkpoints differ.

    Tensors of different element types are compared as numbers, and reported even when those are equal.
    """
    left, right = {job.name: job for job in one.jobs}, {job.name: job for job in two.jobs}
    found = [Difference(name, "only in the first") for name in left if name not in right]
    found += [Difference(name, "only in the second") for name in right if name not in left]
    limit = max(64 << 10, memory // 4) // 64 * 64
    buffers = [np.empty(limit, np.uint8) for _ in range(3)]
    with Files() as files:
        for name, job in left.items():
            if name in right:
                difference = _compare(job, right[name], files, buffers)
                found += [difference] if difference else []
                advance(job.nbytes)
    return found


def _compare(one: Job, two: Job, files: Files, buffers: list[Array]) -> Difference | None:
    if one.shape != two.shape:
        return Difference(one.name, f"shape {list(one.shape)} | {list(two.shape)}")
    both_float = one.source_dtype in FLOATS and two.source_dtype in FLOATS
    if one.source_dtype != two.source_dtype and not both_float:
        return Difference(one.name, f"{one.source_dtype} | {two.source_dtype}")
    words = [WORDS[DTYPES[job.source_dtype]] for job in (one, two)]
    count, largest = 0, 0.0
    for start, shape in tiles(one.shape, len(buffers[0]) // 8):
        values = []
        for job, word, buffer in zip((one, two), words, buffers, strict=False):
            tile = buffer.view(word)[: prod(shape)]
            gather(files, Nearby(job.sources, len(job.shape)), start, shape, tile, buffers[2].view(word))
            values.append(tile)
        if one.source_dtype == two.source_dtype and np.array_equal(values[0], values[1]):
            continue
        if both_float:
            a, b = to_float(values[0], one.source_dtype), to_float(values[1], two.source_dtype)
            unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
            with np.errstate(invalid="ignore"):
                distance = np.abs(a[unequal].astype(np.float64) - b[unequal])
            largest = max(largest, float(np.where(np.isnan(distance), np.inf, distance).max(initial=0.0)))
        else:
            unequal = values[0] != values[1]
        count += int(unequal.sum())
    if one.source_dtype != two.source_dtype:
        return Difference(one.name, f"{one.source_dtype} | {two.source_dtype}", count, largest)
    return Difference(one.name, "values", count, largest) if count else None
