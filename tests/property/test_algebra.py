"""Properties of the layout algebra, over random patterns, sizes, splits and cuts."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.move.blocks import Files
from converters.move.engine import execute
from converters.move.regions import Nearby, region, runs, tiles
from converters.plan.parts import Part, prove_tiling
from converters.plan.plan import Job
from converters.plan.request import Limits
from formats.disk.safetensors import Fragment, row_major
from formats.layout.boxes import overlap
from formats.layout.leaves import Leaf, Span, clip
from formats.layout.lowering import lower, shape
from formats.layout.pattern import Pattern, parse
from formats.layout.slots import in_order
from formats.layout.tensors import TENSORS

FUSED = [
    ("query", "key", "value"),
    ("gate", "up"),
    ("output",),
    ("embedding",),
    ("final_norm",),
    ("query_bias", "key_bias"),
]
AXES = sorted({axis for axes in TENSORS.values() for axis in axes} | {"padding"})

all_sizes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@st.composite
def patterns(draw: st.DrawFn, tensors: tuple[str, ...], sizes: dict[str, int]) -> tuple[Pattern, int]:
    """A random layout of some tensors fused into one physical tensor, and the number of ranks that it is split over."""
    axes = {name: [axis for axis in TENSORS[name] if axis != "layer"] for name in tensors}
    common = [axis for axis in axes[tensors[0]] if all(axis in axes[name] for name in tensors)]
    common = draw(st.permutations(common))
    apart = common[: draw(st.integers(0, len(common)))]
    outer = [axis for axis in common[len(apart) :] if draw(st.booleans())]
    branches = []
    for name in tensors:
        inner = draw(st.permutations([axis for axis in axes[name] if axis not in apart and axis not in outer]))
        branches.append(f"{name}: {' '.join(inner)}")
    if draw(st.booleans()):
        branches.append("~padding")
    fused = f"({' '.join(outer)} ({' | '.join(draw(st.permutations(branches)))}))"
    dims = draw(st.permutations([fused, *apart]))
    whole = parse(" ".join(dims))
    split = draw(st.integers(0, len(dims) - 1))
    size = shape(whole, sizes, {})[split]
    ranks = draw(st.sampled_from([n for n in range(1, 9) if size % n == 0]))
    dims[split] += "/tp"
    return parse(" ".join(dims)), ranks


def addresses(leaf: Leaf) -> dict[tuple[str, tuple[int, ...]], int]:
    """Every coordinate of a leaf and its address, the slow way."""
    places = {}
    for point in product(*(range(span.start, span.stop) for span in leaf.spans)):
        moved = sum((x - span.start) * span.stride for x, span in zip(point, leaf.spans, strict=True))
        places[leaf.tensor, point] = leaf.base + moved
    return places


def ordered(leaves: list[Leaf]) -> list[Leaf]:
    layer = [Span("layer", 0, 1, 0)]
    return [in_order(leaf, layer if TENSORS[leaf.tensor][0] == "layer" else []) for leaf in leaves]


@given(st.data(), st.sampled_from(FUSED), all_sizes)
@settings(max_examples=150)
def test_the_leaves_of_all_ranks_are_a_bijection(data, tensors, sizes):
    pattern, ranks = data.draw(patterns(tensors, sizes))
    seen: dict[object, tuple[int, int]] = {}
    for rank in range(ranks):
        mesh = {"tp": (rank, ranks)}
        taken: set[int] = set()
        numel = prod(shape(pattern, sizes, mesh))
        for leaf in ordered(lower(pattern, sizes, mesh)):
            for key, address in addresses(leaf).items():
                assert key not in seen
                assert address not in taken
                assert 0 <= address < numel
                seen[key] = (rank, address)
                taken.add(address)
        if "~" not in pattern.text:
            assert len(taken) == numel
    for name in tensors:
        box = [1 if axis == "layer" else sizes[axis] for axis in TENSORS[name]]
        assert sum(key[0] == name for key in seen) == prod(box)


@given(st.data(), st.sampled_from(FUSED), all_sizes, st.lists(st.integers(0, 600), max_size=6))
@settings(max_examples=150)
def test_any_cut_reassembles(data, tensors, sizes, cuts):
    pattern, _ = data.draw(patterns(tensors, sizes))
    numel = prod(shape(pattern, sizes, {"tp": (0, 1)}))
    points = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for leaf in lower(pattern, sizes, {"tp": (0, 1)}):
        pieces: dict[object, int] = {}
        for low, high in pairwise(points):
            for piece in clip(leaf, low, high):
                inside = addresses(piece)
                assert all(low <= address < high for address in inside.values())
                assert not pieces.keys() & inside.keys()
                pieces |= inside
        assert pieces == addresses(leaf)


SIDES = [(low, high) for low in range(4) for high in range(low + 1, 5)]


@given(st.integers(1, 3).flatmap(lambda axes: st.lists(st.tuples(*[st.sampled_from(SIDES)] * axes), max_size=6)))
@settings(max_examples=300)
def test_boxes_that_overlap_are_found(boxes):
    points = {box: set(product(*(range(*side) for side in box))) for box in boxes}
    pair = overlap(boxes)
    if pair:
        assert points[pair[0]] & points[pair[1]]
    else:
        assert sum(map(len, (points[box] for box in boxes))) == len(set().union(*points.values()))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 40))
def test_tiles_partition_a_boxin_order(box, limit):
    cells = []
    for start, extent in tiles(tuple(box), limit):
        assert prod(extent) <= limit
        cells += list(product(*(range(low, low + n) for low, n in zip(start, extent, strict=True))))
    assert cells == list(product(*(range(n) for n in box)))


def reference(pattern: Pattern, ranks: int, sizes: dict[str, int], logical: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The physical tensor of each rank, filled element by element."""
    arrays = []
    for rank in range(ranks):
        mesh = {"tp": (rank, ranks)}
        flat = np.zeros(prod(shape(pattern, sizes, mesh)), np.uint16)
        for leaf in ordered(lower(pattern, sizes, mesh)):
            for (name, point), address in addresses(leaf).items():
                flat[address] = logical[name][point]
        arrays.append(flat)
    return arrays


