"""Which rows make up a step: the batch equation, and an order that is a function of seed, epoch and position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats.errors import UsageError
from train.settings.config import Batch, Config, Data, Steps
from train.settings.mixture import Set, samples_of, turns, weights_of


@dataclass(frozen=True)
class Sizes:
    """How the rows of a step are divided: size = micro x accumulation x ranks.

    Attributes:
        micro: number of rows of a micro-batch on a rank.
        accumulation: number of micro-batches of a step.
        ranks: number of ranks, or of groups of ranks that share rows.
    """

    micro: int
    accumulation: int
    ranks: int

    @property
    def size(self) -> int:
        """Number of rows of a step."""
        return self.micro * self.accumulation * self.ranks

    def __str__(self) -> str:
        return f"{self.size} rows = {self.micro} micro x {self.accumulation} accumulation x {self.ranks} ranks"


def batch_sizes(batch: Batch, ranks: int) -> Sizes:
    """Solve the batch equation: find the values of `micro`, `size` and `accumulation` that are not given.

    Raises:
        UsageError: the equation has no solution.
    """
    micro, size, accumulation = batch.micro, batch.size, batch.accumulation
    if size is None:
        return Sizes(micro or 1, accumulation or 1, ranks)
    if size < ranks:
        hint = f"each rank needs one in a step: at most {size} ranks, or --batch.size {ranks}"
        raise UsageError(f"batch.size: {size} rows are fewer than {ranks} ranks", hint)
    given = (micro or 1) * ranks if accumulation is None else accumulation * ranks
    factor = max(1, size // given)
    if accumulation is None:
        micro, accumulation = micro or 1, factor
    elif micro is None:
        micro = factor
    sizes = Sizes(micro, accumulation, ranks)
    if sizes.size != size:
        product = f"batch.micro {micro} x batch.accumulation {accumulation} x {ranks} ranks is {sizes.size}"
        rows = micro * accumulation  # rows of a rank
        fits = "" if size % rows else f" to {size // rows}"
        hint = f"remove one of the three, or change the number of ranks{fits}"
        raise UsageError(f"{product}, batch.size is {size}", hint)
    return sizes


def sizes_of(config: Config, ranks: int) -> Sizes:
    """Solve the batch equation of a training on a number of ranks.

    Raises:
        UsageError: the equation has no solution, or the ranks cannot be divided into groups that share rows.
    """
    context, tensor = config.parallel.context, config.parallel.tensor
    if ranks % context:
        raise UsageError(f"{ranks} ranks cannot be groups of {context} that share rows", "--parallel.context 1")
    if ranks % tensor:
        raise UsageError(f"{ranks} ranks cannot be groups of {tensor} that share layers", "--parallel.tensor 1")
    return batch_sizes(config.batch, ranks // context // tensor)


@dataclass(frozen=True)
class Order:
    """The order of the rows of a training run.

    Attributes:
        rows: number of rows.
        seed: seed of the order of rows, which differs in each epoch.
        samples: number of rows trained over all epochs; batches after that are empty.
        sets: the sets of a mixture; empty if all rows are trained alike.
    """

    rows: int
    seed: int
    samples: int
    sets: tuple[Set, ...] = ()
    permutations: dict[tuple[int, ...], tuple[int, NDArray[np.int64]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def batch(self, step: int, sizes: Sizes, rank: int) -> list[list[int]]:
        """The rows of one rank in a step: the row numbers of each micro-batch, fewer at the end.

        The result depends on the arguments only: a resumed run, on any number of ranks, takes the same rows as an
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
        """The row number of a sample; samples are counted over all epochs."""
        if not self.sets:
            return self._permuted(self.rows, sample)
        of, before = (int(numbers[sample]) for numbers in turns(self.weights, self.samples))
        return self.sets[of].first + self._permuted(self.sets[of].rows, before, of)

    def _permuted(self, rows: int, number: int, *of: int) -> int:
        """A row of a set, whose rows are permuted anew in each epoch; the current permutation is kept."""
        epoch, place = divmod(number, rows)
        permutation = self.permutations.get(of)
        if permutation is None or permutation[0] != epoch:
            permutation = self.permutations[of] = (
                epoch,
                np.random.default_rng([self.seed, epoch, *of]).permutation(rows),
            )
        return int(permutation[1][place])

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sets: their shares of the rows that are trained."""
        return tuple(chosen.weight for chosen in self.sets)

    def taken(self) -> list[int]:
        """Number of trained rows of each set."""
        counts: list[int] = np.bincount(turns(self.weights, self.samples)[0], minlength=len(self.sets)).tolist()
        return counts


def make_order(ends: Sequence[int], seed: int, data: Data, steps: Steps, size: int) -> tuple[Order, int]:
    """The order of rows, and the number of steps.

    Args:
        ends: first row of each set, and the number of rows.
        seed: seed of the order.
        data: settings that determine how sets are mixed.
        steps: settings that determine how long the training is.
        size: number of rows of a step.

    Raises:
        UsageError: not exactly one of train_iters and epochs is given, or the mixture's settings contradict each other.
    """
    parts = [stop - first for first, stop in pairwise(ends)]
    weights = weights_of(data, parts)
    sets = tuple(map(Set, ends, parts, weights))
    samples, total = _length(ends[-1], sum(samples_of(data, parts)) if data.epochs else None, steps, size)
    return Order(ends[-1], seed, samples, sets), total


def _length(rows: int, of_sets: int | None, steps: Steps, size: int) -> tuple[int, int]:
    """Numbers of rows and of steps of a training; `of_sets` is the number of rows that `data.epochs` asks for."""
    if of_sets is not None:
        for name in ("train_iters", "epochs"):
            if getattr(steps, name) is not None:
                hint = f"--steps.{name} null removes the other"
                raise UsageError(f"data.epochs says how long the training is, and so does steps.{name}", hint)
        return of_sets, math.ceil(of_sets / size)
    if (steps.train_iters is None) == (steps.epochs is None):
        remedy = "--steps.epochs null removes the other" if steps.epochs is not None else ""
        raise UsageError("give one of steps.train_iters and steps.epochs", remedy)
    if steps.train_iters is not None:
        return steps.train_iters * size, steps.train_iters
    samples = round((steps.epochs or 0) * rows)
    if not samples:
        raise UsageError(f"{steps.epochs} epochs of {rows} rows round to no row")
    return samples, math.ceil(samples / size)


def mixed(digest: str, weights: Sequence[float]) -> str:
    """The digest of rows, and of the weights with which their sets are mixed."""
    return blake3(f"{digest} {weights}".encode()).hexdigest() if weights else digest


def one_pass(rows: int, size: int) -> int:
    """Number of steps in which every row is trained once; the last step may be short."""
    return -(-rows // size)


def passes(rows: int, steps: Steps, size: int) -> str:
    """A note if `train_iters` is not exactly one pass over the rows; empty if it is, or is not given."""
    total, once = steps.train_iters, one_pass(rows, size)
    if total is None or total == once:
        return ""
    return f"steps.train_iters {total} are {total * size / rows:.3g} passes over {rows} rows, {once} are one"


def seed_of(*parts: int) -> int:
    """A seed from several numbers, such as seed, step and rank."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def shares(values: Sequence[int]) -> list[int]:
    """Start of each of several consecutive parts, and the end of the last: exclusive prefix sums of their sizes."""
    return [0, *np.cumsum(values).tolist()]
