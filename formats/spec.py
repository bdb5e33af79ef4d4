"""ModelSpec: the settings that the weights depend on, and how each framework spells them.

Two-column tables map each setting to a Hugging Face config key and to a Megatron argument. What has no column is
residue: it stays in the configuration file that travels with the weights. A setting that changes what a model computes
and has no counterpart is refused, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError
from formats.families import FAMILIES, Family, family_named
from formats.layout import model_tensors

# --- the tables ------------------------------------------------------------------------------------------------------

HUGGINGFACE = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Setting: config key. rope_theta, rope_scaling and sliding_window have rules of their own, below."""

MEGATRON = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn": "ffn_hidden_size",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "layernorm_epsilon norm_epsilon",
    "rope_theta": "rotary_base",
}
"""Setting: argument and its older spellings (megatron/training/arguments.py at 0.18 and at d98e8a64)."""

MEGATRON_ONLY = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "disable_bias_linear": (True,),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "multi_latent_attention": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "softmax_type": ("vanilla",),
    "no_rope_freq": (None,),
    "window_attn_skip_freq": (None,),
    "num_experts": (None,),
    "mtp_num_layers": (None, 0),
    "linear_attention_freq": (None,),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "is_hybrid_model": (False,),
    "use_mup": (False,),
}
"""Arguments that change what the model computes, and the values that have a Hugging Face counterpart here."""

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core fixes of the llama3 rope scaling (models/common/embeddings/rotary_pos_embedding.py, 0.16.1)."""


@dataclass(frozen=True)
class ModelSpec:
    """The settings of a decoder, whatever framework wrote it.

    `vocab` is the true vocabulary, None while unknown; `rope_scaling` is in Hugging Face's terms (`rope_type` and its
    parameters), None for plain rotary embeddings; `sliding_window` counts the tokens that a token sees, itself
    included. `notes` say which settings came from a documented default.
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
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    sliding_window: int | None
    tied: bool
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def conditions(self) -> frozenset[str]:
        """The layout conditions that follow from the settings."""
        return frozenset({"tied" if self.tied else "untied"})

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors of the model, in the order of its family's table."""
        return model_tensors(family_named(self.family).tensors, self.conditions)

    def sizes(self, padded_vocab: int | None = None) -> dict[str, int]:
        """The size of each axis; `padding` is what a padded vocabulary adds."""
        vocab = self.vocab if self.vocab is not None else padded_vocab or 0
        return {
            "layer": self.layers, "hidden": self.hidden, "vocab": vocab, "padding": (padded_vocab or vocab) - vocab,
            "group": self.kv_heads, "head": self.heads // self.kv_heads, "dim": self.head_dim,
            "half": 2, "pair": self.head_dim // 2, "ffn": self.ffn,
        }  # fmt: skip

    def differences(self, other: ModelSpec) -> list[str]:
        """The settings in which two models differ, as `name: this | other`."""
        return [
            f"{one.name}: {getattr(self, one.name)} | {getattr(other, one.name)}"
            for one in fields(self)
            if one.compare and getattr(self, one.name) != getattr(other, one.name)
        ]


