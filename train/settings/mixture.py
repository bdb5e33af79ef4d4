"""Mixtures: which set each row of a training comes from, and which row of that set it is.

The sets take turns by the method of Sainte-Laguë: row j of a set with weight w is due at (j + 1/2) / w, and rows come
in the order of those times. So after any number of rows each set has had its share up to about one row, a run that is
prolonged continues as it would have, and nothing has to be saved. Within a set an epoch is a permutation of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import UsageError
from train.settings.config import Data


class Set(NamedTuple):
    """A set of a mixture.

    Attributes:
        first: number of the set's first row among all rows.
        rows: number of rows of the set.
        weight: the set's share of the rows of the training; the weights of all sets add up to 1.
    """

    first: int
    rows: int
    weight: float


def weights_of(data: Data, rows: Sequence[int]) -> list[float]:
    """The share of each set in the rows of a training; empty if no setting determines shares: all rows are alike.

    Args:
        data: the settings; `weights`, `temperature` and `epochs` are read.
        rows: number of rows of each set.

    Raises:
        UsageError: the settings contradict each other, or do not have a value for each set.
    """
    for name, values in {"weights": data.weights, "epochs": data.epochs}.items():
        if values and len(values) != len(rows):
            raise UsageError(f"data.{name} has {len(values)} values, data.train {len(rows)} sets", "one for each set")
    if data.epochs and (data.weights or data.temperature != 1):
        raise UsageError(
            "data.epochs says how often each set is trained, data.weights and data.temperature say it otherwise",
            "give one of them",
        )
    if not data.weights and not data.epochs and data.temperature == 1:
        return []
    amounts = data.weights or (samples_of(data, rows) if data.epochs else rows)
    powered = [amount ** (1 / data.temperature) for amount in amounts]
    return [amount / math.fsum(powered) for amount in powered]


def samples_of(data: Data, rows: Sequence[int]) -> list[int]:
    """Number of rows of each set that `data.epochs` asks for.

    Raises:
        UsageError: the number of rows of a set rounds to 0.
    """
    samples = [round(epochs * many) for epochs, many in zip(data.epochs, rows, strict=True)]
    if not all(samples):
        place = samples.index(0)
        raise UsageError(f"data.epochs: {data.epochs[place]:g} epochs of {rows[place]} rows round to no row")
    return samples


@lru_cache(2)
def turns(weights: tuple[float, ...], samples: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """The set that each row of a training comes from.

    Args:
        weights: weight of each set; they add up to 1.
        samples: number of rows of the training.

    Returns:
        The set of each row, uint16[samples], and how many rows of that set come before the row, int64[samples].
    """
    counts = [min(samples, math.ceil((samples + len(weights)) * weight) + 1) for weight in weights]
    due = np.concatenate([(np.arange(many) + 0.5) / weight for many, weight in zip(counts, weights, strict=True)])
    sets = np.repeat(np.arange(len(weights), dtype=np.uint16), counts)
    numbers = np.concatenate([np.arange(many) for many in counts])
    order = np.argsort(due, kind="stable")[:samples]
    return sets[order], numbers[order]
