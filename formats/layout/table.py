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
    "untied": "only when the output head has a weight of its own",
    "parallel": "only when attention and MLP read the same residual",
    "serial": "only when the MLP comes after attention",
    "mha": "only when every head has its own key and value",
    "gqa": "only when several heads share a key and a value",
    "grouped": "only when the queries of each group are before its key and value, as in GPT-NeoX before November 2024",
    "blocked": "only when all queries of a rank are before all its keys, and all its keys before all its values",
    "qkv_bias": "only when query, key and value have biases, in a family whose config turns them on",
    "output_bias": "only when the output projection of attention has a bias, in a family whose config turns it on",
    "mlp_bias": "only when the MLP has biases, in a family whose config turns them on",
    "plain": "only when the MLP has no gate",
    "query_gate": "only when the output of attention is multiplied by a gate",
    "no_query_gate": "only when the output of attention is not multiplied by a gate",
    "direct": "only when keys and values are projections of the hidden state",
    "latent": "only when keys and values are projections of a latent (multi-latent attention)",
    "compressed": "only when queries are projections of a latent",
    "uncompressed": "only when queries are projections of the hidden state",
    "attention": "only in layers with attention",
    "recurrent": "only in layers with linear attention, which pass a state from token to token",
    "state": "only in layers with a state space (Mamba2)",
    "short": "only in layers with a short convolution",
    "indexing": "only in layers whose attention has an indexer of its own",
    "indexed": "only when an indexer chooses the tokens that attention sees",
    "unindexed": "only when the model has no indexer",
    "blocks": "only in layers whose attention sees blocks of keys that an indexer chooses",
    "windowed": "only in layers with a sliding window",
    "keyed": "only in layers with keys of their own",
    "valued": "only in layers with values of their own, which are not the keys",
    "fed": "only when each layer has an input embedding of its own",
    "mtp": "only in layers that predict a token after the next",
    "whole": "only when each layer has a token mixer (such as attention) and an MLP",
    "single": "only when each layer is either a token mixer or an MLP",
    "dense": "only in layers with one MLP for all tokens",
    "sparse": "only in layers with experts",
    "wide": "only when experts read the hidden state",
    "narrow": "only when experts read a latent, which is smaller than the hidden state",
    "predicting": "only when the model has layers that predict tokens after the next",
    "fused": "only when gate and up, or all experts, are one tensor, or when names are those of transformers in memory",
    "separate": "only when gate and up, and each expert, are tensors of their own, or when names are those of the Hub",
    "centred": "stored minus 1; other formats store the tensor itself",
    "raised": "stored plus 1; other formats store the tensor itself",
    "rooted": "stored divided by the root by which attention scores are divided; other formats store the tensor itself",
    "scaled": "stored times the square root of the hidden size; other formats store the tensor itself",
    "copy": "a copy of a tensor that another file holds",
    "partial": "a summand: the tensor is the sum of the tensors of all ranks",
    "optional": "may be absent",
}
CENTRED = "centred"
ALWAYS = {CENTRED, "raised", "rooted", "scaled", "copy", "partial", "optional"}
"""Conditions that describe a tensor, and do not specify when the tensor exists."""
BIASES = {"qkv_bias", "output_bias", "mlp_bias"}
"""Conditions that a key of config.json turns on in some families."""
MTP = "mtp"
"""The kind of layers that predict tokens after the next, which are numbered after all other layers. A rule holds in
these layers or in the others, never in both."""
DISTINGUISHED_KINDS = {"blocks", "windowed", "keyed", "valued"}
"""Kinds of layers that only some tables distinguish."""
KINDS = {"attention", "recurrent", "state", "short", "indexing", "dense", "sparse", MTP} | DISTINGUISHED_KINDS
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
