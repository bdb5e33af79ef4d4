"""ModelSpec: the settings that the weights depend on, whatever framework wrote them.

Each framework's spelling is a table in a file of its own: `huggingface/config.py`, `megatron/args/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from formats.errors import SourceError, UnsupportedError, UsageError, short
from formats.families import family_named
from formats.layout.table import KINDS, model_tensors
from formats.layout.tensors import TENSORS

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "max_positions")
"""The settings that are natural numbers, all of them required."""


EXPERTS: Mapping[str, Any] = {
    "experts": None,
    "top_k": None,
    "expert_ffn": None,
    "shared_ffn": None,
    "dense_layers": (),
    "router_normalized": True,
    "router_scale": 1.0,
    "router_groups": 1,
    "router_top_groups": 1,
}
"""The settings of a mixture of experts: what holds in a family that leaves no choice."""
FIXED: Mapping[str, Any] = {"rotary_fraction": 1.0, "nope_layers": (), "full_layers": (), **EXPERTS}
"""The same of these and of rotary embeddings and windows."""
LATENT = ("query_rank", "latent_rank", "nope_dim", "rope_dim")
"""The settings of an attention with latents."""
LISTS = ("dense_layers", "nope_layers", "full_layers")
"""The settings that are some layers of the model."""
CHOICES = ("rotary_fraction", "nope_layers", "full_layers", "parallel_residual", "activation", *EXPERTS, *LATENT)
"""The settings that only some families have."""


@dataclass(frozen=True)
class ModelSpec:
    """The settings of a decoder, whatever framework wrote it.

    `vocab` is the true vocabulary, None while unknown; `rope_theta` is None where nothing rotates; `rope_scaling` is in
    Hugging Face's terms (`rope_type` and its parameters), None for plain rotary embeddings; `sliding_window` counts the
    tokens that a token sees, itself included. `own` are the config keys of the family that no other format has;
    `biases` are the conditions of layout that hold, of those that the family leaves the choice of.
    `rotary_fraction` (the part of a head that rotates), `nope_layers` (in which nothing does), `full_layers` (which no
    sliding window holds for), `parallel_residual` and `activation` are None where the family leaves no choice. `notes`
    say which settings came from a documented default.

    So are those of an attention with latents: `query_rank` (None where queries have none) and `latent_rank` are their
    widths, `nope_dim` and `rope_dim` the parts of a key that rotate not, and do; `head_dim` is then the value's.

    So are those of a mixture of experts. A token goes to the `top_k` experts of the highest scores, out of the
    `router_top_groups` best of `router_groups`; the weights of their outputs add up to 1 if `router_normalized`, and
    are multiplied by `router_scale`. `expert_ffn` and `shared_ffn` are the widths of an expert and of what is shared;
    `dense_layers` have one MLP for all tokens instead.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int | None
    max_positions: int
    norm_epsilon: float
    rope_theta: float | None
    rope_scaling: Mapping[str, Any] | None
    sliding_window: int | None
    tied: bool
    own: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    rotary_fraction: float | None = None
    nope_layers: tuple[int, ...] | None = None
    full_layers: tuple[int, ...] | None = None
    parallel_residual: bool | None = None
    activation: str | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    dense_layers: tuple[int, ...] | None = None
    router_normalized: bool | None = None
    router_scale: float | None = None
    router_groups: int | None = None
    router_top_groups: int | None = None
    query_rank: int | None = None
    latent_rank: int | None = None
    nope_dim: int | None = None
    rope_dim: int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def conditions(self) -> frozenset[str]:
        """The layout conditions that follow from the settings."""
        residual = {None: set[str](), True: {"parallel"}, False: {"serial"}}[self.parallel_residual]
        plain = {"plain"} if "ungated" in self.traits else set()
        query = {"compressed" if self.query_rank else "uncompressed", "latent"} if self.latent_rank else {"direct"}
        return frozenset({"tied" if self.tied else "untied", *residual, *plain, *query, *self.biases})

    @property
    def traits(self) -> frozenset[str]:
        """What the tensors of its family tell of it."""
        return family_named(self.family).traits_with(self.biases)

    @property
    def sparse_layers(self) -> frozenset[int]:
        """The layers that have experts."""
        return frozenset(range(self.layers if self.experts else 0)).difference(self.dense_layers or ())

    @property
    def mixed(self) -> bool:
        """Whether some layers have experts and others not."""
        return 0 < len(self.sparse_layers) < self.layers

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors of the model, in the order of its family's table."""
        kinds = {"sparse"} if self.sparse_layers else set()
        kinds |= {"dense"} if len(self.sparse_layers) < self.layers else set()
        return model_tensors(family_named(self.family).tensors, {*self.conditions, *kinds})

    def sizes(self, padded_vocab: int | None = None) -> dict[str, int]:
        """The size of each axis; `padding` is what a padded vocabulary adds."""
        vocab = self.vocab if self.vocab is not None else padded_vocab or 0
        rank, nope, rope = self.latent_rank or 0, self.nope_dim or 0, self.rope_dim or 0
        return {
            "layer": self.layers, "hidden": self.hidden, "vocab": vocab, "padding": (padded_vocab or vocab) - vocab,
            "group": self.kv_heads, "head": self.heads // self.kv_heads, "dim": self.head_dim,
            "half": 2, "pair": self.head_dim // 2, "ffn": self.ffn, "position": self.max_positions,
            "expert": self.experts or 0, "expert_ffn": self.expert_ffn or self.ffn, "shared_ffn": self.shared_ffn or 0,
            "query_dim": nope + rope, "query_rank": self.query_rank or 0, "latent_rank": rank,
            "joint_dim": rank + rope, "up_dim": nope + self.head_dim,
        }  # fmt: skip

    def boxes(self, padded_vocab: int | None = None) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Name, layer and shape of each logical tensor; a layer is a tensor of its own."""
        sizes, table, sparse = self.sizes(padded_vocab), family_named(self.family).tensors, self.sparse_layers
        held = {kind: set(model_tensors(table, {*self.conditions, kind})) for kind in KINDS}
        for tensor in self.tensors:
            first, *axes = TENSORS[tensor]
            if first == "layer":
                for layer in range(self.layers):
                    if tensor in held["sparse" if layer in sparse else "dense"]:
                        yield tensor, layer, (1, *(sizes[axis] for axis in axes))
            else:
                yield tensor, None, tuple(sizes[axis] for axis in TENSORS[tensor])

    def settings(self) -> dict[str, Any]:
        """The settings by name, without those in which the family leaves no choice."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        lists = (*LISTS, *(["biases"] if self.biases else []))
        values |= {name: list(values[name]) for name in lists if values[name] is not None}  # as JSON reads it back
        return {
            name: value
            for name, value in values.items()
            if value not in (None, {}, ()) or name not in (*CHOICES, "own", "biases")
        }


