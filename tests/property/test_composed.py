"""Boxes of a tensor in another one: each element is where both say that it is."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from formats.disk.safetensors import Fragment, row_major
from formats.layout.composed import boxes_of
from formats.layout.leaves import Leaf, Span


@st.composite
def two_layouts(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], list[int], list[int], list[tuple[int, int]], list[list[int]]]:
    """Sizes of axes, their order in either tensor, the part that one of them holds, and the dimensions of the other."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    here, there = (draw(st.permutations(range(len(sizes)))) for _ in range(2))
    ranges = []
    for size in sizes:
        low = draw(st.integers(0, size - 1))
        ranges.append((low, draw(st.integers(low + 1, size))))
    cuts = sorted(draw(st.sets(st.integers(1, len(sizes)), max_size=3)) | {len(sizes)})
    groups = [there[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False)]
    return sizes, here, there, ranges, groups


@given(two_layouts())
def test_each_element_is_where_both_say(layouts):
    sizes, here, there, ranges, groups = layouts
    counts = [stop - start for start, stop in ranges]

    def strides(order: list[int], lengths: list[int]) -> list[int]:
        steps = row_major(tuple(lengths[axis] for axis in order))
        return [steps[order.index(axis)] for axis in range(len(order))]

    near = Leaf("t", tuple(Span(str(i), *ranges[i], stride) for i, stride in enumerate(strides(here, counts))))
    far = Leaf("t", tuple(Span(str(i), 0, sizes[i], stride) for i, stride in enumerate(strides(there, [*sizes]))))
    shape = tuple(prod(sizes[axis] for axis in group) for group in groups)
    whole = np.arange(prod(sizes)).reshape([sizes[axis] for axis in there])
    canonical = whole.transpose([there.index(axis) for axis in range(len(sizes))])
    part = canonical[tuple(slice(*pair) for pair in ranges)]
    stored = np.ascontiguousarray(part.transpose(here)).reshape(-1)
    read, seen = np.full(shape, -1), 0
    for box in boxes_of(near, far, shape):
        fragment = box.of(Fragment(Path("f"), 0, "U8", stored.shape, (1,)))
        view = np.lib.stride_tricks.as_strided(
            stored[fragment.offset :], fragment.shape, [stride * stored.itemsize for stride in fragment.strides]
        )
        read[tuple(slice(*pair) for pair in box.part.ranges)] = view
        seen += view.size
    assert seen == part.size
    filled = read >= 0
    assert (read[filled] == np.arange(prod(sizes)).reshape(shape)[filled]).all()
    assert sorted(read[filled].tolist()) == sorted(part.reshape(-1).tolist())
