"""Lowering: computes the leaves of a pattern on one rank of a mesh, from the sizes of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from formats.errors import RefusedError
from formats.layout.boxes import Box
from formats.layout.leaves import Leaf, Span, cut
from formats.layout.pattern import Axis, Fill, Interleaved, Pattern, Product, Split, Sum, Term, splits

Sizes = Mapping[str, int]
Mesh = Mapping[str, tuple[int, int]]
"""(rank, number of ranks) of each mesh axis, by name."""


def _size(sizes: Sizes, name: str) -> int:
    if name not in sizes:
        raise RefusedError(f"the model has no size for the axis {name!r}")
    return sizes[name]


def _lower(term: Term, sizes: Sizes, mesh: Mesh) -> tuple[int, list[Leaf]]:
    """Size of one physical dimension, and its leaves, addressed along that dimension alone."""
    if isinstance(term, Axis):
        size = _size(sizes, term.name)
        return size, [Leaf("", (Span(term.name, 0, size, 1),))]
    if isinstance(term, Fill):
        return _size(sizes, term.name), []
    if isinstance(term, Product):
        return _product([_lower(inner, sizes, mesh) for inner in term.terms])
    if isinstance(term, Sum):
        total, leaves = 0, []
        for label, body in term.branches:
            size, inside = _lower(body, sizes, mesh)
            leaves += [replace(leaf, tensor=label or leaf.tensor, base=leaf.base + total) for leaf in inside]
            total += size
        return total, leaves
    if isinstance(term, Interleaved):
        return _interleaved(term, sizes, mesh) if sizes.get(term.size) else _lower(term.term, sizes, mesh)
    size, inside = _lower(term.term, sizes, mesh)
    rank, ranks = mesh[term.mesh]
    if size % ranks:
        raise RefusedError(f"{size} rows do not divide over {term.mesh} = {ranks}")
    part = size // ranks
    return part, cut(inside, rank * part, (rank + 1) * part)


def _interleaved(term: Interleaved, sizes: Sizes, mesh: Mesh) -> tuple[int, list[Leaf]]:
    """Size and leaves of interleaved branches: a leaf for each block of each branch."""
    total, leaves, step, every = 0, [], sizes[term.size], len(term.term.branches)
    for place, (label, body) in enumerate(term.term.branches):
        size, inside = _lower(body, sizes, mesh)
        if size % step:
            raise RefusedError(f"{size} rows do not divide into blocks of {step}")
        for block in range(size // step):
            base = (block * every + place) * step
            pieces = cut(inside, block * step, (block + 1) * step)
            leaves += [replace(leaf, tensor=label or leaf.tensor, base=leaf.base + base) for leaf in pieces]
        total += size
    return total, leaves


def _product(factors: Sequence[tuple[int, list[Leaf]]]) -> tuple[int, list[Leaf]]:
    sizes = [size for size, _ in factors]
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return prod(sizes), _combine([leaves for _, leaves in factors], strides)


def _combine(factors: Sequence[list[Leaf]], strides: Sequence[int]) -> list[Leaf]:
    """Leaves of a product, given the leaves of each factor and the stride of each factor."""
    combined = []
    for choice in product(*factors):
        labels = {leaf.tensor for leaf in choice if leaf.tensor}
        if len(labels) > 1:
            raise RefusedError(f"one address would belong to {' and '.join(sorted(labels))}")
        spans = tuple(
            span._replace(stride=span.stride * stride)
            for leaf, stride in zip(choice, strides, strict=True)
            for span in leaf.spans
        )
        base = sum(leaf.base * stride for leaf, stride in zip(choice, strides, strict=True))
        combined.append(Leaf(labels.pop() if labels else "", spans, base))
    return combined


def lower(
    pattern: Pattern, sizes: Sizes, mesh: Mesh, strides: Sequence[int] | None = None, box: Box | None = None
) -> list[Leaf]:
    """The leaves of a physical tensor on one rank of a mesh.

    Args:
        pattern: the layout.
        sizes: number of coordinates of each axis and fill.
        mesh: (rank, ranks) of each mesh axis that the pattern splits over.
        strides: strides of the physical tensor in elements, when it is not stored row-major.
        box: the part of the physical tensor that is stored, when it is not stored as a whole.

    Raises:
        RefusedError: a split does not divide, or an axis has no size.
    """
    factors = [_lower(term, sizes, mesh) for term in pattern.dims]
    if box is not None:
        ranges = zip(factors, box, strict=True)
        factors = [(high - low, cut(leaves, low, high)) for (_, leaves), (low, high) in ranges]
    if strides is None:
        _, leaves = _product(factors)
    else:
        leaves = _combine([leaves for _, leaves in factors], strides)
    return [replace(leaf, tensor=pattern.label or leaf.tensor) for leaf in leaves]


def shape(pattern: Pattern, sizes: Sizes, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a physical tensor on one rank of a mesh."""
    return tuple(_lower(term, sizes, mesh)[0] for term in pattern.dims)


def run_sizes(term: Term, sizes: Sizes, mesh: Mesh) -> list[int]:
    """The size of each run of a physical dimension that is evenly split by itself, on one rank of a mesh.

    Raises:
        ValueError: what a rank has of one is not in one piece.
    """
    match term:
        case Split():
            return [_lower(term, sizes, mesh)[0]]
        case Sum(branches):
            return [size for _, body in branches for size in run_sizes(body, sizes, mesh)]
        case Interleaved(inner):
            return run_sizes(inner, sizes, mesh)
        case Product(terms):
            first, *others = terms
            if any(map(splits, others)):
                raise ValueError(f"{term} is split within")
            inside = prod(_lower(other, sizes, mesh)[0] for other in others)
            return [size * inside for size in run_sizes(first, sizes, mesh)]
    return []


def rows(pattern: Pattern, dim: int, sizes: Sizes, mesh: Mesh) -> list[Leaf]:
    """The leaves along one physical dimension alone, in address order; `convert explain` draws them."""
    leaves = _lower(pattern.dims[dim], sizes, mesh)[1]
    return sorted((replace(leaf, tensor=pattern.label or leaf.tensor) for leaf in leaves), key=lambda leaf: leaf.base)
