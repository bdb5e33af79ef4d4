"""Boxes of coordinates, and whether any two of many overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Box = tuple[tuple[int, int], ...]
"""Start and stop along each dimension."""


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap, None if no two do.

    Boxes are split into groups where an axis separates them, until each box is alone: n log n for the boxes of a
    sharded tensor.
    """
    for axis in range(len(boxes[0]) if len(boxes) > 1 else 0):
        groups: list[list[Box]] = []
        stop = -1
        for box in sorted(boxes, key=lambda box: box[axis][0]):
            if box[axis][0] >= stop:
                groups.append([])
            groups[-1].append(box)
            stop = max(stop, box[axis][1])
        if len(groups) > 1:
            return next((pair for group in groups if (pair := overlap(group))), None)
    meeting = (
        (first, second)
        for first, second in combinations(boxes, 2)
        if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(first, second, strict=True))
    )
    return next(meeting, None)
