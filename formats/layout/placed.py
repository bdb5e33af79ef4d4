"""Placed tensors: slots of a layout, each paired with its tensor in a file; tensors that do not fit are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.safetensors import Fragment
from formats.errors import SourceError, count
from formats.layout.columns import Columns, Cut
from formats.layout.leaves import Leaf
from formats.layout.pattern import Pattern
from formats.layout.ranks import Files, Ranks
from formats.layout.slots import Layout, Place, Replica, Slot, ranks_again
from formats.layout.table import MTP, Rule

SECOND = re.compile(r"\.layers\.\d+\.(?:enorm|hnorm|eh_proj)\.|^(?:model\.)?mtp\.")
"""Matches keys of layers that predict a token after the next, in DeepSeek-V3 and its descendants, and in Qwen."""

SHOWN = 5
"""Tensors that an error names."""


class Placed(NamedTuple):
    """A physical tensor of a checkpoint, or a part of such a tensor, found (or to be written) under `key`.

    With `columns` this is all pieces of a tensor, and `fragment` stands for the whole tensor. With `files` this is a
    tensor of each of some ranks, at the same place in each rank's file; `slot` and `fragment` are of the first rank.
    """

    key: str
    slot: Slot
    fragment: Fragment
    part: Cut | None = None
    columns: Columns | None = None
    files: Files | None = None

    @property
    def fragments(self) -> int:
        """Number of fragments."""
        return len(self.columns or (self.files and self.files.ranks) or (self,))

    def each(self) -> Iterator[Placed]:
        """Each piece, or each rank's tensor, as a placed tensor of its own."""
        if self.columns is not None:
            for part, fragment in self.columns:
                yield Placed(self.key, self.slot, fragment, part)
        elif self.files is not None:
            yield from map(self.on, range(len(self.files.ranks)))
        else:
            yield self

    def on(self, rank: int) -> Placed:
        """The tensor of one of the ranks, by the rank's number among them."""
        assert self.files is not None
        slot, ranks = self.slot, self.files.ranks
        mesh, replica, expert = self.kind.on(ranks, rank)
        place = Place(self.files.places[rank], slot.place.chunk)
        slot = slot._replace(place=place, mesh=mesh, replica=replica, expert=expert)
        return Placed(self.key, slot, self.fragment._replace(path=self.files.paths[rank]))

    @property
    def kind(self) -> Kind:
        """Everything except the layer that the copies of the tensor, and the leaves of each, are computed from."""
        slot = self.slot
        return Kind(slot.rule, self.layout, slot.replica, slot.expert, self.files.ranks if self.files else None)

    @property
    def layout(self) -> Layout:
        """Everything except layer and expert that the leaves are computed from.

        Raises:
            SourceError: the tensor is an interval of elements that are not contiguous.
        """
        slot, fragment, flat = self.slot, self.fragment, self.part is not None and self.part.flat
        if self.columns is not None:
            return Layout(slot.rule.pattern, slot.sizes, slot.mesh, boxes=self.columns.boxes)
        if flat and not fragment.row_major and prod(fragment.shape) > 1:
            raise SourceError(f"{fragment.path} holds {self.key} in a flat piece with gaps: strides {fragment.strides}")
        strides = None if fragment.row_major else fragment.strides
        return Layout(slot.rule.pattern, slot.sizes, slot.mesh, strides, self.part)

    def leaves(self) -> list[Leaf]:
        """The leaves of the tensor, where it is no columns. Raises what `layout` raises."""
        assert self.columns is None
        return [self.slot.in_order(leaf) for leaves in self.layout.lowered() for leaf in leaves]


class Kind(NamedTuple):
    """Everything except the layer that the copies of a tensor, and the leaves of each, are computed from."""

    rule: Rule
    layout: Layout
    replica: Replica
    expert: int | None
    ranks: Ranks | None

    def on(self, ranks: Ranks, rank: int) -> tuple[tuple[tuple[str, tuple[int, int]], ...], Replica, int | None]:
        """Mesh, replica and expert of the tensor of one of some ranks."""
        mesh = ranks.meshes[rank][self.rule.over_experts]
        expert = None if self.expert is None else self.expert - ranks.experts[0] + ranks.experts[rank]
        return mesh, self.replica._replace(ranks=ranks_again(self.rule, mesh)), expert

    def each(self) -> Iterator[tuple[Layout, Replica, int | None]]:
        """Layout, replica and expert of each rank's tensor, or of the single tensor."""
        if self.ranks is None:
            yield self.layout, self.replica, self.expert
            return
        for rank in range(len(self.ranks)):
            mesh, replica, expert = self.on(self.ranks, rank)
            yield self.layout._replace(mesh=mesh), replica, expert


@dataclass(frozen=True)
class OnRank(Sequence[Placed]):
    """The tensors of one of some ranks whose files have the same tensors; each is made when it is asked for."""

    tensors: tuple[Placed, ...]
    rank: int

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        """The tensor at an index; slices are not supported."""
        return self.tensors[index].on(self.rank)


