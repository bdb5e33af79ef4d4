"""A LoRA as a model of its own: the two factors of each matrix that it changes, in the axes of the matrix.

    base_model.model. MODULE .lora_A.weight    query_lora_a: rank hidden
    base_model.model. MODULE .lora_B.weight    query_lora_b: (group head half pair) rank
    …mlp.experts.base_layer.lora_A.weight      expert_gate_lora_a: (expert expert_rank) hidden           of gate_up_proj
    …mlp.experts.base_layer.lora_B.weight      (expert_gate_lora_b: expert_ffn | …) (expert_rank expert)
    …mlp.experts.lora_A.weight                 expert_down_lora_a: (expert expert_rank) expert_ffn       of down_proj

Names and orders follow from the table of the base model's family, under the names that transformers has in memory: the
experts of a layer are parameters of one module there, each in a wrapper around that of the parameter before it. Where a
format has one matrix of several tensors, these may have one LoRA: then they share the factor of the input, `lora_a`, of
which PEFT has one for each module or parameter.

Facts: peft 0.21.2 tuners/lora/layer.py `ParamWrapper`, tuners/tuners_utils.py `_inject_parameters`,
utils/transformers_weight_conversion.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

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
TOGETHER = (("query", "key", "value"), ("gate", "up"), ("shared_gate", "shared_up"), ("expert_gate", "expert_up"))
"""Groups of logical tensors that are one matrix in Megatron."""
OF_EXPERTS = frozenset(name for name in MATRICES if "expert" in TENSORS[name])
"""The matrices of which each expert has its own: those of a group have one `lora_a`, in PEFT and in Megatron."""
ROWS = {"ffn": "(shard fold chunk)", "shared_ffn": "(shard fold shared_chunk)"}
"""Axis of a matrix's output: the axes of `lora_b` in its place."""
AS_EXPERTS = {"gate", "up", "down", "shared_gate", "shared_up", "shared_down"}
"""Matrices whose modules PEFT takes for experts by their names, in a model with experts (peft 0.21.2
utils/transformers_weight_conversion.py): there `target_modules` cannot name them, and `target_parameters` names their
weights."""
ALONE_FIRST = "take the adapter with --adapter only, then convert merge"
"""The hint where an adapter is to be merged that a checkpoint holds without its base."""
WRAPPED = ".base_layer"
"""The end of a place in PEFT's names that is inside the wrapper of another parameter of the module."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec(Verbatim):
    """A LoRA of a model with a table.

    Attributes:
        base: the base model.
        rank: the rank r of all matrices but those of experts.
        expert_rank: the rank of the matrices of experts; 0 if the LoRA changes none.
        matrices: the logical tensors that the LoRA changes.
        shared: whether matrices that are one in Megatron share their `lora_a`.
        shards: number of tensor-parallel ranks over which the rows of an MLP are stored in halves; 0 where rows are in
            their order.
    """

    base: ModelSpec
    rank: int
    matrices: tuple[str, ...]
    shared: bool
    expert_rank: int = 0
    shards: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis."""
        shards, fold = (self.shards, 2) if self.shards else (1, 1)
        base = self.base.sizes()
        rows = {"shard": shards, "fold": fold, "chunk": base["ffn"] // (shards * fold),
                "shared_chunk": base["shared_ffn"] // (shards * fold)}  # fmt: skip
        return {**base, **rows, "rank": self.rank, "expert_rank": self.expert_rank}

    def owner(self, matrix: str) -> str:
        """The matrix whose name the `lora_a` of a matrix has."""
        alone = not self.shared and matrix not in OF_EXPERTS
        sharing = next((group for group in TOGETHER if matrix in group and not alone), (matrix,))
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


def spec_of(
    base: ModelSpec, rank: int, matrices: tuple[str, ...], *, shared: bool, expert_rank: int = 0, shards: int = 0
) -> LoraSpec:
    """The spec of a LoRA."""
    return LoraSpec(
        family="peft", shapes={}, tied=False, vocab=None, why="it is an adapter", base=base, rank=rank,
        matrices=matrices, shared=shared, expert_rank=expert_rank, shards=shards,
    )  # fmt: skip


def _rules(base: ModelSpec) -> list[Rule]:
    """The rules of the matrices of a model for which a LoRA has a layout, under their names in memory."""
    others, known = {"mtp", "separate"}, {*MATRICES} & {*base.tensors}
    table = family_named(base.family).tensors
    return [rule for rule in table if {*rule.pattern.tensors} <= known and rule.conditions.isdisjoint(others)]


def modules(base: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The matrices of a model for which a LoRA has a layout: the logical tensors of each, by its key in memory."""
    return {rule.key: rule.pattern.tensors for rule in _rules(base)}


def slots(spec: LoraSpec) -> list[Slot]:
    """The physical tensors of a LoRA under PEFT's names.

    Raises:
        UnsupportedError: the base model has a matrix of several tensors, whose `lora_a` would be different tensors.
    """
    rules = [rule for rule in _rules(spec.base) if {*rule.pattern.tensors} <= {*spec.matrices}]
    keys = [rule.key for rule in rules]
    lora_slots = spec.slots_in(
        [*chain.from_iterable(_factors(rule, _place(rule.key, keys), spec) for rule in rules)], "fused"
    )
    copies = Counter[tuple[str, int | None]]()
    numbered = []
    for slot in lora_slots:
        if "copy" in slot.rule.conditions:
            tensor = (slot.rule.pattern.text, slot.layer)
            copies[tensor] += 1  # 0 is the copy of an output head
            slot = slot._replace(replica=Replica(shared=True, number=copies[tensor]))  # noqa: PLW2901
        numbered.append(slot)
    return numbered


def _place(key: str, keys: Sequence[str]) -> str:
    """The place of the LoRA of a matrix in PEFT's names: its module, or the wrapper of a parameter of its module.

    Args:
        key: the key of the matrix.
        keys: the keys of all matrices that have a LoRA, in the order in which their module has them.
    """
    module, _, parameter = key.rpartition(".")
    siblings = [other for other in keys if other.rpartition(".")[0] == module]
    outside = 0 if parameter == "weight" else len(siblings) - 1 - siblings.index(key)
    return ROOT + module + WRAPPED * outside


def _factors(rule: Rule, place: str, spec: LoraSpec) -> Iterator[Rule]:
    """The rules of the two factors of a matrix, at a place in PEFT's names."""
    names = rule.pattern.tensors
    owners = {spec.owner(name) for name in names}
    if len(owners) > 1:
        raise UnsupportedError(
            f"{rule.key} of a {spec.base.family} is one matrix of {', '.join(names)}, whose LoRA has one lora_A",
            "--lora fused",
        )
    owner = owners.pop()
    inside = {*TENSORS[names[0] + A]} - {"layer", "rank", "expert", "expert_rank"}
    dims = (term for term in rule.pattern.dims if axes_of(term) != {"expert"})
    given, out = sorted(dims, key=lambda term: axes_of(term) != inside)
    ranks = ("(expert expert_rank)", "(expert_rank expert)") if {*names} <= OF_EXPERTS else ("rank", "rank")
    copy = set[str]() if owner in names else {"copy"}
    yield Rule(
        f"{place}.lora_A.weight", parse(f"{owner}{A}: {ranks[0]} {text_of(given)}"), rule.conditions | frozenset(copy)
    )
    rows = text_of(out)
    divided = next((axis for axis in ROWS if axis in axes_of(out)), "")
    if divided:
        rows = re.sub(rf"\b{divided}\b", ROWS[divided], rows)
    label = f"{rule.pattern.label}: " if rule.pattern.label else ""
    text = re.sub(r"\b(\w+):", rf"\1{B}:", f"{label}{rows} {ranks[1]}")
    yield Rule(f"{place}.lora_B.weight", parse(text), rule.conditions)


def targets(spec: LoraSpec) -> dict[str, Any]:
    """The settings of PEFT that name what a LoRA changes, and the ranks of experts where these are others.

    `target_modules` has ends of the modules' names that no other module has, `target_parameters` all that follows the
    number of the layer.
    """
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    parameters = dict[str, bool]()
    for key, names in modules(spec.base).items():
        changed = {*names} <= {*spec.matrices}
        if changed and (not key.endswith(".weight") or (spec.base.experts and {*names} <= AS_EXPERTS)):
            parameters[key.partition("{layer}.")[2]] = {*names} <= OF_EXPERTS
        else:
            by_kind[changed].append(key.removesuffix(".weight"))
    others = {key.rpartition(".")[2] for key in by_kind[False]}
    ends = (key.rsplit(".", 2 if key.rpartition(".")[2] in others else 1) for key in by_kind[True])
    settings: dict[str, Any] = {"target_modules": [*dict.fromkeys(".".join(parts[1:]) for parts in ends)]}
    if parameters:  # for which PEFT has no dropout
        settings |= {"target_parameters": [*parameters], "lora_dropout": 0.0}
    if spec.expert_rank not in (0, spec.rank):
        settings["rank_pattern"] = {re.escape(name): spec.expert_rank for name, of in parameters.items() if of}
    return settings
