"""ModelSpec: the settings that the weights depend on, whatever framework wrote them, and what is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from formats.errors import short
from formats.families import family_named
from formats.layout.slots import Slot, slots
from formats.layout.table import DISTINGUISHED_KINDS, MTP, Rule, model_tensors
from formats.layout.tensors import TENSORS
from formats.model.settings import CHOICES, EVERY, FIXED, LISTS, Parts

MIXERS = {"recurrent_layers": "recurrent", "state_layers": "state", "short_layers": "short"}
"""Setting: the kind of the layers that it names, by their token mixer; all other layers have attention."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Parts):
    """The settings of a decoder, each under its own name (`settings.py`).

    Attributes:
        family: name of the model's family.
        own: the config keys of the family that no other format has.
        biases: the layout conditions in `BIASES` that hold, in a family whose config turns biases on or off.
        mtp_layers: number of layers that predict tokens after the next, which come after all other layers. No config
            specifies it.
        notes: which settings came from a documented default.
    """

    family: str
    own: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    mtp_layers: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __repr__(self) -> str:
        """The settings, without those that the family does not have; unfinished work is recognized by them."""
        pairs = ((attribute.name, getattr(self, attribute.name)) for attribute in fields(self) if attribute.repr)
        return f"ModelSpec({', '.join(f'{name}={value!r}' for name, value in pairs if value not in (None, (), {}))})"

    @property
    def conditions(self) -> frozenset[str]:
        """The layout conditions that follow from the settings."""
        residual = {None: set[str](), True: {"parallel"}, False: {"serial"}}[self.parallel_residual]
        plain = {"plain"} if "ungated" in self.traits else set()
        query = {"compressed" if self.query_rank else "uncompressed", "latent"} if self.latent_rank else {"direct"}
        predicting = {"predicting"} if self.mtp_layers else set()
        indexed = "indexed" if self.index_heads else "unindexed"
        gate = "query_gate" if "query_gate" in self.traits else "no_query_gate"
        experts = "narrow" if self.expert_latent else "wide"
        single = "whole" if self.mlp_layers is None else "single"
        return frozenset(
            {
                "tied" if self.tied else "untied",
                *residual,
                *plain,
                *query,
                gate,
                indexed,
                single,
                experts,
                *predicting,
                *({"fed"} if self.layer_width else ()),
                *self.biases,
            }
        )

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the model's family, which follow from its tensors."""
        return family_named(self.family).traits_with(self.biases)

    @property
    def sparse_layers(self) -> frozenset[int]:
        """The layers that have experts."""
        every = range(self.layers) if self.mlp_layers is None else self.mlp_layers
        return frozenset(every if self.experts else ()).difference(self.dense_layers or ())

    @cached_property
    def layer_kinds(self) -> tuple[frozenset[str], ...]:
        """The layout conditions in `KINDS` that hold in each layer.

        A layer that predicts a token after the next has attention, and has experts if the last other layer has them.
        """
        mixers = {name: set(getattr(self, name) or ()) for name in MIXERS}
        distinguished = DISTINGUISHED_KINDS & family_named(self.family).kinds
        sparse, mlps = self.sparse_layers, self.mlp_layers

        def of(layer: int) -> frozenset[str]:
            mixer = next((MIXERS[name] for name, layers in mixers.items() if layer in layers), "attention")
            mlp = "sparse" if layer in sparse else "dense"
            indexing = {"indexing"} if self.index_heads and layer not in (self.shared_index_layers or ()) else set()
            distinguished_kinds = self._apart(layer) & distinguished if distinguished else set()
            return frozenset(
                {mixer, mlp, *indexing, *distinguished_kinds} if mlps is None else {mlp if layer in mlps else mixer}
            )

        kinds = [of(layer) for layer in range(self.layers)]
        second = {"attention", "sparse" if self.layers - 1 in sparse else "dense", MTP}
        second |= {"indexing"} if self.index_heads else set()
        return (*kinds, *[frozenset(second)] * self.mtp_layers)

    def _apart(self, layer: int) -> set[str]:
        """The kinds of a layer that only some tables distinguish."""
        full, keyed = layer in (self.full_layers or ()), layer not in (self.reusing_layers or ())
        holds = {
            "blocks": layer in (self.block_layers or ()),
            "windowed": not full,
            "keyed": keyed,
            "valued": keyed and not (full and self.keys_as_values),
        }
        return {kind for kind, true in holds.items() if true}

    @property
    def layer_sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes in which each layer may differ from `sizes`; empty where all layers have the same sizes."""
        others = (self.window_kv_heads, self.full_kv_heads, self.full_head_dim, self.reusing_ffn)
        if not any(others):
            return ()

        def of(layer: int) -> dict[str, int]:
            full = layer in (self.full_layers or ())
            groups = (self.full_kv_heads if full else self.window_kv_heads) or self.kv_heads
            dim = (self.full_head_dim if full else None) or self.head_dim
            ffn = (self.reusing_ffn if layer in (self.reusing_layers or ()) else None) or self.ffn
            heads = {"group": groups, "head": self.heads // groups}
            return {**heads, "dim": self.value_head_dim or dim, "pair": dim // 2, "ffn": ffn}

        return tuple(map(of, range(len(self.layer_kinds))))

    @property
    def mixed(self) -> bool:
        """Whether layers are of several kinds, or could be in a similar model."""
        return self.mlp_layers is not None or len({*self.layer_kinds[: self.layers]}) > 1

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors of the model, in the order of its family's table."""
        kinds = frozenset[str]().union(*self.layer_kinds)
        return model_tensors(family_named(self.family).tensors, {*self.conditions, *kinds})

    def slots_in(
        self, table: Sequence[Rule], sizes: Mapping[str, int], conditions: Iterable[str] = (), **file: Any
    ) -> list[Slot]:
        """The physical tensors of a table: whole, of all layers and experts, unless `file` (for `slots`) differs."""
        kinds, experts = self.layer_kinds, list(enumerate(range(self.experts or 0)))
        whole = {"layers": enumerate(range(len(kinds))), "mesh": {}, "experts": experts, **file}
        holding = {*self.conditions, *conditions}
        made = slots(
            table, sizes, tensors=self.tensors, conditions=holding, kinds=kinds, layer_sizes=self.layer_sizes, **whole
        )
        return list(made)

    def sizes(self, padded_vocab: int | None = None) -> dict[str, int]:
        """The size of each axis; `padding` is the number of rows that a padded vocabulary adds."""
        vocab = self.vocab if self.vocab is not None else padded_vocab or 0
        rank, nope, rope = self.latent_rank or 0, self.nope_dim or 0, self.rope_dim or 0
        key_heads = self.linear_key_heads or 0
        return {
            "layer": self.layers, "hidden": self.hidden, "vocab": vocab, "padding": (padded_vocab or vocab) - vocab,
            "group": self.kv_heads, "head": self.heads // self.kv_heads, "dim": self.value_head_dim or self.head_dim,
            "unit": 1, "half": 2, "pair": self.head_dim // 2, "ffn": self.ffn, "position": self.max_positions,
            "expert": self.experts or 0, "expert_ffn": self.expert_ffn or self.ffn, "shared_ffn": self.shared_ffn or 0,
            "expert_latent": self.expert_latent or 0,
            "query_dim": nope + rope, "query_rank": self.query_rank or 0, "latent_rank": rank,
            "joint_dim": rank + rope, "up_dim": nope + self.head_dim,
            "joined": 2 * self.hidden,
            "index_head": self.index_heads or 0, "index_dim": self.index_dim or 0,
            "key_head": key_heads, "spread": (self.linear_value_heads or 0) // (key_heads or 1),
            "key_dim": self.linear_key_dim or 0, "value_dim": self.linear_value_dim or 0,
            "tap": self.linear_taps or self.taps or 0, "channel": self.hidden,
            "state_group": self.state_groups or 0, "share": (self.state_heads or 0) // (self.state_groups or 1),
            "state_dim": self.state_dim or 0, "state": self.state_size or 0,
            "channel_rank": self.linear_key_dim or 0, "every_layer": self.layers,
            "layer_width": self.layer_width or 0, "layer_vocab": self.layer_vocab or 0,
        }  # fmt: skip

    def boxes(self, padded_vocab: int | None = None) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Name, layer and shape of each logical tensor; in each layer a tensor is a tensor of its own."""
        sizes, table, kinds = self.sizes(padded_vocab), family_named(self.family).tensors, self.layer_kinds
        rules_of = {True: [rule for rule in table if MTP in rule.conditions]}
        rules_of[False] = [rule for rule in table if MTP not in rule.conditions]
        tensors_of = {own: set(model_tensors(rules_of[MTP in own], {*self.conditions, *own})) for own in {*kinds}}
        by_layer = [{**sizes, **own} for own in self.layer_sizes] or [sizes] * len(kinds)
        for tensor in self.tensors:
            first, *axes = TENSORS[tensor]
            if first == "layer":
                for layer in range(len(kinds)):
                    if tensor in tensors_of[kinds[layer]]:
                        yield tensor, layer, (1, *(by_layer[layer][axis] for axis in axes))
            else:
                yield tensor, None, tuple(sizes[axis] for axis in TENSORS[tensor])

    def settings(self) -> dict[str, Any]:
        """The settings by name, without those that are fixed for the family."""
        values = {name: getattr(self, name) for name in ("family", *EVERY, "own", "biases", "mtp_layers", *CHOICES)}
        lists = (*LISTS, *(["biases"] if self.biases else []))
        values |= {name: list(values[name]) for name in lists if values[name] is not None}  # as JSON reads it back
        return {
            name: value
            for name, value in values.items()
            if (value not in (None, {}, ()) or name not in (*CHOICES, "own", "biases"))
            and (value or name != "mtp_layers")
        }


@dataclass(frozen=True)
class Verbatim:
    """A model that no table describes: each tensor is a logical tensor of its own, under its own name.

    Attributes:
        family: model type in the model's config.
        shapes: the shape of each tensor by key, in the order of the model.
        tied: whether the output head shares the embedding.
        vocab: size of the true vocabulary, None if the config does not specify it.
        why: why no table describes the model.
        copies: key of the original tensor, by key of a further copy.
        remarks: how the names compare with those of the model that the training began with.
        under: description of the name under which each tensor is carried.
        transposed: the tensors whose last two dimensions are swapped, compared with the files of the Hub.
    """

    family: str
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    tied: bool
    vocab: int | None
    why: str = field(compare=False, repr=False)
    copies: Mapping[str, str] = field(default_factory=dict, compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    under: str = field(default="its own name", compare=False, repr=False)
    transposed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        return (f"every tensor is carried under {self.under}, no table checks the names: {self.why}", *self.remarks)

    def boxes(self, padded_vocab: int | None = None) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Name and shape of each tensor, with its dimensions in the order of the Hub's files."""
        del padded_vocab
        for key, shape in self.shapes.items():
            yield key, None, (*shape[:-2], shape[-1], shape[-2]) if key in self.transposed else shape

    def settings(self) -> dict[str, Any]:
        """The settings that a config and the weights have to agree on."""
        return {"family": self.family, "tied": self.tied, "vocab": self.vocab}


