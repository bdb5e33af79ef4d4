"""What a family is: its tables, and the settings it leaves open or fixes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from formats.layout.table import BIASES, KINDS, Rule, rules

FAMILY_FILE = "family.toml"
"""Beside a config.json: the family of the user's own that the model was converted with."""


SIGNS = {
    "qkv_bias": {"query_bias"},
    "output_bias": {"output_bias"},
    "mlp_bias": {"down_bias", "expert_down_bias"},
    "qk_norm": {"query_norm"},
    "layer_norm": {"final_norm_bias"},
    "learned": {"positions"},
    "sinks": {"sinks"},
    "latent": {"latent_down"},
    "indexed": {"index_query"},
    "recurrent": {"linear_decay"},
    "query_gate": {"query_gate"},
    "state": {"state_decay"},
    "moe": {"router"},
    "router_bias": {"router_bias"},
    "shared_experts": {"shared_up"},
    "shared_router": {"shared_router"},
}
"""Trait of a model: the logical tensors of which any is the sign of it."""
TRAITS = (*SIGNS, "ungated", "every_bias", "centred", "sigmoid", "index_pairs")
"""All traits; the last are an MLP without a gate, biases in every linear layer, norms whose weights are stored minus 1,
a router whose scores are those of a sigmoid, and an indexer that rotates neighbours."""


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: `model_type` of its config.json, unless that is given apart.
        architecture: its class in transformers.
        table: the layout of its Hugging Face files; `tensors` are its rules.
        drops: regular expressions of keys in those files that carry no weights.
        requires: config keys that must have one value, or be absent.
        model_type: that of the config, where several families have it.
        in_memory: whether its files have the names in memory, as its class has no others; only a whole has the Hub's.
        marks: the config keys and values that tell it from the others of them.
        blocks: kinds of layers, in a pattern or in a list, of which its config has one, and those of the others none.
        rope_theta: what transformers assumes when the config names none; None where nothing rotates, or
            where its rotary settings are of each kind of layers and in `own`.
        head_dim: the same for the head dimension; None for hidden size / heads.
        ffn_ratio: the same for the size of the MLP, in hidden sizes; 0 where the config has to name it.
        mha: whether `__post_init__` of its config takes as many key/value heads as heads; a fixed number is in `defaults`.
        linear: the class of its linear layers where it is not torch's `nn.Linear`, the only one that transformers replaces
            where weights are quantized (5.23.0, integrations/finegrained_fp8.py `replace_with_fp8_linear`).
        square: whether its output projection is `hidden` by `hidden` whatever `head_dim` says: heads have to fill that.
        nulls: config keys in which null means something for it and not for every family (`huggingface/nulls.py`).
        centred: whether the weights of its norms are stored minus 1; Megatron has such LayerNorms.
        general: whether a model is taken for one of it where nothing tells it from those of other families.
        window: the config key of its sliding window, if it has one, and what transformers assumes.
        keys: setting: config key, where the family has one of its own; empty where it has none, every head being alike.
        defaults: setting: what transformers assumes where its key is absent: of a key of `keys`, or of the usual one. Where
            `keys` says that key/value heads have none, how many all its models have, if not as many as heads.
        biases: config keys that turn biases on: the conditions of layout that then hold, and what transformers assumes.
        own: config keys that change what the model computes and that no other format has, and what transformers
            assumes (None where that depends on others). A family with such keys has an `only_here`, but for GPT-OSS.
        only_here: why Megatron cannot hold the model; empty where it can.
        router: how a mixture of experts makes weights of the router's scores: `softmax` or `sigmoid`.
        full_until: the config key that says how many layers have full attention where `layer_types` does not, and what
            transformers assumes; the model may not have more. No key: none has.
        tokens: the ids above ten of special tokens that transformers assumes and can do without, by config key.
        switch: the config key that turns a sliding window on, false where it is absent, in a family of which only models
            without a window are supported; `window_default` and `full_until` then say which these are.
        neox: the kind of GPT-NeoX's models that compute the same (`deepspeed/neox/settings_table.py`); empty where none do.
        native: the layouts under names that trainers have of their own, by trainer (`formats/fsdp/native.py`).
        file: the file of the user's that it was read from.
    """

    name: str
    architecture: str
    table: str
    drops: tuple[str, ...] = ()
    requires: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    marks: Mapping[str, Any] = field(default_factory=dict)
    in_memory: bool = False
    blocks: tuple[str, ...] = ()
    rope_theta: float | None = 10000.0
    head_dim: int | None = None
    ffn_ratio: int = 0
    mha: bool = False
    linear: str = ""
    square: bool = False
    nulls: tuple[str, ...] = ()
    centred: bool = False
    general: bool = False
    window: str = ""
    window_default: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    only_here: str = ""
    router: str = ""
    full_until: tuple[str, int] | None = None
    switch: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    neox: str = ""
    native: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = field(default=None, compare=False)

    @cached_property
    def tensors(self) -> tuple[Rule, ...]:
        """The rules of its table, parsed when they are first used."""
        return rules(self.table)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of layers that its table tells apart."""
        return frozenset().union(*(rule.conditions for rule in self.tensors)) & KINDS

    @cached_property
    def holds(self) -> frozenset[str]:
        """The logical tensors that its models can have, without biases of which it leaves the choice."""
        return self._held(frozenset())

    def _held(self, biases: Collection[str]) -> frozenset[str]:
        rules = (rule for rule in self.tensors if rule.conditions & BIASES <= set(biases))
        return frozenset(name for rule in rules for name in rule.pattern.tensors)

    def biases_of(self, flags: Mapping[str, bool]) -> tuple[str, ...]:
        """The conditions of layout that hold for a model with these values of the keys of `biases`."""
        names_of = (names for key, (names, usual) in self.biases.items() if flags.get(key, usual))
        return tuple(sorted(name for names in names_of for name in names.split()))

    @cached_property
    def traits(self) -> frozenset[str]:
        """What its tensors tell of its models, without biases of which it leaves the choice."""
        return self.traits_with(frozenset())

    def traits_with(self, biases: Collection[str]) -> frozenset[str]:
        """What its tensors tell of its models with such biases."""
        tensors_held = self._held(biases)
        traits = {trait for trait, tensors in SIGNS.items() if tensors & tensors_held}
        others = {
            "ungated": not {"gate", "expert_gate"} & tensors_held,
            "every_bias": traits >= BIASES,
            "centred": self.centred,
            "sigmoid": self.router == "sigmoid",
            "index_pairs": self.requires.get("indexer_rope_interleave", False),
        }
        return frozenset(traits | {trait for trait, there in others.items() if there})

    def bias_choices(self) -> Iterator[tuple[str, ...]]:
        """The conditions of layout that its config can turn on, each choice of them."""
        for values in product((False, True), repeat=len(self.biases)):
            yield self.biases_of(dict(zip(self.biases, values, strict=True)))

    @cached_property
    def choices(self) -> frozenset[str]:
        """The settings and config keys in which its models differ, and those of others need not."""
        return frozenset({*self.keys, *self.own, *(("sliding_window",) if self.window else ())})
