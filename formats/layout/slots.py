"""Slots: the physical tensors that a layout expects in the files of a checkpoint, and the leaves of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple

from formats.layout.columns import Boxes, Cut
from formats.layout.leaves import Leaf, Span, cut
from formats.layout.lowering import Mesh, lower, shape
from formats.layout.pattern import Pattern
from formats.layout.table import ALWAYS, KINDS, MTP, Rule
from formats.layout.tensors import TENSORS


class Place(NamedTuple):
    """Where a tensor is expected: a file, and the pipeline chunk in the file, where it has several."""

    file: str = ""
    chunk: str = ""


ALONE = Place()
"""The place of every tensor in a checkpoint where a tensor's key alone locates the tensor."""


class Replica(NamedTuple):
    """Which further copy of a tensor this is; false for the original.

    A further copy is `shared` under another name, as by an output head; or on other `ranks` of some mesh axes; or has a
    `number`, as pieces stored again, or the embedding of the pipeline stage that predicts further tokens; or is in the
    layer of a `depth`, from 1 on, that predicts a token after the next (MTP), once as the embedding there
    and, where the model is tied, once as the `head`.
    """

    shared: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    number: int = 0
    depth: int = 0
    head: bool = False

    def __bool__(self) -> bool:
        """Whether the tensor is a further copy."""
        return self != ORIGINAL

    def __str__(self) -> str:
        """The kind of copy as text, for people."""
        names = ["copy"] * self.shared + [f"{axis} rank {rank}" for axis, rank in self.ranks]
        names += [f"{'head of ' * self.head}MTP layer {self.depth}"] * bool(self.depth)
        names += [f"replica {self.number}"] * bool(self.number)
        return ", ".join(names)


DIM = "dim"
"""Prefix, before a number, of the names of axes of a tensor without a table."""
ORIGINAL = Replica()
SHARED = Replica(shared=True)


class Slot(NamedTuple):
    """A physical tensor that a layout expects: its place, the spellings of its key, its shape and its content."""

    place: Place
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    rule: Rule
    mesh: tuple[tuple[str, tuple[int, int]], ...]
    sizes: tuple[tuple[str, int], ...]
    layer: int | None
    replica: Replica
    expert: int | None = None

    def leaves(self) -> list[Leaf]:
        """The leaves of the physical tensor, where it is whole and row-major."""
        layout = Layout(self.rule.pattern, self.sizes, self.mesh)
        return [self.in_order(leaf) for leaves in layout.lowered() for leaf in leaves]

    def in_order(self, leaf: Leaf) -> Leaf:
        """A leaf with layer and expert as further coordinates, and its spans in the canonical order of the axes."""
        outside = (("layer", self.layer), ("expert", self.expert))
        return in_order(leaf, [Span(axis, index, index + 1, 0) for axis, index in outside if index is not None])


def in_order(leaf: Leaf, outside: Sequence[Span]) -> Leaf:
    """A leaf with further coordinates from outside of the tensor, and its spans in the canonical order of the axes.

    The axes of a tensor without a table are ordered by their numbers, or as they are stored if they have none.
    """
    spans_in_order = (*outside, *leaf.spans)
    spans = {span.axis: span for span in spans_in_order}
    axes = TENSORS.get(leaf.tensor) or tuple(sorted(spans, key=_number))
    if len(spans_in_order) != len(axes) or spans.keys() != set(axes):
        raise ValueError(
            f"a layout of {leaf.tensor} uses the axes {[s.axis for s in spans_in_order]}, it has {list(axes)}"
        )
    return Leaf(leaf.tensor, tuple(spans[axis] for axis in axes), leaf.base)


def _number(axis: str) -> int:
    """The number in the name of a dimension, 0 for an axis with a name."""
    number = axis.removeprefix(DIM)
    return int(number) if number.isdecimal() else 0


class Layout(NamedTuple):
    """Everything except layer and expert that the leaves of a fragment, or of pieces in columns, are computed from."""

    pattern: Pattern
    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, tuple[int, int]], ...]
    strides: tuple[int, ...] | None = None
    part: Cut | None = None
    boxes: Boxes | None = None

    def lowered(self) -> Sequence[Sequence[Leaf]]:
        """The leaves of each piece, without coordinates from outside of the tensor."""
        if self.boxes is None:
            return (_lowered(self.pattern, self.sizes, self.mesh, self.strides, self.part),)
        return _lowered_boxes(self.pattern, self.sizes, self.mesh, self.boxes)


@lru_cache(maxsize=64)
def _lowered_boxes(
    pattern: Pattern, sizes: tuple[tuple[str, int], ...], mesh: tuple[tuple[str, tuple[int, int]], ...], boxes: Boxes
) -> list[list[Leaf]]:
    return [_lowered.__wrapped__(pattern, sizes, mesh, None, part) for part in boxes.cuts()]


