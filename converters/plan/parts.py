"""Parts: which leaves of a logical tensor are in which physical tensors, and the proof that they tile it.

A plan of a million pieces is a plan of some thousand tensors: parts are made on demand, and what only depends on how a
tensor is cut is proved once for all layers that are cut alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from math import prod
from typing import Any

from formats.disk.safetensors import Fragment
from formats.errors import RefusedError
from formats.layout.boxes import overlap
from formats.layout.leaves import Leaf
from formats.layout.placed import Kind, Placed
from formats.layout.slots import ORIGINAL, Layout, Replica


@dataclass(frozen=True, slots=True)
class Part:
    """A leaf, and the fragment that holds it; `interleaved` if elements of other leaves are between its own.

    An interleaved part is written by one process and one thread at a time: the write rewrites the elements in between
    too.
    """

    leaf: Leaf
    fragment: Fragment
    interleaved: bool = False


class Parts(Sequence[Part]):
    """The parts of a logical tensor in the physical tensors `placed`, made on demand, followed by those in `extra`."""

    __slots__ = ("extra", "leaves", "placed", "tensor")

    def __init__(self, tensor: str) -> None:
        self.tensor, self.leaves = tensor, 0
        self.placed: list[Placed] = []
        self.extra: tuple[Part, ...] = ()

    def add(self, placed: Placed, leaves: int) -> None:
        """Add the parts of one more physical tensor, which are as many as its `leaves`."""
        self.placed.append(placed)
        self.leaves += leaves

    def __len__(self) -> int:
        return self.leaves + len(self.extra)

    def __iter__(self) -> Iterator[Part]:
        single = chain.from_iterable(placed.each() if placed.files else (placed,) for placed in self.placed)
        return chain(chain.from_iterable(_parts(placed, self.tensor) for placed in single), self.extra)

    def __getitem__(self, index: Any) -> Any:
        """One part, or those of a slice, found by iterating from the first."""
        if isinstance(index, slice):
            return tuple(islice(self, *index.indices(len(self))))
        return next(islice(self, range(len(self))[index], None))

    @property
    def key(self) -> str:
        """What the first physical tensor is called; nothing where there is none."""
        return next((placed.key for placed in self.placed), "")

    @property
    def shared(self) -> bool:
        """Whether that holds other tensors too."""
        return any(len(placed.slot.rule.pattern.tensors) > 1 for placed in self.placed[:1])

    def prove(self, shape: tuple[int, ...], name: str) -> None:
        """Prove that each element of the box `shape` is in exactly one part. Raises as `prove_tiling`."""
        layouts = tuple((placed.layout, placed.slot.expert) for placed in self.placed)
        if self.extra or not _tiled(self.tensor, layouts, shape):
            prove_tiling([part.leaf for part in self], shape, name)

    def prove_copies(self, shape: tuple[int, ...], name: str) -> None:
        """Prove that each element of the box `shape` is in one part of each copy, and that there is an original.

        Raises:
            RefusedError: a copy does not tile the box, or there is no original.
        """
        if _all_tiled(self.tensor, tuple(placed.kind for placed in self.placed), shape):
            return
        by_tensor = parts_of(part for placed in self.placed for part in placed.each())
        copies = {
            copy: parts
            for (tensor, _), parts_of_copies in by_tensor.items()
            if tensor == self.tensor
            for copy, parts in parts_of_copies.items()
        }
        if ORIGINAL not in copies:
            raise RefusedError(f"nothing holds {name}")
        for copy, parts in copies.items():
            parts.prove(shape, f"{name}{f' ({copy})' if copy else ''}")


Copies = dict[Replica, Parts]
"""The parts of a tensor, and of each further copy of it."""


def parts_of(tensors: Iterable[Placed]) -> dict[tuple[str, int | None], Copies]:
    """The parts of logical tensors by (tensor, layer) and by the copy to which they belong."""
    by_tensor: dict[tuple[str, int | None], Copies] = {}
    for placed in tensors:
        slot = placed.slot
        for tensor, count, _ in _counts(placed.layout):
            copies = by_tensor.setdefault((tensor, slot.layer), {})
            if slot.replica not in copies:
                copies[slot.replica] = Parts(tensor)
            copies[slot.replica].add(placed, count)
    return by_tensor


def written_parts(tensors: Iterable[Placed]) -> dict[tuple[str, int | None], Parts]:
    """The parts of logical tensors by (tensor, layer), those of all copies together."""
    by_tensor: dict[tuple[str, int | None], Parts] = {}
    for placed in tensors:
        for tensor, count, _ in _leaf_counts(placed.kind):
            key = tensor, placed.slot.layer
            if key not in by_tensor:
                by_tensor[key] = Parts(tensor)
            by_tensor[key].add(placed, count)
    return by_tensor


@lru_cache(maxsize=1024)
def _counts(layout: Layout) -> tuple[tuple[str, int, int], ...]:
    """Of each tensor of a layout: its name, how many leaves it has, and how many elements these have."""
    counts: dict[str, tuple[int, int]] = {}
    for leaf in chain.from_iterable(layout.lowered()):
        count, numel = counts.get(leaf.tensor, (0, 0))
        counts[leaf.tensor] = count + 1, numel + leaf.numel
    return tuple((tensor, *pair) for tensor, pair in counts.items())


@lru_cache(maxsize=1024)
def _leaf_counts(kind: Kind) -> tuple[tuple[str, int, int], ...]:
    """Of each tensor on all ranks: its name, how many leaves it has, and how many elements these have."""
    counts: dict[str, tuple[int, int]] = {}
    for layout, _, _ in kind.each():
        for tensor, count, numel in _counts(layout):
            counted, elements = counts.get(tensor, (0, 0))
            counts[tensor] = counted + count, elements + numel
    return tuple((tensor, *elements) for tensor, elements in counts.items())


def empty(placed: Placed) -> int:
    """How many elements of a physical tensor, on all of its ranks, belong to no logical tensor."""
    count = len(placed.files.ranks) if placed.files else 1
    return count * prod(placed.fragment.shape) - sum(numel for _, _, numel in _leaf_counts(placed.kind))


def _parts(placed: Placed, tensor: str) -> Iterator[Part]:
    """The parts of a logical tensor in a physical one."""
    slot, columns = placed.slot, placed.columns
    for number, leaves in enumerate(placed.layout.lowered()):
        woven = len(leaves) > 1 and any(min(_steps(leaf), default=1) > 1 for leaf in leaves)
        own = [slot.in_order(leaf) for leaf in leaves if leaf.tensor == tensor]
        if own:
            fragment = placed.fragment if columns is None else columns[number].fragment
            yield from (Part(leaf, fragment, woven) for leaf in own)


def _steps(leaf: Leaf) -> list[int]:
    """The strides of a leaf along its axes longer than 1."""
    return [span.stride for span in leaf.spans if span.size > 1]


@lru_cache(maxsize=256)
def _tiled(tensor: str, layouts: tuple[tuple[Layout, int | None], ...], shape: tuple[int, ...]) -> bool:
    """Whether the leaves of a tensor in these layouts, each of an expert or of none, tile the box `shape`."""
    leaves, boxes = 0, []
    for layout, expert in layouts:
        outside = [] if expert is None else [("expert", expert, expert + 1)]
        for leaf in chain.from_iterable(layout.lowered()):
            if leaf.tensor == tensor and leaf.numel:
                leaves += leaf.numel
                spans = sorted([*outside, *((span.axis, span.start, span.stop) for span in leaf.spans)])
                boxes.append(tuple((start, stop) for _, start, stop in spans))
    return leaves == prod(shape) and not overlap(boxes)


@lru_cache(maxsize=256)
def _all_tiled(tensor: str, kinds: tuple[Kind, ...], shape: tuple[int, ...]) -> bool:
    """Whether each copy of a tensor tiles the box `shape`, and there is an original."""
    copies: dict[Replica, list[tuple[Layout, int | None]]] = {}
    for kind in kinds:
        for layout, replica, expert in kind.each():
            copies.setdefault(replica, []).append((layout, expert))
    return ORIGINAL in copies and all(_tiled(tensor, tuple(layouts), shape) for layouts in copies.values())


def prove_tiling(leaves: Sequence[Leaf], shape: tuple[int, ...], name: str) -> None:
    """Prove that each element of a box is in exactly one leaf: the sizes add up, and no two leaves overlap.

    Raises:
        RefusedError: an element is in no leaf, or in two.
    """
    total = sum(leaf.numel for leaf in leaves)
    if total != prod(shape):
        raise RefusedError(f"{name} has {prod(shape)} elements, the layout covers {total}")
    if overlap([tuple((span.start, span.stop) for span in leaf.spans) for leaf in leaves if leaf.numel]):
        raise RefusedError(f"two parts of {name} overlap")