def _checked(values: dict[str, Any], where: str) -> ModelSpec:
    """Build a spec from found values; each must be there and of its type."""
    kinds: dict[str, tuple[type, ...]] = {"norm_epsilon": (int, float), "rope_theta": (int, float), "tied": (bool,)}
    for name in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "max_positions",
        "norm_epsilon",
        "rope_theta",
        "tied",
    ):
        value = values.get(name)
        if value is None:
            raise SourceError(f"{where} does not say {name}, and there is no safe default", f"add --set {name}=VALUE")
        if isinstance(value, bool) != (name == "tied") or not isinstance(value, kinds.get(name, (int,))) or value < 0:
            raise SourceError(f"{where} says {name} = {value!r}", f"correct it with --set {name}=VALUE")
    for name in ("norm_epsilon", "rope_theta"):
        values[name] = float(values[name])
    spec = ModelSpec(**values)
    if not spec.layers or not spec.kv_heads or spec.heads % spec.kv_heads:
        raise SourceError(
            f"{where}: {spec.heads} heads in {spec.kv_heads} key/value groups over {spec.layers} layers make no model"
        )
    if spec.head_dim % 2:
        raise UnsupportedError(f"{where}: a head dimension of {spec.head_dim} is odd, so it cannot be rotary")
    return spec


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `--set NAME=VALUE`; a value is JSON, or `none`.

    Raises:
        UsageError: no such setting, or no such value.
    """
    names = {one.name for one in fields(ModelSpec)} - {"family", "notes"}
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


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def from_huggingface(config: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> ModelSpec:
    """Read a config.json of transformers 4 or 5.

    Args:
        config: the parsed file.
        settings: values that overrule it.
        where: what to call the file in an error.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
    """
    family = family_named(str(config.get("model_type")), where)
    for key in ("quantization_config", "text_config"):
        if config.get(key):
            raise UnsupportedError(f"{where}: models with a {key} are not supported")
    for key, only in family.requires.items():
        value = config.get(key, only)
        if value != only:
            raise UnsupportedError(f"{where}: {key} = {value!r} is not supported for {family.name}, only {only!r}")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise UnsupportedError(
            f"{where}: layers of type {', '.join(sorted(layer_types))} are not supported for {family.name}"
        )
    notes: list[str] = []

    def get(key: str, fallback: Any = None) -> Any:
        if config.get(key) is not None or fallback is None:
            return config.get(key)
        notes.append(f"{key} = {fallback} (not in {where}: the default of transformers for {family.name})")
        return fallback

    values: dict[str, Any] = {"family": family.name}
    values |= {name: config.get(key) for name, key in HUGGINGFACE.items()}
    heads, hidden = values["heads"], values["hidden"]
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        values["kv_heads"] = get("num_key_value_heads", heads)
        values["head_dim"] = config.get("head_dim") or (family.head_dim or hidden // heads)
    values["tied"] = get("tie_word_embeddings", False) or False
    values["rope_theta"], values["rope_scaling"] = _rope(config, family, get, where)
    values["sliding_window"] = None
    if family.window:
        values["sliding_window"] = config.get(family.window, family.window_default)
        if family.window not in config:
            notes.append(f"{family.window} = {family.window_default} (not in {where}: the default of transformers)")
    return _checked(values | {"notes": tuple(notes)} | dict(settings), where)


def _rope(config: Mapping[str, Any], family: Family, get: Any, where: str) -> tuple[Any, dict[str, Any] | None]:
    """rope_theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError(f"{where}: rotary settings that differ between layers are not supported")
    theta = parameters.pop("rope_theta", None) or get("rope_theta", family.rope_theta)
    old_type = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", old_type)
    if parameters.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedError(f"{where}: partial_rotary_factor is not supported for {family.name}")
    return theta, None if rope_type == "default" else {"rope_type": rope_type, **parameters}


