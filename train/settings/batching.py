"""Which rows make up a step: the batch equation, and an order that is a function of seed, epoch and position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from formats.errors import UsageError
from train.settings.config import Batch, Steps


@dataclass(frozen=True)
class Sizes:
    """How a step is made up: size = micro x accumulation x ranks."""

    micro: int
    accumulation: int
    ranks: int

    @property
    def size(self) -> int:
        """Rows of a step."""
        return self.micro * self.accumulation * self.ranks

    def __str__(self) -> str:
        return f"{self.size} rows = {self.micro} micro x {self.accumulation} accumulation x {self.ranks} ranks"


def batch_sizes(batch: Batch, ranks: int) -> Sizes:
    """Solve the batch equation.

    Raises:
        UsageError: the equation has no solution.
    """
    micro, size, accumulation = batch.micro, batch.size, batch.accumulation
    if size is None:
        return Sizes(micro or 1, accumulation or 1, ranks)
    if size < ranks:
        raise UsageError(f"batch.size: {size} rows are fewer than {ranks} ranks", "each rank needs one in a step")
    given = (micro or 1) * ranks if accumulation is None else accumulation * ranks
    factor = max(1, size // given)
    if accumulation is None:
        micro, accumulation = micro or 1, factor
    elif micro is None:
        micro = factor
    sizes = Sizes(micro, accumulation, ranks)
    if sizes.size != size:
        product = f"batch.micro {micro} x batch.accumulation {accumulation} x {ranks} ranks is {sizes.size}"
        rows = micro * accumulation  # of a rank
        fits = "" if size % rows else f" to {size // rows}"
        hint = f"remove one of the three, or change the number of ranks{fits}"
        raise UsageError(f"{product}, batch.size is {size}", hint)
    return sizes


@dataclass(frozen=True)
class Order:
    """The order of the rows of a training run.

    Attributes:
        rows: number of rows.
        seed: of their order, which differs in each epoch.
        samples: number of rows trained in all; batches after it are empty.
    """

    rows: int
    seed: int
    samples: int

    def batch(self, step: int, sizes: Sizes, rank: int) -> list[list[int]]:
        """The rows of one rank in a step: for each micro-batch its rows, fewer at the end.

        A function of its arguments only: a resumed run, on any number of ranks, takes the same rows as an
        uninterrupted one.
        """
        first = step * sizes.size
        return [
            [
                self.row(sample)
                for place in range(sizes.micro)
                if (sample := first + (micro * sizes.ranks + rank) * sizes.micro + place) < self.samples
            ]
            for micro in range(sizes.accumulation)
        ]

    def row(self, sample: int) -> int:
        """The row of a sample, counted over all epochs."""
        return int(_permutation(self.rows, self.seed, sample // self.rows)[sample % self.rows])


@lru_cache(2)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def make_order(rows: int, seed: int, steps: Steps, size: int) -> tuple[Order, int]:
    """The order of rows, and the number of steps.

    Raises:
        UsageError: neither train_iters nor epochs are given, or both.
    """
    if (steps.train_iters is None) == (steps.epochs is None):
        both = "--steps.epochs null removes the other" if steps.epochs is not None else ""
        raise UsageError("give one of steps.train_iters and steps.epochs", both)
    if steps.train_iters is not None:
        return Order(rows, seed, steps.train_iters * size), steps.train_iters
    samples = round((steps.epochs or 0) * rows)
    if not samples:
        raise UsageError(f"{steps.epochs} epochs of {rows} rows round to no row")
    return Order(rows, seed, samples), math.ceil(samples / size)


def one_pass(rows: int, size: int) -> int:
    """Steps in which every row is trained once; the last one may be short."""
    return -(-rows // size)


def passes(rows: int, steps: Steps, size: int) -> str:
    """A note if `train_iters` is not one pass over the rows; empty if it is, or is not given."""
    total, once = steps.train_iters, one_pass(rows, size)
    if total is None or total == once:
        return ""
    return f"steps.train_iters {total} are {total * size / rows:.3g} passes over {rows} rows, {once} are one"


def seed_of(*parts: int) -> int:
    """A seed from several numbers, such as seed, step and rank."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def shares(values: Sequence[int]) -> list[int]:
    """Start of each of several consecutive parts, and the end: exclusive prefix sums."""
    return [0, *np.cumsum(values).tolist()]
