"""Convert the yml configs of GPT-NeoX to the settings of a model, and back.

A key that changes what a model computes and has no counterpart is refused, never dropped. Facts: megatron/
neox_arguments/neox_args.py, megatron/model/transformer.py, activations.py and norms.py at ea7aefd8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from formats.deepspeed.neox.settings_table import CONDITIONS, FUSED, ROWS, WINDOW, attention_kinds, number, yarn_of
from formats.errors import SourceError, UnsupportedError, short
from formats.families import FAMILIES, family_named
from formats.model.checks import checked, lost_setting
from formats.model.codec import read, write
from formats.model.settings import corrected
from formats.model.spec import ModelSpec
from formats.model.values import positive_float, positive_int

DEFAULTS = {
    "rotary_emb_base": 10000, "no_weight_tying": False, "rms_norm_epsilon": 1e-8, "layernorm_epsilon": 1e-5,
    "rotary_pct": 1.0, "gpt_j_residual": False,
}  # fmt: skip
"""NeoX's default for an absent key."""
NORMS = {"rmsnorm": "rms", "te_rmsnorm": "rms", "layernorm": "layernorm", "te_layernorm": "layernorm"}
"""The condition of table rows by value of `norm`."""
POSITIONS = ("learned", "rotary")
"""Values of `pos_emb`, which are conditions of table rows too; the first is the default."""
NEOX_ONLY: Mapping[str, tuple[Any, ...]] = {
    "use_qk_layernorm": (False,),
    "gpt_j_tied": (False,),
    "num_experts": (1, 0, None),
    "moe_num_experts": (1, 0, None),
    "num_unique_layers": (None,),
    "use_mup": (False,),
    "te_mha": (False,),
    "te_fp8_mha": (False,),
    "te_layernorm_mlp": (False,),
    "soft_prompt_tuning": (None,),
    "output_layer_parallelism": ("column",),
    "train_impl": ("normal", "dpo", "kto", "reinforce"),
    "apply_residual_connection_post_layernorm": (False,),
    "geglu": (False,),
    "openai_gelu": (False,),
    "sparsity": ("none", None),
}
"""Keys that change what the model computes, and their values that have a Hugging Face counterpart; the first is the
default."""

BOOLEANS = (
    "no_weight_tying", "gpt_j_residual", "bias_gelu_fusion", "yarn", "use_bias_in_attn_linear", "use_bias_in_mlp",
)  # fmt: skip
GATED = {"llama": ("silu", "swish", "swiglu")}
"""The activations of a gated MLP, by `mlp_type`; of any other type it is `swiglu`."""
DENSE = ("global", "flash")
"""Values of attention_config with plain causal attention."""


