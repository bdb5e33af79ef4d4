"""Layouts: tables of rules that specify which physical tensors a checkpoint has, and what is in them.

A rule is a line: a key, a pattern, and the conditions under which it holds.

    decoder.layers.{layer}.mlp.linear_fc1.weight    (gate: ffn/tp | up: ffn/tp) hidden
    output_layer.weight                             (head: vocab | ~padding)/tp hidden     last

Columns are separated by two or more spaces. `{layer}` and `{expert}` are coordinates in the key, as is `{depth}`, which
counts the layers that predict tokens after the next. `{a|b}` are spellings: a reader takes the spelling that the file
has, and a writer the one that it is given. A rule holds when the model has every tensor that its pattern names, and the
conditions of the rule hold in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from formats.layout.pattern import Pattern, parse
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
    "rooted": "stored divided by the root of the head dimension, while elsewhere the tensor is stored itself",
    "copy": "a copy of a tensor that another file holds",
    "partial": "a summand: the tensor is the sum of what all ranks hold",
    "optional": "may be absent",
}
ALWAYS = {"centred", "rooted", "copy", "partial", "optional"}
"""Conditions that describe a tensor, and do not specify when the tensor exists."""
BIASES = {"qkv_bias", "output_bias", "mlp_bias"}
"""Conditions that a key of config.json turns on in some families."""
MTP = "mtp"
"""The kind of layers that predict tokens after the next, which are numbered after all other layers. A rule holds in
these layers or in the others, never in both."""
TOLD_APART = {"blocks", "windowed", "keyed", "valued"}
"""Kinds of layers that only some tables distinguish."""
KINDS = {"attention", "recurrent", "state", "short", "indexing", "dense", "sparse", MTP} | TOLD_APART
"""Conditions that hold in some layers of a model, and not in others. The ones that hold in a layer are its kinds."""


@dataclass(frozen=True)
class Rule:
    """One line of a layout table."""

    key: str
    pattern: Pattern
    conditions: frozenset[str]

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """The key templates that a reader accepts, with `{layer}` and `{expert}` not replaced."""
        parts = re.split(r"\{((?:[^{}]|\{\w+\})*\|(?:[^{}]|\{\w+\})*)\}", self.key)
        choices = [[part] if i % 2 == 0 else part.split("|") for i, part in enumerate(parts)]
        return tuple("".join(choice) for choice in product(*choices))

    @cached_property
    def of_expert(self) -> bool:
        """Whether the key contains the number of an expert."""
        return "{expert}" in self.key

    @cached_property
    def splits(self) -> frozenset[str]:
        """The mesh axes over which the tensor, or the experts of its key, are split."""
        return self.pattern.meshes | ({"ep"} if self.of_expert else frozenset())

    @cached_property
    def over_experts(self) -> bool:
        """Whether the tensor's mesh is that of tensors that are split over experts."""
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


def model_tensors(table: Sequence[Rule], conditions: Iterable[str]) -> tuple[str, ...]:
    """The logical tensors that a table defines, in the order of the table."""
    holds = set(conditions) | {"optional", "partial", "separate"}
    names = [name for rule in table if rule.conditions <= holds for name in rule.pattern.tensors]
    return tuple(dict.fromkeys(names))
