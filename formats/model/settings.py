"""The settings that the weights depend on, whatever framework wrote them: a line each, in a dataclass for each part.

    router_scale: float | None = choice(1.0)

A line defines all of a setting except its spellings, which are rows of a framework's table
(`huggingface/settings_table.py`, `megatron/args/table.py`), and its bounds beside other settings, which are rows of
`checks.py`. These rows, `--set` and the manifest use the name of the line; the type specifies the values that the
setting may have by itself (`values.py`). Only families whose `keys` name a `choice` have that setting: in other
families it is None, and the value in brackets holds in all their models.

A part is a declaration: only `ModelSpec` is ever instantiated, so parts get no methods that a dataclass generates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from shlex import quote
from typing import Any

from formats.errors import SourceError, UsageError, short
from formats.model.values import KINDS, ROTARY, SCALED


def choice(fixed: Any = None, *, needed: bool = True) -> Any:
    """A setting of some families only, its fixed value in others, and whether every model with the setting needs it."""
    return field(default=None, metadata={"fixed": fixed, "needed": needed})


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Decoder:
    """The sizes of a decoder.

    Attributes:
        layers: number of layers.
        hidden: size of the hidden state.
        heads: number of query heads of a layer.
        kv_heads: number of key/value heads of a layer, each for the same number of query heads.
        head_dim: number of elements of a head; with latents, of a value.
        ffn: number of elements inside an MLP; of an expert too, where the family has one width for both.
        vocab: number of tokens of the true vocabulary, without padding; None while unknown.
        max_positions: number of tokens of the longest sequence: rows of the position embedding where positions are
            learned, otherwise a limit.
        norm_epsilon: the number that is added to the variance in a norm.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int | None = None
    max_positions: int
    norm_epsilon: float


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Rope:
    """Rotary embeddings (transformers 5.23.0, modeling_rope_utils.py).

    Attributes:
        rope_theta: base of the rotary frequencies; None where nothing rotates.
        rope_scaling: `rope_type` and its parameters in the terms of Hugging Face; None for plain rotary embeddings.
        rotary_fraction: the part of a head that rotates, up to 1.
        nope_layers: the layers in which nothing rotates, counted from 0.
    """

    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rotary_fraction: float | None = choice(1.0)
    nope_layers: tuple[int, ...] | None = choice(())


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Window:
    """Sliding windows of attention.

    Attributes:
        sliding_window: number of tokens that a token attends to, itself included; None for all tokens before it.
        full_layers: the layers without the window, counted from 0.
    """

    sliding_window: int | None = None
    full_layers: tuple[int, ...] | None = choice(())


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Wiring:
    """How the tensors are used in the computation.

    Attributes:
        tied: whether the output head shares the embedding.
        parallel_residual: whether attention and MLP read the same residual; otherwise the MLP reads it after attention.
        activation: activation of an MLP, by its name in transformers (activations.py `ACT2FN`).
    """

    tied: bool
    parallel_residual: bool | None = choice()
    activation: str | None = choice()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Experts:
    """A mixture of experts (transformers 5.23.0, models/deepseek_v3/modeling_deepseek_v3.py has all of it).

    Attributes:
        experts: number of experts of a layer.
        top_k: number of experts that a token is routed to: those of the highest scores in the best groups.
        expert_ffn: number of elements inside an expert.
        expert_latent: number of elements of the latent that experts work on; None without a latent.
        shared_ffn: number of elements inside the shared experts, which get all tokens.
        dense_layers: the layers that have one MLP for all tokens instead, counted from 0.
        router_normalized: whether the weights of the outputs of a token's experts add up to 1.
        router_scale: factor of these weights, after normalization.
        router_groups: number of groups that the experts are divided into.
        router_top_groups: number of groups, the best ones, that a token's experts are chosen from.
    """

    experts: int | None = choice()
    top_k: int | None = choice()
    expert_ffn: int | None = choice()
    expert_latent: int | None = choice(needed=False)
    shared_ffn: int | None = choice()
    dense_layers: tuple[int, ...] | None = choice(())
    router_normalized: bool | None = choice(True)
    router_scale: float | None = choice(1.0)
    router_groups: int | None = choice(1)
    router_top_groups: int | None = choice(1)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Latent:
    """Attention with latents (transformers 5.23.0, models/deepseek_v2/modeling_deepseek_v2.py).

    Attributes:
        query_rank: number of elements of the latent of queries; None without such a latent.
        latent_rank: number of elements of the latent of keys and values.
        nope_dim: number of elements of a key that do not rotate.
        rope_dim: number of elements of a key that rotate.
    """

    query_rank: int | None = choice(needed=False)
    latent_rank: int | None = choice()
    nope_dim: int | None = choice()
    rope_dim: int | None = choice()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Indexer:
    """The indexer, which chooses the tokens that attention sees.

    Facts: transformers 5.23.0, models/glm_moe_dsa/modeling_glm_moe_dsa.py.

    Attributes:
        index_heads: number of heads of the indexer.
        index_dim: number of elements of such a head.
        index_top_k: number of tokens that the indexer chooses.
        shared_index_layers: the layers without an indexer, which use the choice of the indexer before them, counted
            from 0.
    """

    index_heads: int | None = choice()
    index_dim: int | None = choice()
    index_top_k: int | None = choice()
    shared_index_layers: tuple[int, ...] | None = choice(())


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Recurrent:
    """Linear attention by the gated delta rule (transformers 5.23.0, models/qwen3_next/modeling_qwen3_next.py).

    Attributes:
        recurrent_layers: the layers with linear attention, counted from 0.
        linear_key_heads: number of query and key heads of a layer.
        linear_value_heads: number of value heads of a layer; each key head has the same number of them.
        linear_key_dim: number of elements of a query or a key.
        linear_value_dim: number of elements of a value.
        linear_taps: number of tokens that the convolution before linear attention sees.
    """

    recurrent_layers: tuple[int, ...] | None = choice(())
    linear_key_heads: int | None = choice()
    linear_value_heads: int | None = choice()
    linear_key_dim: int | None = choice()
    linear_value_dim: int | None = choice()
    linear_taps: int | None = choice()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StateSpace:
    """Layers of other kinds: state spaces (Mamba2), short convolutions, an MLP alone.

    Facts: transformers 5.23.0, models/nemotron_h/modeling_nemotron_h.py, models/lfm2/modeling_lfm2.py.

    Attributes:
        state_layers: the layers with a state space in the place of attention, counted from 0.
        short_layers: the layers with a short convolution in the place of attention, counted from 0.
        mlp_layers: the layers that are an MLP, where a layer is either an MLP or a token mixer.
        state_heads: number of heads of a state space.
        state_groups: number of groups of a state space; each group has the same number of heads.
        state_dim: number of elements of a head.
        state_size: number of elements of the state for each element of a head.
        taps: number of tokens that a convolution sees.
    """

    state_layers: tuple[int, ...] | None = choice(())
    short_layers: tuple[int, ...] | None = choice(())
    mlp_layers: tuple[int, ...] | None = choice()
    state_heads: int | None = choice()
    state_groups: int | None = choice()
    state_dim: int | None = choice()
    state_size: int | None = choice()
    taps: int | None = choice()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Varied:
    """Settings in which some layers differ from the others, or that they have in addition.

    Facts: transformers 5.23.0, models/gemma4/modeling_gemma4.py, models/mimo_v2_flash/modeling_mimo_v2_flash.py,
    models/minimax_m3_vl/modeling_minimax_m3_vl.py.

    Attributes:
        value_head_dim: number of elements of a value, where keys have another number.
        window_kv_heads: number of key/value heads of layers with a sliding window, where other layers have another
            number.
        full_kv_heads: number of key/value heads of layers without a sliding window, likewise.
        full_head_dim: number of elements of a head in layers without a sliding window, likewise.
        keys_as_values: whether the values of layers without a sliding window are their keys.
        reusing_layers: the layers that use the keys and values of a layer before them, counted from 0.
        reusing_ffn: number of elements inside the MLP of reusing layers, where other layers have another number.
        block_layers: the layers whose attention sees blocks of keys that an indexer chooses, counted from 0.
        layer_width: number of elements of the input that each layer gets of its own; None without such an input.
        layer_vocab: number of tokens of the embedding that this input comes from.
    """

    value_head_dim: int | None = choice(needed=False)
    window_kv_heads: int | None = choice(needed=False)
    full_kv_heads: int | None = choice(needed=False)
    full_head_dim: int | None = choice(needed=False)
    keys_as_values: bool | None = choice(False)
    reusing_layers: tuple[int, ...] | None = choice(())
    reusing_ffn: int | None = choice(needed=False)
    block_layers: tuple[int, ...] | None = choice(())
    layer_width: int | None = choice(needed=False)
    layer_vocab: int | None = choice(needed=False)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Parts(Varied, StateSpace, Recurrent, Indexer, Latent, Experts, Wiring, Window, Rope, Decoder):
    """All settings, under their own names; dataclasses have the fields of the last base class first."""


