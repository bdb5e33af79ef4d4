"""The yml configs of GPT-NeoX: which key is which setting, and which have no counterpart.

A key that changes what a model computes and has no counterpart is refused, never dropped. Facts: megatron/
neox_arguments/neox_args.py, megatron/model/transformer.py, activations.py and norms.py at ea7aefd8; the YaRN keys are
those of tilde-nlp/llm-gpt-neox at 374a5c6, megatron/model/positional_embeddings.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from formats.disk.safetensors import file_size
from formats.errors import SourceError, UnsupportedError, short
from formats.model.spec import MOST_LAYERS, ModelSpec, checked, real, whole

NEOX = {
    "layers": ("num_layers", None),
    "hidden": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "kv_heads": ("num_kv_heads", None),
    "max_positions": ("max_position_embeddings", None),
    "rope_theta": ("rotary_emb_base", 10000),
}
"""Setting: key, and what NeoX takes when it is absent."""
WINDOW = "sliding_window_width"
"""How many tokens before itself a token sees: flash-attn is told so much to the left (transformer.py:602), and the mask
has so many diagonals below the main one (utils.py:77)."""

NEOX_ONLY: Mapping[str, tuple[Any, ...]] = {
    "pos_emb": ("rotary",),
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
}
"""Keys that change what the model computes, and the values that have a Hugging Face counterpart here."""

BOOLEANS = (
    "no_weight_tying", "gpt_j_residual", "bias_gelu_fusion", "yarn", "use_bias_in_attn_linear", "use_bias_in_mlp",
)  # fmt: skip
ABSENT = {"pos_emb": "learned"}
"""What NeoX takes when such a key is absent, where that is not the first value above."""

NORMS = {"rmsnorm": "rms_norm_epsilon", "te_rmsnorm": "rms_norm_epsilon",
         "layernorm": "layernorm_epsilon", "te_layernorm": "layernorm_epsilon"}  # fmt: skip
EPSILONS = {"rms_norm_epsilon": 1e-8, "layernorm_epsilon": 1e-5}
DENSE = ("global", "flash")
"""Values of attention_config with plain causal attention."""
MOST_YAML = 1 << 20
MERGE = "tag:yaml.org,2002:merge"
"""The key `<<`, of which a map may have several."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def read_yml(paths: Iterable[Path]) -> dict[str, Any]:
    """Merge yml files as NeoX does: `-` and `_` are the same in a key, and no key may be there twice.

    Raises:
        SourceError: a file is no map or says a key twice, or two files contradict each other.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        try:
            if (size := file_size(path)) > MOST_YAML:
                raise SourceError(f"{path} has {size} bytes, too many for a configuration")
            held = _load(path)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise SourceError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None
        if not isinstance(held, dict):
            raise SourceError(f"{path} holds no map of settings")
        for name, value in held.items():
            key = str(name).replace("-", "_")
            if key in merged and not _same(merged[key], value):
                said = f"{path} says {key} = {short(value)}, another file {short(merged[key])}"
                raise SourceError(said, "name the right yml with --config")
            merged[key] = value
    return merged


def _load(path: Path) -> Any:
    """What a yml holds. PyYAML, and so NeoX, would take the last of two lines with one key, and say nothing."""
    loader = yaml.SafeLoader(path.read_text())
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(name, yaml.ScalarNode) or name.tag == MERGE:
                continue
            key, line = name.value.replace("-", "_"), name.start_mark.line + 1
            if key in lines:
                raise SourceError(
                    f"{path} says {short(key)} twice, in lines {lines[key]} and {line}",
                    "NeoX trained with the last one: remove the other, and name the file with --config",
                )
            lines[key] = line
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RecursionError:  # a list that holds itself
        return False


def from_neox(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    ffn: int,
    biases: bool,
    vocab: int | None,
    where: str,
    family: Any = None,
) -> ModelSpec:
    """Read the settings of a model.

    Args:
        config: the merged yml.
        settings: values that overrule it.
        ffn: the inner size of the MLP, which the weights tell and the yml only hints at.
        biases: whether the checkpoint holds biases.
        vocab: the true vocabulary, None while unknown.
        where: what to call the configuration in an error.
        family: the one to choose where several compute the same: a Mistral without a window is a Llama.

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
        value = config.get(name, ABSENT.get(name, allowed[0]))
        if value not in allowed or isinstance(value, bool) is not isinstance(allowed[0], bool):
            raise UnsupportedError(f"{where}: {name} = {short(value)} is not supported, only {allowed[0]!r}")
    values: dict[str, Any] = {name: config.get(key, default) for name, (key, default) in NEOX.items()}
    heads, hidden = whole(values["heads"], "heads", where), whole(values["hidden"], "hidden", where)
    values |= {
        "kv_heads": values["kv_heads"] or heads,
        "head_dim": hidden // heads,
        "ffn": ffn,
        "vocab": vocab,
        "rope_theta": number(values["rope_theta"]),
        "norm_epsilon": _epsilon(config, where),
        "rope_scaling": _yarn(config, where),
        "tied": not config.get("no_weight_tying", False),
        **_family(config, biases, values["kv_heads"] not in (None, heads), where),
    }
    if (values["family"], family) == ("llama", "mistral"):
        values["family"] = family
    if config.get(WINDOW) is not None and "sliding_window" not in settings:
        values["sliding_window"] = whole(config[WINDOW], WINDOW, where) + 1
    _require_dense(config, where)
    spec = checked(values | dict(settings), where)
    return spec if "sliding_window" in settings else replace(spec, notes=window_notes(spec))


