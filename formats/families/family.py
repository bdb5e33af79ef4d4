"""The type `Family`: the table of a model family, and the settings that its models choose or have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from formats.layout.table import BIASES, KINDS, Rule, rules

FAMILY_FILE = "family.toml"
"""The file beside a config.json with the user's family that the model was converted with."""


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
"""Trait of a model: the logical tensors any of which shows that the model has the trait."""
TRAITS = (*SIGNS, "ungated", "every_bias", "centred", "sigmoid", "index_pairs")
"""All traits; the last five are an MLP without a gate, biases in every linear layer, norms whose weights are stored
minus 1, a router whose scores are those of a sigmoid, and an indexer that rotates adjacent elements."""


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: the name of the family: the `model_type` of its configs, unless the field `model_type` is set.
        architecture: the class of the models in transformers.
        hub_class: the class that configs of the Hub name, which comes with code of its own; empty where it is that of
            transformers.
        table: the layout of the Hugging Face files as text; `tensors` has its rules.
        drops: regular expressions of keys in those files that carry no weights.
        requires: config keys that have to have one value, or be absent.
        model_type: the `model_type` of the configs, where several families share it.
        in_memory: whether files have the names in memory, since the class has no others; only a multimodal model with
            this language model has the Hub's names.
        marks: the config keys and values that distinguish the family from others with the same `model_type`.
        blocks: kinds of layers, in a pattern or in a list: a config of the family has at least one of them, a config
            of others with the same `model_type` has none.
        rope_theta: the default of transformers for the rotary base; None where nothing rotates, or where each kind of
            layers has rotary settings, which are in `own`.
        scalings: the types of rope scaling that the config's class takes; empty if it takes all.
        head_dim: the default of transformers for the head dimension; None for hidden size / heads.
        ffn_ratio: the default width of the MLP, in hidden sizes; 0 where the config has to specify it.
        mha: whether `__post_init__` of the config takes as many key/value heads as heads by default; a fixed number is
            in `defaults`.
        linear: the class of the linear layers where it is not torch's `nn.Linear`, the only one that transformers
            replaces in quantized models (5.23.0, integrations/finegrained_fp8.py `replace_with_fp8_linear`).
        square: whether the output projection is `hidden` by `hidden` whatever `head_dim` is, so that heads * `head_dim`
            has to be `hidden`.
        divided: whether the config's class takes only a hidden size that is a multiple of the heads, whatever `head_dim`
            is (5.23.0, `validate_architecture`).
        nulls: config keys that may be null in this family, but not in every family (`huggingface/nulls.py`).
        centred: whether the weights of norms are stored minus 1; Megatron has such LayerNorms.
        general: whether a model that could be of several families is taken for one of this family.
        window: the config key of the sliding window, if the family has one.
        window_default: the default of transformers for the sliding window, in tokens.
        keys: setting: its config key, where the family has a key of its own; empty where the family has no key for it,
            and the value follows from other settings or is in `defaults`.
        defaults: setting: the default of transformers where its config key is absent. Where `keys` has no key for
            key/value heads, the number that all models have, if it is not the number of heads. Also
            `original_max_position_embeddings`, where the class has one beside its rotary settings.
        biases: config key that turns biases on: the conditions of layout that hold with it, and its default in
            transformers.
        own: config keys that change what the model computes and that no other format has: their defaults in
            transformers (None where these depend on other keys). A family with such keys has an `only_here`, except for
            GPT-OSS.
        only_here: why Megatron cannot hold the model; empty where it can.
        router: how a mixture of experts computes weights from the router's scores: `softmax` or `sigmoid`.
        full_until: the config key for the number of layers with full attention where there is no `layer_types`, and its
            default in transformers; the model may not have more layers. An empty key: no layer has full attention.
        copied: config key: the setting of which the config's class puts a copy there if the key is absent. The class of
            the model reads the copy, so that another value in it is no model.
        tokens: config key of a special token that transformers does not need: its default id there, if above ten.
        switch: the config key that turns a sliding window on, false where it is absent, in a family of which only
            models without a window are supported; `window_default` and `full_until` then tell which models these are.
        neox: the kind of GPT-NeoX's models that compute the same (`deepspeed/neox/settings_table.py`); empty for none.
        native: the layouts under tensor names that only trainers use, by trainer (`formats/fsdp/native.py`).
        elsewhere: where the class is, of which no release of transformers has one; empty where one has it.
        file: the user's file that the family was read from; None for a family of the project.
    """

    name: str
    architecture: str
    table: str
    drops: tuple[str, ...] = ()
    requires: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    hub_class: str = ""
    marks: Mapping[str, Any] = field(default_factory=dict)
    in_memory: bool = False
    blocks: tuple[str, ...] = ()
    rope_theta: float | None = 10000.0
    scalings: tuple[str, ...] = ()
    head_dim: int | None = None
    ffn_ratio: int = 0
    mha: bool = False
    linear: str = ""
    square: bool = False
    divided: bool = False
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
    copied: Mapping[str, str] = field(default_factory=dict)
    switch: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    neox: str = ""
    native: Mapping[str, str] = field(default_factory=dict)
    elsewhere: str = ""
    file: Path | None = field(default=None, compare=False)

    @cached_property
    def tensors(self) -> tuple[Rule, ...]:
        """The rules of the table, parsed when they are first used."""
        return rules(self.table)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of layers that the table distinguishes."""
        return frozenset().union(*(rule.conditions for rule in self.tensors)) & KINDS

    @cached_property
    def holds(self) -> frozenset[str]:
        """The logical tensors that models of the family can have, without the biases that config keys turn on."""
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
        """The traits of models of the family, without the biases that config keys turn on."""
        return self.traits_with(frozenset())

    def traits_with(self, biases: Collection[str]) -> frozenset[str]:
        """The traits of models of the family, with the biases of some conditions of layout."""
        tensors_held = self._held(biases)
        traits = {trait for trait, tensors in SIGNS.items() if tensors & tensors_held}
        others = {
            "ungated": not {"gate", "expert_gate"} & tensors_held,
            "every_bias": traits >= BIASES,
            "centred": self.centred,
            "sigmoid": self.router == "sigmoid",
            "index_pairs": self.requires.get("indexer_rope_interleave", False),
        }
        return frozenset(traits | {trait for trait, holds in others.items() if holds})

    def bias_choices(self) -> Iterator[tuple[str, ...]]:
        """Every combination of the conditions of layout that config keys can turn on."""
        for values in product((False, True), repeat=len(self.biases)):
            yield self.biases_of(dict(zip(self.biases, values, strict=True)))

    def takes(self, scaling: Mapping[str, Any] | None) -> bool:
        """Whether the config's class takes a rope scaling."""
        return not (scaling and self.scalings) or scaling.get("rope_type") in self.scalings

    @cached_property
    def choices(self) -> frozenset[str]:
        """The settings and config keys in which models of this family differ, and models of other families need not."""
        return frozenset({*self.keys, *self.own, *(("sliding_window",) if self.window else ())})