def from_neox(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    ffn: int,
    biases: bool,
    vocab: int | None,
    where: str,
    family: Any = None,
) -> ModelSpec:
    """The spec of a model from its yml.

    Args:
        config: the merged yml.
        settings: values that overrule the yml.
        ffn: the inner size of the MLP, from the weights, since the yml does not determine it.
        biases: whether the checkpoint holds biases.
        vocab: the true vocabulary size; None if not known.
        where: what to call the yml in an error.
        family: the name of the family to choose if several compute the same: a Mistral without a window is a Llama.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no counterpart in transformers.
    """
    for name in BOOLEANS:
        if not isinstance(config.get(name, False), bool):
            raise SourceError(f"{where} says {name} = {short(config[name])}, which is neither true nor false")
    if config.get("gpt_j_residual", False) and not config.get("use_bias_in_mlp", True):
        raise UnsupportedError(
            f"{where}: gpt_j_residual = True with use_bias_in_mlp = False is not supported: without a bias NeoX leaves "
            "the attention out of every layer (transformer.py:1104-1113), which no class of transformers does"
        )
    for name, allowed in NEOX_ONLY.items():
        value = config.get(name, allowed[0])
        if value not in allowed or isinstance(value, bool) is not isinstance(allowed[0], bool):
            raise UnsupportedError(f"{where}: {name} = {short(value)} is not supported, only {allowed[0]!r}")
    norm = config.get("norm", "layernorm")
    if not isinstance(norm, str) or norm not in NORMS:
        raise UnsupportedError(f"{where}: norm = {short(norm)} is not supported, only {', '.join(NORMS)}")
    positions = config.get("pos_emb", POSITIONS[0])
    if positions not in POSITIONS:
        supported = " and ".join(POSITIONS)
        raise UnsupportedError(f"{where}: pos_emb = {short(positions)} is not supported, only {supported}")
    kind = _kind_of(config, {NORMS[norm], positions}, biases, where)
    spelled = {**DEFAULTS, **config} | ({WINDOW: None} if "sliding_window" in settings else {})
    heads = positive_int(config.get("num_attention_heads"), "heads", where)
    hidden = positive_int(config.get("hidden_size"), "hidden", where)
    known = {"ffn": ffn, "vocab": vocab, "head_dim": hidden // heads}
    values = read(ROWS, spelled, CONDITIONS[kind], where, known)
    values["family"] = _family(kind, bool(config.get(WINDOW)), family)
    _require_dense(config, where)
    spec = checked(values | dict(settings), corrected(where, settings))
    return replace(spec, notes=notes(spec, config, settings))


def notes(spec: ModelSpec, config: Mapping[str, Any], settings: Collection[str] = ()) -> tuple[str, ...]:
    """Notes on what transformers and GPT-NeoX, or two versions of it, compute or count otherwise.

    Facts: megatron/model/norms.py (`RMSNorm.forward`) before and at 4c9f1081.

    Args:
        spec: the model.
        config: the yml.
        settings: names of settings that the user has given.
    """
    window, found = spec.sliding_window, list[str]()
    if window is not None and "sliding_window" not in settings:
        found.append(
            f"sliding_window = {window} counts the token itself, {WINDOW} = {window - 1} of GPT-NeoX those before it"
        )
    if config.get("norm") == "rmsnorm" and not config.get("rmsnorm_fusion"):
        found.append(
            f"norm = rmsnorm: GPT-NeoX before 4c9f1081 (2025-05-09) divides by the root mean square plus "
            f"{spec.norm_epsilon:g}; since then, and in transformers, the {spec.norm_epsilon:g} is under the root"
        )
    return tuple(found)


def is_gated(config: Mapping[str, Any]) -> bool:
    """Whether the MLP is gated with a SiLU; before September 2024 `mlp_type` specified this, not `activation`."""
    return config.get("activation") in GATED.get(str(config.get("mlp_type")), ("swiglu",))


def _family(kind: str, windowed: bool, usual: Any) -> str:
    """The family of a model of a kind: the `usual` one if it fits, and one with a window only if the model has one."""
    fitting = [family for family in FAMILIES.values() if family.neox == kind]
    return min(
        fitting, key=lambda family: (windowed and not family.window, family.name != usual, bool(family.window))
    ).name


def _kind_of(config: Mapping[str, Any], conditions: Collection[str], biases: bool, where: str) -> str:
    """The kind of a model (a key of `CONDITIONS`) that has the norm, the positions and all other settings of a yml.

    Raises:
        UnsupportedError: no class of transformers computes the model.
    """
    activation, parallel = config.get("activation", "gelu"), config.get("gpt_j_residual", False)
    rotary = "rotary" in conditions
    fraction = positive_float(number(config.get("rotary_pct", 1.0)), "rotary_fraction", where) if rotary else 0.0
    grouped = config.get("num_kv_heads") not in (None, config.get("num_attention_heads"))
    plain_mlp = activation == "gelu" and config.get("mlp_type", "regular") == "regular"
    whole_layers = plain_mlp and biases and not grouped
    fitting = {
        "llama": is_gated(config) and not biases and not parallel and fraction == 1.0,
        "pythia": whole_layers and fraction <= 1,
        "gpt2": whole_layers and not parallel,
    }
    for kind, fits in fitting.items():
        if fits and CONDITIONS[kind] >= {*conditions}:
            return kind
    positions = f"rotary_pct {short(fraction)}" if rotary else "learned positions"
    facts = f"activation {short(activation)}, {positions}, gpt_j_residual {short(parallel)}"
    *classes, last = (family.architecture for family in FAMILIES.values() if family.neox)
    raise UnsupportedError(
        f"{where}: transformers has no class with norm {config.get('norm', 'layernorm')}, {facts}, "
        f"{'biases' if biases else 'no biases'}{', grouped queries' if grouped else ''}",
        f"supported: what {', '.join(classes)} or {last} compute",
    )


def _require_dense(config: Mapping[str, Any], where: str) -> None:
    """Refuse a yml in which a layer has no plain causal attention.

    Raises:
        UnsupportedError: a layer has another kind of attention.
        SourceError: attention_config is no list of layers.
    """
    for kind in attention_kinds(config.get("attention_config"), where) - {*DENSE}:
        raise UnsupportedError(f"{where}: attention of the kind {kind} is not supported")


# --- writing ---------------------------------------------------------------------------------------------------------


def to_neox(spec: ModelSpec, tp: int, pp: int, multiple: int, base: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a yml from which NeoX builds a model.

    Args:
        spec: the model.
        tp: tensor parallel size.
        pp: pipeline parallel size; 0 for a sequential checkpoint.
        multiple: the vocabulary is padded to a multiple of this times tp.
        base: the yml of the checkpoint that is resharded; keys that do not concern model and topology are kept, except
            for expansion_factor, which NeoX accepts only without an intermediate_size, and mlp_type, which it does not
            accept with today's names.

    Raises:
        UnsupportedError: NeoX has no such model.
    """
    if spec.head_dim * spec.heads != spec.hidden:
        raise UnsupportedError(
            f"GPT-NeoX has heads of hidden / heads = {spec.hidden / spec.heads:g}, this model of {spec.head_dim}"
        )
    if spec.rope_scaling and spec.rope_scaling != yarn_of(base, "the yml"):
        raise UnsupportedError(f"GPT-NeoX has no rotary embedding of the kind {spec.rope_scaling.get('rope_type')}")
    if spec.sliding_window == 1:
        raise UnsupportedError(f"sliding_window = 1 is not supported for GPT-NeoX: {WINDOW} would be 0")
    kind = _kind(spec)
    if setting := lost_setting(ROWS, CONDITIONS[kind], spec):
        raise UnsupportedError(f"GPT-NeoX has no {setting}")
    others = {key: value for key, value in base.items() if key not in ("mlp_type", "expansion_factor")}
    topology = {"pipe_parallel_size": pp, "model_parallel_size": tp, "make_vocab_size_divisible_by": multiple}
    return {**others, **topology, **write(ROWS, vars(spec), CONDITIONS[kind], "the yml", base)}


def _kind(spec: ModelSpec) -> str:
    """The kind of a model in GPT-NeoX, a key of `CONDITIONS`.

    Raises:
        UnsupportedError: NeoX has no such model.
    """
    kind = family_named(spec.family).neox
    fits = spec.activation in ("gelu", FUSED[kind]) if kind in FUSED else not spec.biases
    if kind and fits:
        return kind
    activation = f" with the activation {spec.activation}" if kind in FUSED else ""
    biases = f" with {' and '.join(spec.biases)}" if spec.biases else ""
    families = ", ".join(name for name, family in FAMILIES.items() if family.neox)
    raise UnsupportedError(f"GPT-NeoX has no {spec.family}{activation}{biases}", f"it has {families}")