@lru_cache(maxsize=4096)
def _lowered(
    pattern: Pattern,
    sizes: tuple[tuple[str, int], ...],
    mesh: tuple[tuple[str, tuple[int, int]], ...],
    strides: tuple[int, ...] | None,
    part: Cut | None,
) -> list[Leaf]:
    if part is None or not part.flat:
        return lower(pattern, dict(sizes), dict(mesh), strides, part.ranges if part else None)
    ((low, high),) = part.ranges
    return cut(lower(pattern, dict(sizes), dict(mesh)), low, high)


@lru_cache(maxsize=4096)
def _shape(
    pattern: Pattern, sizes: tuple[tuple[str, int], ...], mesh: tuple[tuple[str, tuple[int, int]], ...]
) -> tuple[int, ...]:
    return shape(pattern, dict(sizes), dict(mesh))


def slots(
    table: Sequence[Rule],
    sizes: Mapping[str, int],
    *,
    tensors: Iterable[str],
    place: Place = ALONE,
    layers: Iterable[tuple[int, int]],
    mesh: Mesh,
    conditions: Iterable[str],
    kinds: Sequence[frozenset[str]],
    experts: Sequence[tuple[int, int]] = (),
    expert_mesh: Mesh | None = None,
    layer_sizes: Sequence[Mapping[str, int]] = (),
) -> Iterator[Slot]:
    """The physical tensors that a table puts into one file (or one pipeline chunk of a file), in the order of layers.

    Args:
        table: the rules.
        sizes: the size of each axis.
        tensors: the logical tensors of the model.
        place: the file, relative to the checkpoint, and the chunk in it.
        layers: (number in the key, number in the model) of each layer in the file.
        mesh: the file's rank and the number of ranks on each mesh axis.
        conditions: the conditions that hold in this file, whatever the layer.
        kinds: the conditions in `KINDS` that hold in each layer of the model.
        experts: (number in the key, number in the model) of each expert in the file.
        expert_mesh: the mesh of tensors that are split over experts, where it differs from `mesh`.
        layer_sizes: the sizes in which each layer of the model differs; empty where all layers have the same sizes.
    """
    known, conditions_met = set(tensors), set(conditions) | ALWAYS | KINDS
    numbers = list(layers)
    holding = [rule for rule in table if set(rule.pattern.tensors) <= known and rule.conditions <= conditions_met]
    frozen_sizes = tuple(sizes.items())
    frozen_by_layer = [tuple({**sizes, **own}.items()) for own in layer_sizes]
    meshes = {False: tuple(mesh.items()), True: tuple((mesh if expert_mesh is None else expert_mesh).items())}
    first_mtp = sum(MTP not in own for own in kinds)
    for stacked, group in groupby(holding, key=lambda rule: "{layer}" in rule.key or MTP in rule.conditions):
        members = []
        for rule in group:  # facts that are the same in each layer
            own = meshes[rule.over_experts]
            layered = stacked and any(TENSORS[name][0] == "layer" for name in rule.pattern.tensors)
            shared = not rule.conditions.isdisjoint({"copy", "optional"})
            replica = Replica(shared, ranks_again(rule, own), int(shared and "predicting" in rule.conditions))
            shapes = dict[int, tuple[int, ...]]()
            members.append((rule, rule.conditions & KINDS, own, layered, replica, shapes))
        for (local, layer), member in product(numbers, members) if stacked else product([(0, 0)], members):
            rule, kinds_met, own, layered, replica, shapes = member
            if replica.shared and MTP in rule.conditions:
                replica = replica._replace(depth=1 + layer - first_mtp, head="tied" in rule.conditions)
            if stacked and not (kinds_met <= kinds[layer] and (MTP in rule.conditions) == (layer >= first_mtp)):
                continue
            of, sizes_here = (layer, frozen_by_layer[layer]) if layered and frozen_by_layer else (-1, frozen_sizes)
            if of not in shapes:
                shapes[of] = _shape(rule.pattern, sizes_here, own)
            for number, expert in experts if rule.of_expert else [(0, None)]:
                names = {"{layer}": str(local), "{expert}": str(number), "{depth}": str(layer - first_mtp)}
                yield Slot(
                    place,
                    tuple(_filled(spelling, names) for spelling in rule.spellings),
                    shapes[of],
                    rule,
                    own,
                    sizes_here,
                    layer if layered else None,
                    replica,
                    expert,
                )


def ranks_again(rule: Rule, mesh: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[tuple[str, int], ...]:
    """The ranks other than the first on mesh axes over which a tensor is not split: these ranks have a copy."""
    return tuple((axis, rank) for axis, (rank, _) in mesh if axis not in rule.splits and rank)


def _filled(template: str, names: Mapping[str, str]) -> str:
    """A key template with its coordinates replaced by numbers."""
    for name, number in names.items():
        template = template.replace(name, number)
    return template
