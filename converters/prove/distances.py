"""How two tensors are apart: by the size of the difference, along each axis, and where most. One pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from converters.move.casts import Array

DECADES = range(-12, 5)
"""Differences are counted by decades: less than 1e-12, 1e-12 to 1e-11, ..., 1e4 or more."""
FARTHEST = 8
"""Elements that are kept with both their values."""


class Distances:
    """What is known of the elements of a tensor that differ; grows tile by tile.

    Attributes:
        axes: the names of the tensor's axes.
        shape: its elements along each.
        sizes: how many elements differ by less than 1e-12, by 1e-12 to 1e-11, and so on (`DECADES`).
        counts: for each axis, how many elements differ at each place along it.
        largest: for each axis, the largest difference at each place along it; infinite where one side is not finite.
        farthest: the elements that differ most: (difference, coordinates, first, second), the largest first.
    """

    def __init__(self, axes: Sequence[str], shape: Sequence[int]) -> None:
        self.axes, self.shape = tuple(axes), tuple(shape)
        self.sizes = np.zeros(len(DECADES) + 1, np.int64)
        self.counts = [np.zeros(length, np.int64) for length in shape]
        self.largest = [np.zeros(length) for length in shape]
        self.farthest: list[tuple[float, tuple[int, ...], float, float]] = []
        self._squares = 0.0

    @property
    def rms(self) -> float:
        """The root mean square of the difference, over all elements."""
        return float(np.sqrt(self._squares / max(1, prod(self.shape))))

    def add(self, start: Sequence[int], shape: Sequence[int], left: Array, right: Array, distance: Array) -> None:
        """Take in a tile.

        Args:
            start: where it is in the tensor.
            shape: its elements along each axis.
            left: the first tensor's elements, flat.
            right: the second one's.
            distance: float64, 0 where the elements are equal and infinite where they cannot be subtracted.
        """
        differing = distance != 0
        with np.errstate(divide="ignore"):
            decades = np.searchsorted(10.0 ** np.array(DECADES), distance[differing], side="right")
        self.sizes += np.bincount(decades, minlength=len(self.sizes))
        self._squares += float(np.square(distance).sum())
        box, marks = distance.reshape(shape), differing.reshape(shape)
        for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
            others, along = tuple(n for n in range(len(shape)) if n != axis), slice(first, first + length)
            self.counts[axis][along] += marks.sum(axis=others)
            np.maximum(self.largest[axis][along], box.max(axis=others), out=self.largest[axis][along])
        most = (
            np.argpartition(distance, -FARTHEST)[-FARTHEST:] if distance.size > FARTHEST else np.arange(distance.size)
        )
        for number in most[distance[most] > 0]:
            place = np.unravel_index(number, tuple(shape))
            coordinates = tuple(first + int(n) for first, n in zip(start, place, strict=True))
            self.farthest.append((float(distance[number]), coordinates, float(left[number]), float(right[number])))
        self.farthest = sorted(self.farthest, key=lambda element: -element[0])[:FARTHEST]