Spec = ModelSpec | Verbatim
"""The settings of a model."""

COMPARED_BY_NAMES = ("vocab", "tied", "mtp_layers")
"""Settings of a model that names and shapes of its tensors tell."""
OF_LENGTH = ("dynamic", "longrope", "yarn")
"""Kinds of rope scaling that may compute with `max_positions`, which elsewhere is a limit and computes nothing
(transformers 5.23.0, modeling_rope_utils.py)."""


def differences(one: Spec, other: Spec) -> list[str]:
    """The settings in which two models differ, as `name: one | other`."""
    if type(one) is not type(other):
        why = next(spec.why for spec in (one, other) if isinstance(spec, Verbatim))
        return [f"one is described by a table, the other is not: {why}"]
    ours, theirs = ({**spec.settings(), **spec.settings().get("own", {}), "own": None} for spec in (one, other))
    names = dict.fromkeys([*ours, *theirs])
    return [f"{name}: {ours.get(name)} | {theirs.get(name)}" for name in names if ours.get(name) != theirs.get(name)]


def idle_setting(spec: Spec, name: str, settings: Mapping[str, Any]) -> str:
    """Why one of the user's settings changes nothing in the model that was read with them; empty if it does.

    Names and shapes of tensors tell `COMPARED_BY_NAMES`, and a rope scaling has several spellings.
    """
    if isinstance(spec, Verbatim) or name in (*COMPARED_BY_NAMES, "rope_scaling"):
        return ""
    if name == "full_layers" and "layer_types" in spec.own:
        return f"layer_types of a {spec.family} says which layers have a window"
    value, known = settings[name], getattr(spec, name)
    known = FIXED.get(name) if known is None else known
    if name in LISTS:  # in any order
        value, known = (sorted({*(layers or ())}) for layers in (value, known))
    if known != value:
        fixed = name in CHOICES and name not in family_named(spec.family).keys
        return f"{name} is fixed for {spec.family}" if fixed else f"{name} of this {spec.family} is {short(known)}"
    everywhere = spec.full_layers is not None and len(spec.full_layers) == spec.layers
    if name == "full_layers" and value and spec.sliding_window is None:
        return "no layer has a window"
    return "all layers are in full_layers" if name == "sliding_window" and value and everywhere else ""


def class_tells(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether one of two models leaves a value of a key of the family's own to its class, and the other spells it."""
    return any((one.own[name] is None) != (other.own[name] is None) for name in one.own.keys() & other.own.keys())


def of_own(lines: Iterable[str], spec: ModelSpec) -> list[str]:
    """Those of the differences of two configs that are of a key of the family's own, wherever it is nested."""
    return [line for line in lines if not spec.own.keys().isdisjoint(line.partition(":")[0].split("."))]


def computing_differences(one: ModelSpec, other: ModelSpec) -> list[str]:
    """The differences of two models that change what is computed, and that no name or shape of a tensor tells."""
    idle = () if (one.rope_scaling or {}).get("rope_type") in OF_LENGTH else ("max_positions",)
    return [line for line in differences(one, other) if line.partition(":")[0] not in (*COMPARED_BY_NAMES, *idle)]
