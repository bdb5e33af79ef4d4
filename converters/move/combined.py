"""Tensors that are computed of several: a sum in float64, in the order of its terms, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from converters.move import casts
from converters.move.casts import PIECE, Array
from converters.move.reading import Reading
from converters.plan.plan import Job
from formats.disk.safetensors import FLOATS
from formats.errors import RefusedError

Combined = Callable[[tuple[int, ...], tuple[int, ...], Array], Array]
"""Makes a tile, from a start and of a shape, in a buffer of words."""


def combination(job: Job, readings: Sequence[Reading]) -> Combined:
    """What computes the tiles of a tensor.

    Args:
        job: with its terms.
        readings: what reads each of them.
    """
    if job.dtype not in FLOATS:
        return _equal(job, readings)

    def summed(start: tuple[int, ...], shape: tuple[int, ...], room: Array) -> Array:
        return casts.round_once(_total(job, readings, start, shape), job.dtype, job.name, room)

    return summed


def _total(job: Job, readings: Sequence[Reading], start: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The sum of the terms of a tile, in float64."""
    total = np.zeros(prod(shape), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused, or a value like any other
        for term, reading in zip(job.terms, readings, strict=True):
            words = reading(start, shape)
            for low in range(0, len(words), PIECE):
                piece = slice(low, low + PIECE)
                total[piece] += term.factor * casts.to_float(words[piece], term.job.source_dtype).astype(np.float64)
    return total


def _equal(job: Job, readings: Sequence[Reading]) -> Combined:
    """Integers have no mean: they are those of every term."""

    def same(start: tuple[int, ...], shape: tuple[int, ...], room: Array) -> Array:
        room[:] = readings[0](start, shape)
        for reading in readings[1:]:
            if not np.array_equal(room, reading(start, shape)):
                first, other = (one.job.sources[0].fragment.path for one in (readings[0], reading))
                raise RefusedError(
                    f"{job.name} is {job.dtype}, which has no mean, and differs between {first} and {other}"
                )
        return room

    return same
