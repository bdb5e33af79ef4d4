"""Layouts: tables of rules that say which physical tensors a checkpoint holds, and what is in them.

A rule is a line: a key, a pattern, and the conditions under which it holds.

    decoder.layers.{layer}.mlp.linear_fc1.weight    (gate: ffn/tp | up: ffn/tp) hidden
    output_layer.weight                             (head: vocab | ~padding)/tp hidden     last

Columns are separated by two or more spaces. `{layer}` and `{expert}` are coordinates that live in the key, as is
`{depth}`, which counts the layers that predict tokens after the next; `{a|b}` are
spellings, of which a reader takes the one that it finds and a writer the one that it is told. A rule holds when the
model has every tensor that its pattern names, and the file is where its conditions want it to be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.safetensors import Fragment
from formats.errors import SourceError
from formats.layout.columns import Boxes, Columns, Cut
from formats.layout.leaves import Leaf, Span, cut
from formats.layout.lowering import Mesh, lower, shape
from formats.layout.pattern import Pattern, parse
from formats.layout.ranks import Files, Ranks
from formats.layout.tensors import TENSORS

CONDITIONS = {
    "first": "only in the first pipeline stage",
    "last": "only in the last pipeline stage",
    "tied": "only when the output head shares the embedding",
    "untied": "only when it does not",
    "parallel": "only when attention and MLP read the same residual",
    "serial": "only when they follow one another",
    "mha": "only when every head has its own key and value",
    "gqa": "only when several heads share them",
    "grouped": "only when the queries of each group are before its key and value, as in GPT-NeoX before November 2024",
    "blocked": "only when all queries of a rank are before all its keys, and these before its values",
    "qkv_bias": "only when query, key and value have biases, in a family that leaves the choice",
    "output_bias": "only when the output of attention has one, in a family that leaves the choice",
    "mlp_bias": "only when the MLP has biases, in a family that leaves the choice",
    "plain": "only when the MLP has no gate",
    "query_gate": "only when a gate weighs the output of attention",
    "no_query_gate": "only when none does",
    "direct": "only when keys and values are projections of what comes in",
    "latent": "only when they come out of a latent",
    "compressed": "only when queries do too",
    "uncompressed": "only when they do not",
    "attention": "only in layers with attention",
    "recurrent": "only in layers with linear attention, whose state goes from token to token",
    "state": "only in layers with a state space (Mamba2)",
    "short": "only in layers with a short convolution",
    "indexing": "only in layers whose attention has an indexer of its own",
    "indexed": "only when an indexer chooses what attention sees",
    "unindexed": "only when none does",
    "blocks": "only in layers whose attention sees blocks of keys that an indexer chooses",
    "windowed": "only in layers with a sliding window",
    "keyed": "only in layers with keys of their own",
    "valued": "only in layers with values of their own, which are not the keys",
    "fed": "only when each layer gets an input of its own",
    "mtp": "only in layers that predict a token after the next",
    "whole": "only when a layer has attention, or what is in its place, and an MLP",
    "single": "only when a layer is the one or the other",
    "dense": "only in layers with one MLP for all tokens",
    "sparse": "only in layers with experts",
    "wide": "only when experts work on all of a hidden state",
    "narrow": "only when they work on a latent",
    "predicting": "only when the model has layers that predict tokens after the next",
    "fused": "only when gate and up, or all experts, are one matrix, or a name is that in memory",
    "separate": "only when each is its own, or a name is that of the Hub",
    "centred": "stored minus 1, while elsewhere the tensor is stored itself",
    "copy": "a copy of a tensor that another file holds",
    "partial": "a summand: the tensor is the sum of what all ranks hold",
    "optional": "may be absent",
}
ALWAYS = {"centred", "copy", "partial", "optional"}
"""Conditions that say what a tensor is, not when it is there."""
BIASES = {"qkv_bias", "output_bias", "mlp_bias"}
"""Conditions that a config key of some families turns on."""
MTP = "mtp"
"""The kind of the layers that predict tokens after the next, which are numbered after the others. A line holds in them
or in the others, never in both."""
TOLD_APART = {"blocks", "windowed", "keyed", "valued"}
"""Kinds of layers that only some tables tell apart."""
KINDS = {"attention", "recurrent", "state", "short", "indexing", "dense", "sparse", MTP} | TOLD_APART
"""Conditions that hold in some layers of a model, and not in others: what a layer has of each is its kinds."""
SECOND = re.compile(r"\.layers\.\d+\.(?:enorm|hnorm|eh_proj)\.|^(?:model\.)?mtp\.")
"""Keys that only a layer has which predicts a token after the next, in DeepSeek-V3 and its descendants, and in Qwen."""


@dataclass(frozen=True)
class Rule:
    """One line of a layout table."""

    key: str
    pattern: Pattern
    conditions: frozenset[str]

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """The key templates that a reader accepts, `{layer}` and `{expert}` still in them."""
        parts = re.split(r"\{((?:[^{}]|\{\w+\})*\|(?:[^{}]|\{\w+\})*)\}", self.key)
        choices = [[part] if i % 2 == 0 else part.split("|") for i, part in enumerate(parts)]
        return tuple("".join(choice) for choice in product(*choices))

    @cached_property
    def of_expert(self) -> bool:
        """Whether the key names one expert."""
        return "{expert}" in self.key

    @cached_property
    def splits(self) -> frozenset[str]:
        """The mesh axes over which the tensor, or the experts of its key, are split."""
        return self.pattern.meshes | ({"ep"} if self.of_expert else frozenset())

    @cached_property
    def over_experts(self) -> bool:
        """Whether its mesh is that of tensors that are split over experts."""
        return not self.splits.isdisjoint({"ep", "etp"})


def rules(table: str) -> tuple[Rule, ...]:
    """Parse a layout table."""
    parsed = []
    for line in filter(str.strip, table.splitlines()):
        key, pattern, *conditions = re.split(r"\s{2,}", line.strip())
        names = frozenset(" ".join(conditions).split())
        if names - set(CONDITIONS):
            raise ValueError(f"unknown condition in: {line}")
        rule = Rule(key, parse(pattern), names)
        if set(rule.pattern.tensors) - set(TENSORS):
            raise ValueError(f"unknown tensor in: {line}")
        parsed.append(rule)
    return tuple(parsed)


class Place(NamedTuple):
    """Where a tensor is looked for: a file, and the pipeline chunk in it, where a file has several."""

    file: str = ""
    chunk: str = ""


ALONE = Place()
"""The place of every tensor of a checkpoint whose keys are enough to find them."""


class Replica(NamedTuple):
    """Which further copy of a tensor this is; nothing of the one that counts.

    It is `shared` under another name, as by an output head; on the ranks of some mesh axes; or in pieces stored again,
    or by a layer that predicts a token after the next.
    """

    shared: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    number: int = 0

    def __bool__(self) -> bool:
        """Whether it is a further copy."""
        return self != ORIGINAL

    def __str__(self) -> str:
        """The copy, for a person."""
        names = ["copy"] * self.shared + [f"{axis} rank {rank}" for axis, rank in self.ranks]
        return ", ".join(names + [f"replica {self.number}"] * bool(self.number))


ORIGINAL = Replica()
SHARED = Replica(shared=True)


class Slot(NamedTuple):
    """One physical tensor that a layout expects: its place, the spellings of its key, its shape and its content."""

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
        """What the physical tensor holds, where it is whole and row-major."""
        layout = Layout(self.rule.pattern, self.sizes, self.mesh)
        return [self.in_order(leaf) for leaves in layout.lowered() for leaf in leaves]

    def in_order(self, leaf: Leaf) -> Leaf:
        """A leaf with the coordinates that are outside the tensor, its spans in the canonical order of the axes."""
        outside = (("layer", self.layer), ("expert", self.expert))
        return in_order(leaf, [Span(axis, index, index + 1, 0) for axis, index in outside if index is not None])


def in_order(leaf: Leaf, outside: Sequence[Span]) -> Leaf:
    """A leaf with coordinates that are outside the tensor, its spans in the canonical order of the axes."""
    spans_in_order = (*outside, *leaf.spans)
    spans = {span.axis: span for span in spans_in_order}
    axes = TENSORS.get(leaf.tensor, tuple(spans))  # a tensor that no table knows has the axes that it is stored in
    if len(spans_in_order) != len(axes) or spans.keys() != set(axes):
        raise ValueError(
            f"a layout of {leaf.tensor} uses the axes {[s.axis for s in spans_in_order]}, it has {list(axes)}"
        )
    return Leaf(leaf.tensor, tuple(spans[axis] for axis in axes), leaf.base)


class Layout(NamedTuple):
    """All that the leaves of a fragment, or of each piece in columns, follow from, but for its layer and expert."""

    pattern: Pattern
    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, tuple[int, int]], ...]
    strides: tuple[int, ...] | None = None
    part: Cut | None = None
    boxes: Boxes | None = None

    def lowered(self) -> Sequence[Sequence[Leaf]]:
        """The leaves of each piece, without the coordinates that are outside the tensor."""
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
    prefix: str = "",
    layers: Iterable[tuple[int, int]],
    mesh: Mesh,
    conditions: Iterable[str],
    kinds: Sequence[Collection[str]],
    experts: Sequence[tuple[int, int]] = (),
    expert_mesh: Mesh | None = None,
    layer_sizes: Sequence[Mapping[str, int]] = (),
) -> Iterator[Slot]:
    """The physical tensors that a table puts into one file (or one pipeline chunk of it), in the order of its layers.

    Args:
        table: the rules.
        sizes: the size of each axis.
        tensors: the logical tensors that the model has.
        place: the file, relative to the checkpoint, and the chunk in it.
        prefix: what stands before every key.
        layers: (number in the key, number in the model) of each layer that the file holds.
        mesh: the file's rank and the number of ranks on each mesh axis.
        conditions: those that hold in this file, whatever the layer.
        kinds: those of `KINDS` that hold in each layer of the model.
        experts: (number in the key, number in the model) of each expert that the file holds.
        expert_mesh: the mesh of the tensors that are split over experts, where theirs is another one.
        layer_sizes: the sizes that each layer of the model has otherwise; none where all have the same.
    """
    known, here = set(tensors), set(conditions) | ALWAYS | KINDS
    numbers = list(layers)
    holding = [rule for rule in table if set(rule.pattern.tensors) <= known and rule.conditions <= here]
    frozen_sizes = tuple(sizes.items())
    frozen_by_layer = [tuple({**sizes, **own}.items()) for own in layer_sizes]
    meshes = {False: tuple(mesh.items()), True: tuple((mesh if expert_mesh is None else expert_mesh).items())}
    first_mtp = sum(MTP not in own for own in kinds)
    for stacked, group in groupby(holding, key=lambda rule: "{layer}" in rule.key or MTP in rule.conditions):
        members = list(group)
        for (local, layer), rule in product(numbers, members) if stacked else product([(0, 0)], members):
            if stacked and not (
                rule.conditions & KINDS <= {*kinds[layer]} and (MTP in rule.conditions) == (layer >= first_mtp)
            ):
                continue
            layered = stacked and any(TENSORS[name][0] == "layer" for name in rule.pattern.tensors)
            sizes_here = frozen_by_layer[layer] if layered and frozen_by_layer else frozen_sizes
            own = meshes[rule.over_experts]
            shared = not rule.conditions.isdisjoint({"copy", "optional"})
            number = int(shared and not rule.conditions.isdisjoint({MTP, "predicting"}))
            replica = Replica(shared, _again(rule, own), number)
            for number, expert in experts if rule.of_expert else [(0, None)]:
                names = {"{layer}": str(local), "{expert}": str(number), "{depth}": str(layer - first_mtp)}
                yield Slot(
                    place,
                    tuple(prefix + _filled(spelling, names) for spelling in rule.spellings),
                    _shape(rule.pattern, sizes_here, own),
                    rule,
                    own,
                    sizes_here,
                    layer if layered else None,
                    replica,
                    expert,
                )


def _again(rule: Rule, mesh: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[tuple[str, int], ...]:
    """The ranks, other than the first, of mesh axes over which a tensor is not split: they hold it again."""
    return tuple((axis, rank) for axis, (rank, _) in mesh if axis not in rule.splits and rank)


def _filled(template: str, names: Mapping[str, str]) -> str:
    """A key template with numbers in the places of its coordinates."""
    for name, number in names.items():
        template = template.replace(name, number)
    return template


def model_tensors(table: Sequence[Rule], conditions: Iterable[str]) -> tuple[str, ...]:
    """The logical tensors that a table defines, in its order."""
    holds = set(conditions) | {"optional", "partial", "separate"}
    names = [name for rule in table if rule.conditions <= holds for name in rule.pattern.tensors]
    return tuple(dict.fromkeys(names))


class Placed(NamedTuple):
    """A physical tensor of a checkpoint, or a part of one, found (or to be written) under `key`.

    With `columns` it is all pieces of a tensor, and `fragment` stands for all of it. With `files` it is what each of
    some ranks holds in its own file, at the same place there; `slot` and `fragment` are those of the first.
    """

    key: str
    slot: Slot
    fragment: Fragment
    part: Cut | None = None
    columns: Columns | None = None
    files: Files | None = None

    @property
    def fragments(self) -> int:
        """How many fragments it is."""
        return len(self.columns or (self.files and self.files.ranks) or (self,))

    def each(self) -> Iterator[Placed]:
        """Each of the pieces by itself, or what each rank holds."""
        if self.columns is not None:
            for part, fragment in self.columns:
                yield Placed(self.key, self.slot, fragment, part)
        elif self.files is not None:
            yield from map(self.on, range(len(self.files.ranks)))
        else:
            yield self

    def on(self, rank: int) -> Placed:
        """What one of the ranks holds, by its number among them."""
        assert self.files is not None
        slot, ranks = self.slot, self.files.ranks
        mesh, replica, expert = self.kind.on(ranks, rank)
        place = Place(self.files.places[rank], slot.place.chunk)
        slot = slot._replace(place=place, mesh=mesh, replica=replica, expert=expert)
        return Placed(self.key, slot, self.fragment._replace(path=self.files.paths[rank]))

    @property
    def kind(self) -> Kind:
        """All that its copies, and the leaves of each, follow from, but for its layer."""
        slot = self.slot
        return Kind(slot.rule, self.layout, slot.replica, slot.expert, self.files.ranks if self.files else None)

    @property
    def layout(self) -> Layout:
        """What its leaves follow from.

        Raises:
            SourceError: it is an interval of elements that are not contiguous.
        """
        slot, fragment, flat = self.slot, self.fragment, self.part is not None and self.part.flat
        if self.columns is not None:
            return Layout(slot.rule.pattern, slot.sizes, slot.mesh, boxes=self.columns.boxes)
        if flat and not fragment.row_major and prod(fragment.shape) > 1:
            raise SourceError(f"{fragment.path} holds {self.key} in a flat piece with gaps: strides {fragment.strides}")
        strides = None if fragment.row_major else fragment.strides
        return Layout(slot.rule.pattern, slot.sizes, slot.mesh, strides, self.part)

    def leaves(self) -> list[Leaf]:
        """What it holds, where it is no columns. Raises as `layout` does."""
        assert self.columns is None
        return [self.slot.in_order(leaf) for leaves in self.layout.lowered() for leaf in leaves]


class Kind(NamedTuple):
    """What the copies of a tensor, and the leaves of each, follow from, but for its layer: `Placed.kind`."""

    rule: Rule
    layout: Layout
    replica: Replica
    expert: int | None
    ranks: Ranks | None

    def on(self, ranks: Ranks, rank: int) -> tuple[tuple[tuple[str, tuple[int, int]], ...], Replica, int | None]:
        """Mesh, copy and expert of what one of some ranks holds."""
        mesh = ranks.meshes[rank][self.rule.over_experts]
        expert = None if self.expert is None else self.expert - ranks.experts[0] + ranks.experts[rank]
        return mesh, self.replica._replace(ranks=_again(self.rule, mesh)), expert

    def each(self) -> Iterator[tuple[Layout, Replica, int | None]]:
        """Layout, copy and expert of what each rank holds, or of the one tensor that it is."""
        if self.ranks is None:
            yield self.layout, self.replica, self.expert
            return
        for rank in range(len(self.ranks)):
            mesh, replica, expert = self.on(self.ranks, rank)
            yield self.layout._replace(mesh=mesh), replica, expert


@dataclass(frozen=True)
class OnRank(Sequence[Placed]):
    """The tensors of one of some ranks that hold the same ones; each is made when it is asked for."""

    held: tuple[Placed, ...]
    rank: int

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: Any) -> Any:
        """One, or some."""
        if isinstance(index, slice):
            return tuple(placed.on(self.rank) for placed in self.held[index])
        return self.held[index].on(self.rank)


def files_of(tensors: Iterable[Placed]) -> dict[Path, None]:
    """The files that physical tensors are in, in their order."""
    files: dict[Path, None] = {}
    for placed in tensors:
        files |= dict.fromkeys([placed.fragment.path] if placed.columns is None else placed.columns.files)
    return files


def match(
    slots: Iterable[Slot], fragments: Mapping[Place, Mapping[str, Fragment]], drops: Sequence[str], where: Path
) -> tuple[list[Placed], list[str]]:
    """Pair the physical tensors that a layout expects with those that the files hold.

    Args:
        slots: the slots of the layout.
        fragments: the tensors of each place, by key.
        drops: regular expressions of keys that carry no weights.
        where: what to call the checkpoint in an error.

    Returns:
        The pairs, and the keys that a rule dropped.

    Raises:
        SourceError: something is missing, left over, or has another shape; the message lists names and files.
    """
    placed: list[Placed] = []
    missing: list[str] = []
    bare = False
    used: dict[Place, set[str]] = {place: set() for place in fragments}
    for slot in slots:
        tensors = fragments.get(slot.place, {})
        keys = [key for key in slot.keys if key in tensors]
        if len(keys) > 1:
            raise SourceError(f"{tensors[keys[0]].path} holds the same tensor twice: {' and '.join(keys)}")
        if not keys:
            if "optional" not in slot.rule.conditions:
                missing.append(f"{slot.keys[0]} {list(slot.shape)} in {_path(tensors, slot.place, where)}")
                bare |= slot.keys[0].removeprefix("model.") in tensors
            continue
        fragment = tensors[keys[0]]
        if fragment.shape != slot.shape:
            raise SourceError(
                f"{fragment.path}: {keys[0]} has shape {list(fragment.shape)}, but the configuration implies "
                f"{list(slot.shape)}",
                "check that the configuration belongs to these weights",
            )
        used[slot.place].add(keys[0])
        placed.append(Placed(keys[0], slot, fragment))
    if missing:
        hint = "the names lack `model.`: AutoModelForCausalLM saves them with it, --verbatim takes them as they are"
        raise SourceError(f"{where}: {len(missing)} tensors are missing: {_some(missing)}", hint if bare else "")
    rest = [(place, key) for place, tensors in fragments.items() for key in tensors if key not in used[place]]
    unknown = [
        f"{key} in {fragments[place][key].path}"
        for place, key in rest
        if not any(re.fullmatch(drop, key) for drop in drops)
    ]
    if unknown:
        raise SourceError(
            f"{where}: {len(unknown)} tensors have no place in this model: {_some(unknown)}",
            "a layer that predicts further tokens is in no table: --drop mtp leaves it out, --verbatim carries it, in "
            "Hugging Face and FSDP"
            if any(SECOND.search(key) for key in unknown)
            else "the model may be of another family than its configuration says; `convert formats` lists the families",
        )
    return placed, [key for _, key in rest]


def _path(tensors: Mapping[str, Fragment], place: Place, where: Path) -> str:
    """The file in which a tensor was looked for."""
    return str(next(iter(tensors.values())).path) if tensors else str(where / place.file)


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - 5} more" if len(names) > 5 else ""
    return "; ".join(names[:5]) + more
