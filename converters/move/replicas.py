"""Further copies of a tensor: compared, averaged, or added up, tile by tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from converters.move import casts
from converters.move.blocks import Files, gather
from converters.move.casts import Array
from converters.move.regions import Nearby
from converters.plan.plan import Job
from formats.disk.safetensors import FLOATS
from formats.errors import VerificationError
from formats.layout.slots import ORIGINAL, SHARED, Replica
from formats.model import lora

FARTHEST = 0.5
"""A fraction: copies of a norm drifted apart where no element is farther apart than this of the largest one."""
NOISE = 0.03
"""How far apart the first steps of a training bring elements that began at zero: Adam moves each by the rate, which is
0.01 at most, and some signs are noise. Where no element is farther apart, the whole may be `FARTHEST` of its length.
The weights of other norms are near 1: two that differ in sign are farther apart.
"""


class Tile(NamedTuple):
    """The start and shape of a tile, and the thread's further buffers, as bytes: a second tile, and scratch."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    other: Array
    scratch: Array


class Copies:
    """Settles the copies of one job's tensor by a policy, and records how far apart they are.

    Attributes:
        worst: the largest distance of each copy that is to be refused; under None that of copies whose mean would be
            taken, but which are too far apart.
        drift: the largest distance of copies that were averaged.
        unequal: how many elements of each copy of the weights are not the rounded FP32 master weights.
        nameless: master weights are in the model's own file, as in ZeRO stage 0, which gives them no names: only the
            comparison with the weights proves that they belong to the tensor, so that no policy skips it.
    """

    def __init__(self, job: Job, files: Files, policy: str) -> None:
        axes, heeded = len(job.shape), policy != "first"
        self.job, self.files = job, files
        self.replicas = (
            {name: Nearby(parts, axes) for name, parts in job.replicas.items()} if heeded or job.partial else {}
        )
        self.nameless = bool(job.twins) and job.twins[ORIGINAL][0].fragment.path == job.sources[0].fragment.path
        self.twins = {name: Nearby(parts, axes) for name, parts in job.twins.items()} if heeded or self.nameless else {}
        self.mean = policy in ("mean", "drift") and job.source_dtype in FLOATS
        self.plausible = policy == "drift" and not job.name.startswith("exp_avg")  # moments may be far apart
        self.worst: dict[Replica | None, float] = {}
        self.drift, self.unequal = 0.0, Counter[Replica]()

    def settle(self, values: Array, tile: Tile) -> None:
        """Replace the elements of the first copy in a tile by the sum or mean where the policy says so, or compare.

        Rows that no copy has are left alone.
        """
        rows = self.job.rows
        if rows is not None:
            values = values[: max(0, rows - tile.start[0]) * (len(values) // tile.shape[0])]
        self._round(values, tile, [name for name in self.twins if name not in self.job.replicas])
        if self.job.partial and self.replicas:
            summands = (copy for _, copy in self._compared(values, tile))
            values[:] = casts.add(chain([values], summands), self.job.source_dtype)
        elif self._apart(values, tile) and self.mean:
            values[:] = casts.mean(chain([values], self._others(values, tile)), self.job.source_dtype)

    def _others(self, values: Array, tile: Tile) -> Iterator[Array]:
        """The elements of each further copy in a tile, all in the same memory."""
        other = tile.other.view(values.dtype)[: len(values)]
        for parts in self.replicas.values():
            gather(self.files, parts, tile.start, tile.shape, other, tile.scratch.view(values.dtype))
            yield other

    def _compared(self, values: Array, tile: Tile) -> Iterator[tuple[Replica, Array]]:
        """The name and elements of each further copy in a tile, after master weights were compared with the weights."""
        for name, copy in zip(self.replicas, self._others(values, tile), strict=True):
            self._round(copy, tile, [name] * (name in self.twins))
            yield name, copy

    def _apart(self, values: Array, tile: Tile) -> bool:
        """Whether copies differ in a tile; the distance is recorded."""
        dtype, differ = self.job.source_dtype, False
        for name, copy in self._compared(values, tile):
            if np.array_equal(values, copy):
                continue
            differ, distance = True, _distance(values, copy, dtype)
            if not self.mean:
                self.worst[name] = max(self.worst.get(name, 0.0), distance)
                continue
            self.drift = max(self.drift, distance)
            if self.plausible and _are_far(values, copy, dtype):
                self.worst[None] = max(self.worst.get(None, 0.0), distance)
        return differ

    def _round(self, values: Array, tile: Tile, names: Iterable[Replica]) -> None:
        """Count the elements in which rounded FP32 master weights differ from these copies of the model's weights."""
        for name in names:
            dtype = self.job.twins[name][0].fragment.dtype
            rounded = casts.cast(values, self.job.source_dtype, dtype, self.job.label)
            stored = np.empty_like(rounded)
            gather(self.files, self.twins[name], tile.start, tile.shape, stored, tile.scratch.view(stored.dtype))
            self.unequal[name] += int((rounded != stored).sum())

    def judge(self) -> None:
        """Refuse copies that differ where the policy does not say which one counts.

        Raises:
            VerificationError: copies differ, are too far apart for drift, or are not the rounded FP32 master weights.
        """
        job = self.job
        if self.unequal.total():
            (copy, unequal), *_ = self.unequal.most_common(1)
            module = "" if job.state else ", out of DeepSpeed with zero2hf or neox2hf --weights module"
            unchecked = "" if self.nameless else "; --replicas first takes the master weights unchecked"
            raise VerificationError(
                f"{unequal} of {prod(job.shape)} elements of {job.label} in {job.twins[copy][0].fragment.path} are not "
                f"the rounded FP32 master weights of {job.replicas.get(copy, job.sources)[0].fragment.path}",
                f"the model goes alone without its optimizer{module}{unchecked}",
            )
        if not self.worst:
            return
        name, distance = max(self.worst.items(), key=lambda pair: pair[1])
        if name is None:
            raise VerificationError(
                f"the copies of {job.label} are up to {distance:g} apart, too far for a norm that drifted: "
                f"{job.sources[0].fragment.path} and others may be of different models",
                "--replicas mean averages them all the same, --replicas first takes the first",
            )
        paths = (str(parts[0].fragment.path) for parts in (job.sources, job.replicas[name]))
        files = [*dict.fromkeys(paths)]
        where = f"between {' and '.join(files)}" if len(files) > 1 else f"in {files[0]}"
        if name == SHARED:
            raise VerificationError(
                f"the output head should share {job.label} and differs from it by up to {distance:g} {where}",
                "--set tied=false keeps both",
            )
        several = name.shared and job.tensor.endswith(lora.A)  # which are different tensors, and no policy makes one
        raise VerificationError(
            f"{job.label} differs between its copies in {len(self.worst)} of {len(self.replicas)} places, most in "
            f"{name}: by up to {distance:g} {where}",
            "--lora canonical keeps them all"
            if several
            else "--replicas first takes the first copy, --replicas mean their mean in float32",
        )


def _are_far(first: Array, second: Array, dtype: str) -> bool:
    """Whether copies are farther apart than drift or, at the beginning of a training, noise brings them."""
    a, b = (casts.to_float(values, dtype).astype(np.float64) for values in (first, second))
    with np.errstate(invalid="ignore"):
        apart = a - b
    most = np.linalg.norm(apart, np.inf)
    drifted = most <= FARTHEST * np.linalg.norm(a, np.inf)
    return not (drifted or (most <= NOISE and np.linalg.norm(apart) <= FARTHEST * np.linalg.norm(a)))


def _distance(first: Array, second: Array, dtype: str) -> float:
    """The largest absolute difference of floats, infinity where a NaN meets a number; of integers how many differ."""
    if dtype not in FLOATS:
        return float((first != second).sum())
    a, b = casts.to_float(first, dtype), casts.to_float(second, dtype)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    return float(np.where(np.isnan(difference), np.inf, difference)[first != second].max())