def to_huggingface(spec: ModelSpec, base: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a spec: `base` with every setting that differs put in its place.

    With an empty base the spelling is that of transformers 4, which version 5 reads too.
    """
    family = family_named(spec.family)
    config = dict(base) or {"architectures": [family.architecture], "model_type": family.name, **family.requires}
    for name, key in HUGGINGFACE.items():
        if config.get(key) != getattr(spec, name):
            config[key] = getattr(spec, name)
    if family.window:
        config[family.window] = spec.sliding_window
    known = from_huggingface(config, {}, "the new config") if base else None
    if known is None or (known.rope_theta, known.rope_scaling) != (spec.rope_theta, spec.rope_scaling):
        if "rope_parameters" in config:
            config["rope_parameters"] = {
                "rope_theta": spec.rope_theta,
                **(spec.rope_scaling or {"rope_type": "default"}),
            }
        else:
            config["rope_theta"], config["rope_scaling"] = spec.rope_theta, spec.rope_scaling
    return config


# --- Megatron --------------------------------------------------------------------------------------------------------


def from_megatron(
    args: Mapping[str, Any], settings: Mapping[str, Any], base: ModelSpec | None, where: str
) -> ModelSpec:
    """Read the `args` of a Megatron checkpoint.

    Args:
        args: the attributes of the namespace.
        settings: values that overrule it.
        base: the spec of the Hugging Face config that travels with the checkpoint, if there is one.
        where: what to call the file in an error.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: args and config contradict each other.
    """
    for name, allowed in MEGATRON_ONLY.items():
        if (
            name in args
            and args[name] not in allowed
            and not (name == "position_embedding_type" and args.get("use_rotary_position_embeddings"))
        ):
            raise UnsupportedError(f"{where}: {name} = {args[name]!r} is not supported, only {allowed[0]!r}")
    values: dict[str, Any] = {}
    for setting, names in MEGATRON.items():
        values[setting] = next((args[name] for name in names.split() if args.get(name) is not None), None)
    if not args.get("group_query_attention") or values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    if values["head_dim"] is None and isinstance(values["hidden"], int) and values["heads"]:
        values["head_dim"] = values["hidden"] // values["heads"]
    untied = args.get("untie_embeddings_and_output_weights")
    values["tied"] = None if untied is None else not untied
    window = args.get("window_size")
    values["sliding_window"] = window[0] + 1 if window and window[0] >= 0 else None
    values["rope_scaling"] = _megatron_rope(args)
    values["vocab"] = base.vocab if base else args.get("vocab_size") or None
    values |= dict(settings)
    facts = (bool(args.get("add_qkv_bias")), bool(args.get("qk_layernorm")), values["sliding_window"] is not None)
    values["family"] = _family(facts, base, where)
    notes = []
    if base and values["max_positions"] != base.max_positions and "max_positions" not in settings:
        notes.append(
            f"max_positions = {base.max_positions} of the config is kept, {where} was run with {values['max_positions']}"
        )
        values["max_positions"] = base.max_positions
    spec = _checked(values | {"notes": tuple(notes)}, where)
    if base:
        differences = [line for line in spec.differences(base) if line.partition(":")[0] not in settings]
        if differences:
            raise RefusedError(
                f"{where} and the config that travels with it contradict each other (args | config): {'; '.join(differences)}",
                "decide with --set NAME=VALUE, or give the right config with --config",
            )
    return spec


def _megatron_rope(args: Mapping[str, Any]) -> dict[str, Any] | None:
    if args.get("use_rope_scaling"):
        return {"rope_type": "llama3", "factor": float(args.get("rope_scaling_factor") or 8.0), **LLAMA3_SCALING}
    if args.get("rotary_seq_len_interpolation_factor"):
        return {"rope_type": "linear", "factor": float(args["rotary_seq_len_interpolation_factor"])}
    return None


def _family(facts: tuple[bool, bool, bool], base: ModelSpec | None, where: str) -> str:
    """The family with these facts: (bias on query, key and value; norms on query and key; sliding window)."""
    fitting = [family.name for family in FAMILIES.values() if family.fits(*facts)]
    if base and base.family in fitting:
        return base.family
    if base:
        raise RefusedError(
            f"{where} describes a model like {' or '.join(fitting) or 'none known'}, its config a {base.family}"
        )
    if not fitting:
        raise UnsupportedError(
            f"{where}: no known family has this combination of biases, query/key norms and sliding window"
        )
    return fitting[0]


def to_megatron(spec: ModelSpec) -> dict[str, Any]:
    """The model settings of a Megatron namespace, with both spellings where two exist.

    Raises:
        RefusedError: Megatron has no such rotary embedding.
    """
    facts = family_named(spec.family)
    args: dict[str, Any] = {
        name: getattr(spec, setting) for setting, names in MEGATRON.items() for name in names.split()
    }
    args |= {name: allowed[0] for name, allowed in MEGATRON_ONLY.items()}
    args |= {
        "rotary_base": int(spec.rope_theta) if spec.rope_theta == int(spec.rope_theta) else spec.rope_theta,
        "group_query_attention": spec.kv_heads != spec.heads,
        "use_rotary_position_embeddings": False,
        "add_position_embedding": True,
        "untie_embeddings_and_output_weights": not spec.tied,
        "add_qkv_bias": facts.qkv_bias,
        "qk_layernorm": facts.qk_norm,
        "window_size": None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        "seq_length": spec.max_positions,
        "vocab_size": spec.vocab,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    }
    scaling = dict(spec.rope_scaling or {})
    match scaling.pop("rope_type", None):
        case None:
            pass
        case "llama3" if {name: scaling.get(name) for name in LLAMA3_SCALING} == LLAMA3_SCALING:
            args |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
        case "linear" if float(scaling["factor"]).is_integer():
            args["rotary_seq_len_interpolation_factor"] = int(scaling["factor"])
        case kind:
            raise RefusedError(
                f"Megatron has no rope scaling {kind} with {scaling}",
                f"it knows llama3 with {LLAMA3_SCALING}, and linear with a whole factor",
            )
    return args


def with_vocab(spec: ModelSpec, vocab: int) -> ModelSpec:
    """The same model with its true vocabulary named."""
    return replace(spec, vocab=vocab)