def files_of(tensors: Iterable[Placed]) -> dict[Path, None]:
    """The files of physical tensors, without duplicates, in order."""
    files: dict[Path, None] = {}
    for placed in tensors:
        files |= dict.fromkeys([placed.fragment.path] if placed.columns is None else placed.columns.files)
    return files


def match(
    slots: Iterable[Slot], fragments: Mapping[Place, Mapping[str, Fragment]], drops: Sequence[str], where: Path
) -> tuple[list[Placed], list[str]]:
    """Pair the physical tensors that a layout expects with the tensors in the files.

    Args:
        slots: the slots of the layout.
        fragments: the fragments of tensors of each place, by key.
        drops: regular expressions of keys that carry no weights.
        where: path of the checkpoint, for errors.

    Returns:
        The pairs, and the keys that a rule dropped. A tied tensor that only its copy's name is there for is paired with
        the copy (`named_as_copies`).

    Raises:
        SourceError: a tensor is missing, left over, or has another shape; the message lists names and files.
    """
    placed: list[Placed] = []
    missing: list[Slot] = []
    bare = False
    used: dict[Place, set[str]] = {place: set() for place in fragments}
    for slot in slots:
        tensors = fragments.get(slot.place, {})
        keys = [key for key in slot.keys if key in tensors]
        if len(keys) > 1:
            raise SourceError(f"{tensors[keys[0]].path} holds the same tensor twice: {' and '.join(keys)}")
        if not keys:
            if "optional" not in slot.rule.conditions:
                missing.append(slot)
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
    missing = _without_tied(missing, placed)
    if missing:
        hint = "the names lack `model.`: AutoModelForCausalLM saves them with it, --verbatim takes them as they are"
        lacking = count(len(missing), "tensor is", "tensors are")
        names = [
            f"{slot.keys[0]} {list(slot.shape)} in {_path(fragments.get(slot.place, {}), slot.place, where)}"
            for slot in missing[:SHOWN]
        ]
        raise SourceError(f"{where}: {lacking} missing: {_some(names, len(missing))}", hint if bare else "")
    rest = [(place, key) for place, tensors in fragments.items() for key in tensors if key not in used[place]]
    unknown = [
        f"{key} in {fragments[place][key].path}"
        for place, key in rest
        if not any(re.fullmatch(drop, key) for drop in drops)
    ]
    if unknown:
        amount = count(len(unknown), "tensor has", "tensors have")
        raise SourceError(
            f"{where}: {amount} no place in this model: {_some(unknown[:SHOWN], len(unknown))}",
            "a layer that predicts further tokens is in no table: --drop mtp leaves it out, --verbatim carries it, in "
            "Hugging Face and FSDP"
            if any(SECOND.search(key) for key in unknown)
            else "the model may be of another family than its configuration says; `convert formats` lists the families",
        )
    return placed, [key for _, key in rest]


def _without_tied(missing: Iterable[Slot], placed: list[Placed]) -> list[Slot]:
    """The missing slots except originals whose tied copy is in `placed`, where the copy then is the original.

    transformers 5.23.0 ties either way (modeling_utils.py `tie_weights`: it swaps the two names where the files hold
    only the copy), and safetensors 0.8 `save_model` keeps one name of a shared tensor, for tied heads `lm_head.weight`.
    """
    copies = {content_of(each.slot): index for index, each in enumerate(placed) if is_tied(each.slot)}
    still_missing = []
    for slot in missing:
        index = copies.pop(content_of(slot), None)
        if index is None:
            still_missing.append(slot)
        else:
            placed[index] = placed[index]._replace(slot=slot)
    return still_missing


def is_tied(slot: Slot) -> bool:
    """Whether transformers ties a tensor, which may be absent, to another: no copy in a layer that it leaves out."""
    return {"tied", "optional"} <= slot.rule.conditions and MTP not in slot.rule.conditions


def content_of(slot: Slot) -> tuple[Place, Pattern, int | None, int | None]:
    """What tells whether two slots of one checkpoint have the same content: place, pattern, layer and expert."""
    return slot.place, slot.rule.pattern, slot.layer, slot.expert


def named_as_copies(tensors: Iterable[Placed]) -> dict[str, str]:
    """The originals of tied tensors that have the name of the copy in the files: their own names by those."""
    return {placed.key: placed.slot.keys[0] for placed in tensors if placed.key not in placed.slot.keys}


def _path(tensors: Mapping[str, Fragment], place: Place, where: Path) -> str:
    """The path of the file in which a tensor was expected, or of the folder if several files could have it."""
    paths = {fragment.path for fragment in tensors.values()}
    return str(paths.pop() if len(paths) == 1 else where / place.file)


def _some(names: Sequence[str], of: int) -> str:
    return "; ".join(names) + (f", and {of - SHOWN} more" if of > SHOWN else "")