TYPES = {part.name: str(part.type).removesuffix(" | None") for part in fields(Parts)}
"""Setting: its type, without None."""
FIXED = {part.name: part.metadata["fixed"] for part in fields(Parts) if "fixed" in part.metadata}
"""Setting that only some families have: the value that holds in the others; None where these have nothing like it."""
CHOICES = tuple(FIXED)
EVERY = tuple(name for name in TYPES if name not in FIXED)
"""The settings that every model has, or may have."""
NEEDED = tuple(part.name for part in fields(Parts) if part.metadata.get("needed", "None" not in str(part.type)))
"""The settings that have a value in every model that has them."""
LISTS = tuple(name for name, kind in TYPES.items() if kind == "tuple[int, ...]")
"""The settings that are lists of layers of the model."""
EXPERTS = tuple(part.name for part in fields(Experts))


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `--set NAME=VALUE`; a value is JSON, or `none`.

    Raises:
        UsageError: there is no such setting, the value is not JSON, or a setting is given twice.
    """
    parsed = dict[str, Any]()
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in TYPES:
            raise UsageError(f"--set {setting}: there is no setting {name!r}", f"settings: {', '.join(sorted(TYPES))}")
        if name in parsed:
            raise UsageError(f"--set {name} is given twice: {shown(parsed[name])}, then {text}", "give it once")
        try:
            parsed[name] = (
                None if text.lower() == "none" else json.loads(text.lower() if text in ("True", "False") else text)
            )
        except ValueError:
            raise UsageError(f"--set {setting}: {text!r} is not a JSON value") from None
        if parsed[name] is not None:
            _require_possible(name, parsed[name], setting)
    return parsed


MAP = "Mapping[str, Any]"
"""The type of a setting that is a map."""
WORDS = {
    "int": "a natural number above 0, as of a model", "float": "a finite number above 0", "bool": "true or false",
    "str": "a name", MAP: "a map of rotary settings with a rope_type, or none",
    "tuple[int, ...]": "a list of layers, from 0",
}  # fmt: skip
"""Type of a setting: what it has to be."""


def _require_possible(name: str, value: Any, setting: str) -> None:
    """A value that was set is possible by itself.

    Raises:
        UsageError: it is none of the setting's type.
    """
    kind = TYPES[name]
    try:
        if name not in LISTS:
            KINDS[kind](value, name, "--set")
        elif not (isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)):
            raise SourceError(name)
    except SourceError as error:
        if kind == MAP and isinstance(value, dict) and isinstance(value.get("rope_type"), str):
            raise UsageError(str(error)) from None
        hint = _spelled(name, value) if kind == MAP else ""
        raise UsageError(f"--set {setting}: {name} is {WORDS[kind]}, not {short(value)}", hint) from None
    if strange := sorted({*value} - {*ROTARY}) if kind == MAP else []:
        own = {"rope_theta": "rope_theta", "partial_rotary_factor": "rotary_fraction"}.get(strange[0])
        hint = f"--set {own}={shown(value[strange[0]])}" if own else f"known: {', '.join(sorted(ROTARY))}"
        raise UsageError(f"--set {name}: no rotary embedding has {short(strange[0])}", hint)
    if missing := [key for key in SCALED[value["rope_type"]] if key not in value] if kind == MAP and value else []:
        raise UsageError(f"--set {name}: no {value['rope_type']} without {missing[0]}", f"add {', '.join(missing)}")


def _spelled(name: str, value: Any) -> str:
    """How a map of rotary settings is set: with `rope_type`, which older configs call `type`."""
    spelled: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        spelled = {"rope_type": value["type"], **{key: of for key, of in value.items() if key != "type"}}
    return f"--set {quote(f'{name}={shown(spelled)}')}"


def corrected(where: str, settings: Mapping[str, Any]) -> str:
    """What to call a file in an error, and what was set that it says otherwise or not at all."""
    return " ".join([where, *(["with"] if settings else []), *(f"--set {n}={shown(v)}" for n, v in settings.items())])


def rope_way(scaling: Mapping[str, Any] | None, whose: str) -> str:
    """The option with which the user chooses a rope scaling, and in brackets who computes it."""
    value = f"'rope_scaling={json.dumps(dict(scaling))}'" if scaling else "rope_scaling=none"
    return f"--set {value} ({whose})"


def shown(value: Any) -> str:
    """A value as `--set` accepts it: `none`, `true`, JSON; text without quotes."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