def window_notes(spec: ModelSpec) -> tuple[str, ...]:
    """How each side counts the tokens of a window, if there is one."""
    window = spec.sliding_window
    if window is None:
        return ()
    return (f"sliding_window = {window} counts the token itself, {WINDOW} = {window - 1} of GPT-NeoX those before it",)


def number(value: Any) -> Any:
    """A number that YAML took for a text: `3e-06` has no point, so PyYAML leaves it as it is."""
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def is_gated(config: Mapping[str, Any]) -> bool:
    """Whether the MLP is gated with a SiLU. Before September 2024 that was a kind of MLP, not of activation."""
    activation = config.get("activation")
    return activation == "swiglu" or (config.get("mlp_type") == "llama" and activation in ("silu", "swish"))


def _epsilon(config: Mapping[str, Any], where: str) -> Any:
    norm = config.get("norm", "layernorm")
    if not isinstance(norm, str) or norm not in NORMS:
        raise UnsupportedError(f"{where}: norm = {short(norm)} is not supported, only {', '.join(NORMS)}")
    return number(config.get(NORMS[norm], EPSILONS[NORMS[norm]]))


def _family(config: Mapping[str, Any], biases: bool, gqa: bool, where: str) -> dict[str, Any]:
    """The family of transformers that computes the same, and the settings in which it leaves a choice.

    Llama has RMSNorm, a gated SiLU, no biases and a serial residual, and turns whole heads; GPT-NeoX has LayerNorm, an
    MLP that is not gated, biases everywhere and a key and value for each head.
    """
    norm, activation = config.get("norm", "layernorm"), config.get("activation", "gelu")
    fraction, parallel = number(config.get("rotary_pct", 1.0)), config.get("gpt_j_residual", False)
    rms = NORMS.get(norm) == "rms_norm_epsilon"
    if rms and is_gated(config) and not biases and not parallel and fraction == 1.0:
        return {"family": "mistral" if config.get(WINDOW) else "llama"}
    real(fraction, "rotary_fraction", where)
    if (
        not rms
        and activation == "gelu"
        and fraction <= 1
        and config.get("mlp_type", "regular") == "regular"
        and biases
        and not gqa
    ):
        fused = config.get("bias_gelu_fusion", False)  # which is the approximation with tanh, activations.py:83
        return {
            "family": "gpt_neox",
            "rotary_fraction": fraction,
            "parallel_residual": parallel,
            "activation": "gelu_fast" if fused else "gelu",
        }
    facts = (
        f"norm {norm}, activation {short(activation)}, rotary_pct {short(fraction)}, gpt_j_residual {short(parallel)}"
    )
    raise UnsupportedError(
        f"{where}: transformers has no class with {facts}, {'biases' if biases else 'no biases'}"
        f"{', grouped queries' if gqa else ''}",
        "supported: what LlamaForCausalLM, MistralForCausalLM or GPTNeoXForCausalLM compute",
    )


def _require_dense(config: Mapping[str, Any], where: str) -> None:
    """Every layer attends to all tokens before it. `[[["global"], 3]]` is NeoX's way to say it."""
    rest = [config.get("attention_config") or "global"]
    for _ in range(MOST_LAYERS):
        if not rest:
            return
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif one not in DENSE and type(one) is not int:
            raise UnsupportedError(f"{where}: attention of the kind {short(one)} is not supported")
    raise SourceError(f"{where}: its attention_config is no list of layers")


