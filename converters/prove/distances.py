"""Measure the differences between two tensors in one pass: by size, along each axis, and where they are largest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from converters.move.casts import Array

DECADES = range(-12, 5)
"""Differences are counted by decades: less than 1e-12, 1e-12 to 1e-11, ..., 1e4 or more."""
FARTHEST = 8
"""How many of the elements that differ most are kept with both their values."""


class Distances:
    """Statistics of the elements of a tensor that differ, collected tile by tile.

    Attributes:
        axes: the names of the tensor's axes.
        shape: the sizes of the axes.
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
        """Add the elements of a tile.

        Args:
            start: the start of the tile in the tensor.
            shape: the sizes of the tile.
            left: the elements of the first tensor, flat.
            right: the elements of the second tensor, flat.
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
