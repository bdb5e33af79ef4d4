"""A LoRA as a model of its own: the two factors of each matrix that it changes, in the axes of the matrix.

    base_model.model. MODULE .lora_A.weight    query_lora_a: rank hidden
    base_model.model. MODULE .lora_B.weight    query_lora_b: (group head half pair) rank

Names and orders follow from the table of the base model's family. Where a format has one matrix of several tensors,
these may have one LoRA: then they share the factor of the input, `lora_a`, of which PEFT has one for each tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from formats.errors import UnsupportedError
from formats.families import family_named
from formats.layout.pattern import axes_of, parse, text_of
from formats.layout.slots import Replica, Slot
from formats.layout.slots import slots as slots_of
from formats.layout.table import Rule
from formats.layout.tensors import TENSORS
from formats.model.adapters import ROOT
from formats.model.spec import ModelSpec, Verbatim

A, B = "_lora_a", "_lora_b"
MATRICES = tuple(name.removesuffix(A) for name in TENSORS if name.endswith(A))
"""The logical tensors for which a LoRA has a layout."""
TOGETHER = (("query", "key", "value"), ("gate", "up"))
"""Groups of logical tensors that are one matrix in Megatron."""
ROWS = {"ffn": "(shard fold chunk)"}
"""Axis of a matrix's output: the axes of `lora_b` in its place."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec(Verbatim):
    """A LoRA of a model with a table.

    Attributes:
        base: the base model.
        rank: the rank r of all matrices.
        matrices: the logical tensors that the LoRA changes.
        shared: whether matrices that are one in Megatron share their `lora_a`.
        shards: number of tensor-parallel ranks over which the rows of an MLP are stored in halves; 0 where rows are in
            their order.
    """

    base: ModelSpec
    rank: int
    matrices: tuple[str, ...]
    shared: bool
    shards: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis."""
        shards, fold = (self.shards, 2) if self.shards else (1, 1)
        rows = {"shard": shards, "fold": fold, "chunk": self.base.ffn // (shards * fold)}
        return {**self.base.sizes(), **rows, "rank": self.rank}

    def owner(self, matrix: str) -> str:
        """The matrix whose name the `lora_a` of a matrix has."""
        sharing = next((group for group in TOGETHER if self.shared and matrix in group), (matrix,))
        return next(name for name in sharing if name in self.matrices)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors of the LoRA."""
        owned = [name + A for name in self.matrices if self.owner(name) == name]
        return (*owned, *(name + B for name in self.matrices))

    def slots_in(self, table: Sequence[Rule], *conditions: str) -> Iterator[Slot]:
        """The physical tensors of a table, whole."""
        base = self.base
        return slots_of(
            table, self.sizes, tensors=self.tensors, layers=enumerate(range(base.layers)), mesh={},
            conditions={*base.conditions, *conditions}, kinds=base.layer_kinds,
        )  # fmt: skip

    def boxes(self, padded_vocab: int | None = None) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Name, layer and shape of each logical tensor of the LoRA."""
        sizes, tensors = self.sizes, self.tensors
        for name, layer, _ in self.base.boxes(padded_vocab):
            for tensor in (name + A, name + B):
                if tensor in tensors:
                    yield tensor, layer, (1, *(sizes[axis] for axis in TENSORS[tensor][1:]))


def spec_of(base: ModelSpec, rank: int, matrices: tuple[str, ...], *, shared: bool, shards: int = 0) -> LoraSpec:
    """The spec of a LoRA."""
    return LoraSpec(
        family="peft", shapes={}, tied=False, vocab=None, why="it is an adapter", base=base, rank=rank,
        matrices=matrices, shared=shared, shards=shards,
    )  # fmt: skip


def modules(base: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The matrices of a model for which a LoRA has a layout: the logical tensors of each, by its key in the table."""
    return {
        rule.key: rule.pattern.tensors
        for rule in family_named(base.family).tensors
        if {*rule.pattern.tensors} <= {*MATRICES} & {*base.tensors} and rule.conditions.isdisjoint({"mtp"})
    }


def slots(spec: LoraSpec) -> list[Slot]:
    """The physical tensors of a LoRA under PEFT's names.

    Raises:
        UnsupportedError: the base model has a matrix of several tensors, whose `lora_a` would be different tensors.
    """
    base = spec.base
    known = modules(base)
    rules = [rule for rule in family_named(base.family).tensors if rule.key in known]
    rules = [rule for rule in rules if {*rule.pattern.tensors} <= {*spec.matrices}]
    lora_slots = spec.slots_in(list(chain.from_iterable(_factors(rule, spec) for rule in rules)), "separate")
    copies = Counter[tuple[str, int | None]]()
    numbered = []
    for slot in lora_slots:
        if "copy" in slot.rule.conditions:
            tensor = (slot.rule.pattern.text, slot.layer)
            copies[tensor] += 1  # 0 is the copy of an output head
            slot = slot._replace(replica=Replica(shared=True, number=copies[tensor]))  # noqa: PLW2901
        numbered.append(slot)
    return numbered


def _factors(rule: Rule, spec: LoraSpec) -> Iterator[Rule]:
    """The rules of the two factors of a matrix."""
    names = rule.pattern.tensors
    owners = {spec.owner(name) for name in names}
    if len(owners) > 1:
        raise UnsupportedError(
            f"{rule.key} of a {spec.base.family} is one matrix of {', '.join(names)}, whose LoRA has one lora_A",
            "--lora fused",
        )
    owner = owners.pop()
    inside = {*TENSORS[names[0] + A]} - {"layer", "rank"}
    given, out = sorted(rule.pattern.dims, key=lambda term: axes_of(term) != inside)
    module, copy = ROOT + rule.key.removesuffix(".weight"), set() if owner in names else {"copy"}
    yield Rule(
        f"{module}.lora_A.weight", parse(f"{owner}{A}: rank {text_of(given)}"), rule.conditions | frozenset(copy)
    )
    rows = text_of(out)
    if {"gate", "up"} & {*names}:
        rows = re.sub(r"\bffn\b", ROWS["ffn"], rows)
    label = f"{rule.pattern.label}: " if rule.pattern.label else ""
    text = re.sub(r"\b(\w+):", rf"\1{B}:", f"{label}{rows} rank")
    yield Rule(f"{module}.lora_B.weight", parse(text), rule.conditions)


def targets(spec: LoraSpec) -> list[str]:
    """The modules that a LoRA changes, as `target_modules` of PEFT: ends of their names that no other module has."""
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for key, names in modules(spec.base).items():
        by_kind[{*names} <= {*spec.matrices}].append(key.removesuffix(".weight"))
    others = {key.rpartition(".")[2] for key in by_kind[False]}
    ends = (key.rsplit(".", 2 if key.rpartition(".")[2] in others else 1) for key in by_kind[True])
    return [*dict.fromkeys(".".join(parts[1:]) for parts in ends)]