def _yarn(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """YaRN as transformers spells it.

    The fork multiplies cosine and sine by 0.1 * yarn_attention_factor * ln(factor) + 1; the attention_factor of
    transformers is that product itself, not the factor in it (modeling_rope_utils.py, 5.23.0).
    """
    if not config.get("yarn"):
        return None
    original = whole(
        config.get("yarn_original_max_position_embeddings"), "yarn_original_max_position_embeddings", where
    )
    factor = number(config.get("yarn_factor"))
    if factor is None:
        factor = whole(config.get("seq_length"), "seq_length", where) / original
    factor = real(factor, "yarn_factor", where)
    scale = real(number(config.get("yarn_attention_factor", 1.0)), "yarn_attention_factor", where)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": 0.1 * scale * math.log(factor) + 1,
        "beta_fast": real(number(config.get("yarn_beta_fast", 32.0)), "yarn_beta_fast", where),
        "beta_slow": real(number(config.get("yarn_beta_slow", 1.0)), "yarn_beta_slow", where),
    }


# --- writing ---------------------------------------------------------------------------------------------------------


def to_neox(spec: ModelSpec, tp: int, pp: int, multiple: int, base: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a yml that make NeoX build a model.

    Args:
        spec: the model.
        tp: tensor parallel size.
        pp: pipeline parallel size; 0 for a sequential checkpoint.
        multiple: the vocabulary is padded to a multiple of this times tp.
        base: the yml of the checkpoint that is resharded; what does not concern model and topology is kept. NeoX takes
            no expansion_factor beside an intermediate_size, and no mlp_type with today's names.

    Raises:
        UnsupportedError: NeoX has no such model.
    """
    if spec.head_dim * spec.heads != spec.hidden:
        raise UnsupportedError(
            f"GPT-NeoX has heads of hidden / heads = {spec.hidden / spec.heads:g}, this model of {spec.head_dim}"
        )
    if spec.rope_scaling and spec.rope_scaling != _yarn(base, "the yml"):
        raise UnsupportedError(f"GPT-NeoX has no rotary embedding of the kind {spec.rope_scaling.get('rope_type')}")
    if spec.rope_theta is None:
        raise UnsupportedError(
            f"a {spec.family} has no layout of GPT-NeoX: its positions are learned, and none of its tables has them",
            "see `convert formats`",
        )
    if spec.sliding_window == 1:
        raise UnsupportedError(f"sliding_window = 1 is not supported for GPT-NeoX: {WINDOW} would be 0")
    kept = {key: value for key, value in base.items() if key not in ("mlp_type", "expansion_factor")}
    return {**kept, **_topology(spec, spec.rope_theta, tp, pp, multiple), **_model(spec)}


def _topology(spec: ModelSpec, theta: float, tp: int, pp: int, multiple: int) -> dict[str, Any]:
    return {
        "pipe_parallel_size": pp,
        "model_parallel_size": tp,
        "make_vocab_size_divisible_by": multiple,
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.max_positions,
        "pos_emb": "rotary",
        "rotary_emb_base": int(theta) if theta == int(theta) else theta,
        "no_weight_tying": not spec.tied,
    }


def _model(spec: ModelSpec) -> dict[str, Any]:
    if spec.family in ("llama", "mistral") and not spec.biases:
        return {
            **({"num_kv_heads": spec.kv_heads} if spec.kv_heads != spec.heads else {}),
            **({WINDOW: spec.sliding_window - 1} if spec.sliding_window else {}),
            "norm": "rmsnorm",
            "rms_norm_epsilon": spec.norm_epsilon,
            "rotary_pct": 1.0,
            "activation": "swiglu",
            "intermediate_size": 3 * spec.ffn,  # NeoX takes two thirds of it for gate and up together
            "mlp_multiple_of": 1,
            "use_bias_in_attn_linear": False,
            "use_bias_in_mlp": False,
            "gpt_j_residual": False,
        }
    if spec.family == "gpt_neox" and spec.activation in ("gelu", "gelu_fast"):
        return {
            "norm": "layernorm",
            "layernorm_epsilon": spec.norm_epsilon,
            "rotary_pct": spec.rotary_fraction,
            "activation": "gelu",
            "bias_gelu_fusion": spec.activation == "gelu_fast",
            "intermediate_size": spec.ffn,
            "mlp_multiple_of": 1,
            "use_bias_in_attn_linear": True,
            "use_bias_in_mlp": True,
            "gpt_j_residual": spec.parallel_residual,
        }
    activation = f" with the activation {spec.activation}" if spec.family == "gpt_neox" else ""
    biases = f" with {' and '.join(spec.biases)}" if spec.biases else ""
    raise UnsupportedError(f"GPT-NeoX has no {spec.family}{activation}{biases}", "it has Llama, Mistral and GPT-NeoX")


def dump_yml(config: Mapping[str, Any]) -> bytes:
    """A yml that NeoX reads: numbers such as 3.0e-06 keep their point, without which they would be texts."""
    return yaml.safe_dump(dict(config), sort_keys=False).encode()