@dataclass(frozen=True)
class Verbatim:
    """A model that no table describes: each tensor is a logical tensor of its own, under its own name.

    Attributes:
        family: what its config calls it.
        shapes: the shape of each tensor by key, in the order of the model.
        tied: whether the output head shares the embedding.
        vocab: the true vocabulary, None when its config does not say.
        why: why no table describes it.
        copies: keys of further copies of a tensor, and the key of the one that counts.
        remarks: how the names compare with those of the model that the training began with.
    """

    family: str
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    tied: bool
    vocab: int | None
    why: str = field(compare=False)
    copies: Mapping[str, str] = field(default_factory=dict, compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        return (f"every tensor is carried under its own name, no table checks the names: {self.why}", *self.remarks)

    def boxes(self, padded_vocab: int | None = None) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Name and shape of each tensor."""
        del padded_vocab
        return ((key, None, shape) for key, shape in self.shapes.items())

    def settings(self) -> dict[str, Any]:
        """What a config and the weights have to agree on."""
        return {"family": self.family, "tied": self.tied, "vocab": self.vocab}


Spec = ModelSpec | Verbatim
"""The settings of a model."""


def differences(one: Spec, other: Spec) -> list[str]:
    """The settings in which two models differ, as `name: one | other`."""
    if type(one) is not type(other):
        return [f"one is described by a table, the other is not: {one.notes[-1:] or other.notes[-1:]}"]
    ours, theirs = one.settings(), other.settings()
    names = dict.fromkeys([*ours, *theirs])
    return [f"{name}: {ours.get(name)} | {theirs.get(name)}" for name in names if ours.get(name) != theirs.get(name)]


MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000
MOST = 2**31
"""Larger sizes are no model: they would only exhaust memory."""
LARGEST = 1e30
"""No setting that is a fraction is as large."""


def whole(value: Any, name: str, where: str, most: int = MOST) -> int:
    """A size: a natural number above 0.

    Raises:
        SourceError: it is missing or no such number; the message names the flag that supplies it.
    """
    if value is None:
        raise SourceError(f"{where} does not say {name}, and there is no safe default", f"add --set {name}=VALUE")
    if type(value) is not int or not 0 < value <= most:
        raise SourceError(f"{where} says {name} = {short(value)}", f"correct it with --set {name}=VALUE")
    return value


def real(value: Any, name: str, where: str) -> float:
    """A finite number above 0. Raises as `whole` does."""
    if value is None:
        raise SourceError(f"{where} does not say {name}, and there is no safe default", f"add --set {name}=VALUE")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LARGEST or not 0 < float(value) < LARGEST:  # float(10**30) is above 10**30
        raise SourceError(f"{where} says {name} = {short(value)}", f"correct it with --set {name}=VALUE")
    return float(value)


def checked(values: Mapping[str, Any], where: str) -> ModelSpec:
    """Build a spec from found values; each must be there and make sense.

    Raises:
        SourceError: one is missing, or makes no sense; the message names the flag that supplies it.
        UnsupportedError: they make a model that has no layout here.
    """
    sizes: dict[str, Any] = {name: whole(values.get(name), name, where) for name in SIZES}
    for name in ("vocab", "sliding_window"):
        if values.get(name) is not None:
            whole(values[name], name, where)
    optional: dict[str, Any] = {name: values.get(name) for name in ("vocab", "sliding_window", *CHOICES)}
    if not isinstance(values.get("tied"), bool):
        said = "does not say tied" if values.get("tied") is None else f"says tied = {short(values['tied'])}"
        raise SourceError(f"{where} {said}, and there is no safe default", "add --set tied=true or tied=false")
    scaling: Any = values.get("rope_scaling")
    if scaling is not None and not _is_scaling(scaling):
        raise SourceError(f"{where} says rope_scaling = {short(scaling)}", "correct it with --set rope_scaling=none")
    optional |= layers_of(values, where)
    spec = ModelSpec(
        **sizes,
        **optional,
        family=values["family"],
        norm_epsilon=real(values.get("norm_epsilon"), "norm_epsilon", where),
        rope_theta=values.get("rope_theta"),
        rope_scaling=scaling,
        tied=values["tied"],
        own=values.get("own", {}),
        biases=tuple(values.get("biases", ())),
        notes=values.get("notes", ()),
    )
    whole(spec.layers, "layers", where, MOST_LAYERS)
    family = family_named(spec.family)
    if family.rope_theta is not None:
        spec = replace(spec, rope_theta=real(spec.rope_theta, "rope_theta", where))
    elif spec.rope_theta is not None or spec.rope_scaling is not None:
        raise UnsupportedError(f"{where}: a {spec.family} has no rotary embedding")
    if spec.heads % spec.kv_heads:
        raise SourceError(f"{where}: {spec.heads} heads do not divide into {spec.kv_heads} key/value groups")
    if family.keys.get("kv_heads") == "" and spec.kv_heads != family.defaults.get("kv_heads", spec.heads):
        raise UnsupportedError(
            f"{where}: a {spec.family} with {spec.heads} heads has no {spec.kv_heads} key/value groups"
        )
    if family.keys.get("head_dim") == "" and spec.head_dim * spec.heads != spec.hidden:
        raise UnsupportedError(
            f"{where}: the heads of a {spec.family} have hidden / heads = {spec.hidden / spec.heads:g} elements, not "
            f"{spec.head_dim}"
        )
    if spec.sliding_window is not None and not family.window:
        raise UnsupportedError(f"{where}: a {spec.family} has no sliding window")
    foreign = [name for name in CHOICES if values.get(name) is not None and name not in family.keys]
    if foreign:
        raise UnsupportedError(f"{where}: a {spec.family} leaves no choice of {foreign[0]}")
    if spec.full_layers is not None and spec.sliding_window is None and len(spec.full_layers) < spec.layers:
        raise SourceError(f"{where} has layers with a sliding window, and does not say how wide it is")
    fraction = spec.rotary_fraction
    if fraction is not None and real(fraction, "rotary_fraction", where) > 1:
        raise SourceError(f"{where} says rotary_fraction = {fraction}", "correct it with --set rotary_fraction=VALUE")
    if "moe" in family.traits:
        _check_experts(spec, where)
    if "latent" in family.traits:
        _check_latent(spec, where)
    if spec.head_dim % 2:
        raise UnsupportedError(f"{where}: a head dimension of {spec.head_dim} is odd, and no table here has such heads")
    return spec


def some_layers(count: Any) -> range:
    """So many layers, as far as that is a number of layers: `checked` refuses what is none."""
    return range(count if type(count) is int and 0 < count <= MOST_LAYERS else 0)


def layers_of(values: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...] | None]:
    """The settings of `LISTS`, in the order of the layers, each once.

    Raises:
        SourceError: one names no layers of the model.
    """
    numbers, layers = some_layers(values.get("layers")), dict[str, tuple[int, ...] | None]()
    for name in LISTS:
        value = values.get(name)
        if value is not None and not (
            isinstance(value, list | tuple) and all(type(layer) is int and layer in numbers for layer in value)
        ):
            raise SourceError(f"{where} says {name} = {short(value)}, these are no layers of {len(numbers)}")
        layers[name] = None if value is None else tuple(sorted(set(value)))
    return layers


def _check_experts(spec: ModelSpec, where: str) -> None:
    """The settings of a mixture of experts are there and make sense.

    Raises:
        SourceError: they are not.
    """
    keys = {"experts", "top_k", *family_named(spec.family).keys} & {*EXPERTS} - {"dense_layers", "router_normalized"}
    for name in sorted(keys):
        (real if name == "router_scale" else whole)(getattr(spec, name), name, where)
    if "router_normalized" in family_named(spec.family).keys and not isinstance(spec.router_normalized, bool):
        raise SourceError(f"{where} says router_normalized = {short(spec.router_normalized)}")
    experts, top_k, groups = spec.experts or 0, spec.top_k or 0, spec.router_groups or 1
    if not spec.sparse_layers:
        raise UnsupportedError(f"{where}: none of {spec.layers} layers has experts, that is no {spec.family}")
    if experts * spec.layers > MOST_EXPERTS:
        raise SourceError(f"{where}: {experts} experts in each of {spec.layers} layers are no model")
    if top_k > experts or experts % groups or (spec.router_top_groups or 1) > groups:
        raise SourceError(
            f"{where}: {top_k} of {experts} experts in {spec.router_top_groups or 1} of {groups} groups make no router"
        )


def _check_latent(spec: ModelSpec, where: str) -> None:
    """The settings of an attention with latents are there and make sense.

    Raises:
        SourceError: one is missing.
        UnsupportedError: heads share keys, or nothing can be turned by halves.
    """
    for name in LATENT:
        if name != "query_rank" or spec.query_rank is not None:
            whole(getattr(spec, name), name, where)
    if spec.kv_heads != spec.heads or (spec.rope_dim or 0) % 2:
        raise UnsupportedError(
            f"{where}: {spec.heads} heads in {spec.kv_heads} groups, of which {spec.rope_dim} elements rotate, are not "
            "supported with latents"
        )


def _is_scaling(value: Any) -> bool:
    """Whether a value is a map of rotary settings with a type."""
    if not isinstance(value, dict) or len(value) > 50 or not isinstance(value.get("rope_type"), str):
        return False
    kinds = (str, int, float, list, type(None))
    return all(isinstance(name, str) and isinstance(one, kinds) for name, one in value.items())


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `--set NAME=VALUE`; a value is JSON, or `none`.

    Raises:
        UsageError: no such setting, or no such value.
    """
    names = {one.name for one in fields(ModelSpec)} - {"family", "own", "biases", "notes"}
    parsed = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in names:
            raise UsageError(f"--set {setting}: there is no setting {name!r}", f"settings: {', '.join(sorted(names))}")
        try:
            parsed[name] = (
                None if text.lower() == "none" else json.loads(text.lower() if text in ("True", "False") else text)
            )
        except ValueError:
            raise UsageError(f"--set {setting}: {text!r} is no JSON value") from None
    return parsed
