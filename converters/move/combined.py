"""Tensors that are computed from several: a sum in float64, in the order of its terms, rounded once; DoRA's norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from converters.move import casts
from converters.move.blocks import Files, strided
from converters.move.casts import PIECE, WORDS, Array
from converters.move.reading import Reading
from converters.move.regions import Nearby, region, tiles
from converters.plan.plan import Job
from formats.disk.safetensors import DTYPES, FLOATS, Fragment
from formats.errors import RefusedError

Start = tuple[int, ...]
Combined = Callable[[Start, tuple[int, ...], Array], Array]
"""Computes the tile at a start, of a shape, in a buffer of words."""


def combination(job: Job, readings: Sequence[Reading]) -> Combined:
    """The function that computes the tiles of a tensor.

    Args:
        job: the tensor's job, with its terms.
        readings: the reading of each term.
    """
    if job.dtype not in FLOATS:
        return _equal(job, readings)
    scaled = _Normed(job, readings) if job.norms else None

    def summed(start: Start, shape: tuple[int, ...], room: Array) -> Array:
        total = _total(job, readings, start, shape)
        if scaled:
            total *= scaled(start, shape)
        return casts.round_once(total, job.dtype, _called(job), room)

    return summed


def _called(job: Job) -> str:
    """The name of a tensor in an error: its key in the base model, where a LoRA is added to it."""
    products = (term.job.sources[0].fragment.product for term in job.terms)
    return next((product.name for product in products if product), job.label)


def _total(job: Job, readings: Sequence[Reading], start: Start, shape: tuple[int, ...]) -> Array:
    """The sum of the terms of a tile, in float64."""
    total = np.zeros(prod(shape), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are refused, or summed
        for term, reading in zip(job.terms, readings, strict=True):
            words = reading(start, shape)
            if term.job.finite and not casts.finite(words, term.job.source_dtype):
                path = term.job.sources[0].fragment.path
                raise RefusedError(f"{path} holds NaN or infinity in {_called(job)}", "the training has diverged")
            for low in range(0, len(words), PIECE):
                piece = slice(low, low + PIECE)
                values = casts.to_float(words[piece], term.job.source_dtype).astype(np.float64)
                total[piece] += term.factor * (values + term.job.less_one[0])
    return total


class _Normed:
    """The factors of the elements of a tile with which the rows of matrices get the wanted norms.

    The tensor is computed once for its norms, and once more for its values. Squares are added in the order of its
    elements.
    """

    def __init__(self, job: Job, readings: Sequence[Reading]) -> None:
        self.norms = [(norms, Nearby(norms.parts, len(job.shape))) for norms in job.norms]
        magnitudes = np.concatenate([_vector(readings[0].files, norms.wanted) for norms in job.norms])
        squares, counts = np.zeros(len(magnitudes) + 1), np.zeros(len(magnitudes) + 1, np.int64)
        for start, shape in tiles(job.shape, readings[0].buffers.tile.nbytes // 8):
            total, rows = _total(job, readings, start, shape), self._rows(start, shape)
            np.add.at(squares, rows, total * total)
            counts += np.bincount(rows, minlength=len(counts))
        summed, columns = (
            counts[:-1] > 0,
            np.concatenate([[norms_of.columns] * len(norms_of) for norms_of in job.norms]),
        )
        if (counts[:-1][summed] != columns[summed]).any():
            raise RefusedError(f"the rows of {job.label} are not whole, and have no norms")
        roots = np.sqrt(squares[:-1][summed])
        if not (np.isfinite(magnitudes).all() and np.isfinite(roots).all() and roots.all()):
            raise RefusedError(
                f"{job.norms[0].wanted.path}: a norm of {job.label} is NaN, infinite, or that of zeros",
                "the training has diverged",
            )
        self.factors = np.ones(len(counts))
        self.factors[:-1][summed] = magnitudes[summed] / roots

    def __call__(self, start: Start, shape: tuple[int, ...]) -> Array:
        """The factors of a tile."""
        factors: Array = self.factors[self._rows(start, shape)]
        return factors

    def _rows(self, start: Start, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """The row number of each element of a tile, counted through all matrices; the number of all rows if in none."""
        rows = np.full(prod(shape), sum(len(norms) for norms, _ in self.norms))
        first = 0
        for norms, parts in self.norms:
            for part in parts(start, shape):
                where = region(part.leaf, start, shape)
                places = np.array(where.file)
                for count, stride, _ in where.dims:
                    places = np.add.outer(places, np.arange(count) * stride)
                row = places % len(norms) if norms.transposed else places // norms.columns
                strided(rows, where.tile, where.dims, 2)[...] = row + first
            first += len(norms)
        return rows


def _vector(files: Files, fragment: Fragment) -> Array:
    """The elements of a fragment that is a vector, as float64."""
    words = np.empty(prod(fragment.shape), WORDS[DTYPES[fragment.dtype]])
    files.read(fragment, 0, words.view(np.uint8).data)
    return casts.to_float(words, fragment.dtype).astype(np.float64)


def _equal(job: Job, readings: Sequence[Reading]) -> Combined:
    """The function that gives the tiles of a tensor of integers, which have no mean: all terms have to be equal."""

    def same(start: Start, shape: tuple[int, ...], room: Array) -> Array:
        room[:] = readings[0](start, shape)
        for reading in readings[1:]:
            if not np.array_equal(room, reading(start, shape)):
                first, other = (each.job.sources[0].fragment.path for each in (readings[0], reading))
                raise RefusedError(
                    f"{job.label} is {job.dtype}, which has no mean, and differs between {first} and {other}"
                )
        return room

    return same