def placed(folder: Path, name: str, pattern: Pattern, ranks: int, sizes: dict[str, int]) -> dict[str, list[Part]]:
    """The parts of each tensor, with a file for each rank."""
    parts: dict[str, list[Part]] = {}
    for rank in range(ranks):
        mesh = {"tp": (rank, ranks)}
        dims = shape(pattern, sizes, mesh)
        fragment = Fragment(folder / f"{name}{rank}", 0, "U16", dims, row_major(dims))
        for leaf in ordered(lower(pattern, sizes, mesh)):
            parts.setdefault(leaf.tensor, []).append(Part(leaf, fragment))
    return parts


@given(st.data(), st.sampled_from(FUSED), all_sizes, st.integers(1, 3))
@settings(max_examples=120)
def test_the_engine_moves_between_any_two_layouts(data, tensors, sizes, steps):
    """A to B, B to C and back to A, through files: each equals the layout filled by hand."""
    layouts = [data.draw(patterns(tensors, sizes)) for _ in range(steps + 1)]
    layouts.append(layouts[0])
    logical, count = {}, 1
    for name in tensors:
        box = [1 if axis == "layer" else sizes[axis] for axis in TENSORS[name]]
        logical[name] = np.arange(count, count + prod(box), dtype=np.uint16).reshape(box)
        count += prod(box)
    with TemporaryDirectory() as scratch, Files() as files:
        folder = Path(scratch)
        for number, (pattern, ranks) in enumerate(layouts):
            for rank, array in enumerate(reference(pattern, ranks, sizes, logical)):
                path = folder / f"{number}-{rank}"
                path.write_bytes(array.tobytes() if number == 0 else bytes(array.nbytes))
        for number in range(1, len(layouts)):
            before, after = (placed(folder, f"{n}-", *layouts[n], sizes) for n in (number - 1, number))
            jobs = []
            for name in tensors:
                box = tuple(logical[name].shape)
                for parts in (before, after):
                    prove_tiling([part.leaf for part in parts[name]], box, name)
                jobs.append(Job(name, None, box, "U16", "U16", tuple(before[name]), {}, tuple(after[name])))
            execute(jobs, files, Limits(threads=1), done=lambda job, digest: None)
            for rank, array in enumerate(reference(*layouts[number], sizes, logical)):
                assert (folder / f"{number}-{rank}").read_bytes() == array.tobytes()


@given(st.data(), st.sampled_from(FUSED), all_sizes, st.integers(1, 50), st.integers(1, 8))
@settings(max_examples=150)
def test_runs_cover_a_region_exactly(data, tensors, sizes, limit, sparsest):
    """Whatever the tile and the buffer: each element of the region in one run, and exact runs touch nothing else."""
    pattern, _ = data.draw(patterns(tensors, sizes))
    for leaf in ordered(lower(pattern, sizes, {"tp": (0, 1)})):
        box = tuple(1 if span.axis == "layer" else span.stop for span in leaf.spans)
        part = Part(leaf, Fragment(Path(), 0, "U8", (), ()))
        for start, extent in tiles(box, limit):
            inside = {
                address
                for (_, point), address in addresses(leaf).items()
                if all(low <= x < low + n for x, low, n in zip(point, start, extent, strict=True))
            }
            assert bool(Nearby([part], len(box))(start, extent)) == bool(inside)
            if not inside:
                continue
            where = region(part.leaf, start, extent)
            touched: list[int] = []
            for low, _, span, dims in runs(where, limit * 8, sparsest):
                piece = [low + sum(i * d[1] for i, d in zip(index, dims, strict=True))
                         for index in product(*(range(d[0]) for d in dims))]  # fmt: skip
                assert min(piece) == low
                assert max(piece) == low + span - 1
                assert sparsest > 1 or len(piece) == span
                touched += piece
            assert sorted(touched) == sorted(inside)


def test_a_clip_inside_a_group_gives_the_boxes_by_hand():
    leaf = Leaf("query", (Span("group", 0, 2, 12), Span("head", 0, 3, 4), Span("half", 0, 4, 1)), 0)
    got = [(piece.base, [(s.start, s.stop) for s in piece.spans]) for piece in clip(leaf, 6, 20)]
    assert got == [
        (6, [(0, 1), (1, 2), (2, 4)]),
        (8, [(0, 1), (2, 3), (0, 4)]),
        (12, [(1, 2), (0, 2), (0, 4)]),
    ]
