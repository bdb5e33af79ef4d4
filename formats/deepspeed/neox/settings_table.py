"""The keys of GPT-NeoX's yml as a table: setting, key, codec, and the condition under which the row holds.

Facts: megatron/neox_arguments/neox_args.py, megatron/model/transformer.py and activations.py at ea7aefd8; the YaRN keys
are those of tilde-nlp/llm-gpt-neox at 374a5c6, megatron/model/positional_embeddings.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from formats.errors import SourceError, UnsupportedError, short
from formats.model.codec import Codec, Context, Maker, Spelled, rows, scalar, single
from formats.model.values import MOST_LAYERS, positive_float, positive_int

TABLE = """
layers               num_layers
hidden               hidden_size
heads                num_attention_heads
max_positions        max_position_embeddings
-                    pos_emb                    write "rotary"       rotary
-                    pos_emb                    write "learned"      learned
-                    opt_pos_emb_offset         must be 0            learned
-                    mup_rp_embedding_mult      must be 1            learned
rope_theta           rotary_emb_base            integer if whole     rotary
tied                 no_weight_tying            opposite
kv_heads             num_kv_heads               absent if heads
sliding_window       sliding_window_width       without the token itself
-                    attention_config           flash with a window
-                    norm                       write "rmsnorm"      rms
-                    norm                       write "layernorm"    layernorm
norm_epsilon         rms_norm_epsilon           number               rms
norm_epsilon         layernorm_epsilon          number               layernorm
-                    rotary_pct                 write 1.0            rms
rotary_fraction      rotary_pct                 number               pythia
-                    activation                 write "swiglu"       rms
-                    activation                 write "gelu"         layernorm
activation           bias_gelu_fusion           gelu or gelu_fast    pythia
activation           bias_gelu_fusion           gelu or gelu_new     learned
ffn                  intermediate_size          3 * ffn              rms
ffn                  intermediate_size          ffn                  layernorm
-                    mlp_multiple_of            write 1
-                    use_bias_in_attn_linear    write false          rms
-                    use_bias_in_attn_linear    write true           layernorm
-                    use_bias_in_mlp            write false          rms
-                    use_bias_in_mlp            write true           layernorm
-                    gpt_j_residual             write false          rms
-                    gpt_j_residual             write false          learned
parallel_residual    gpt_j_residual             same                 pythia
-                    te_rowparallel             sums once            pythia
rope_scaling         yarn                       YaRN
"""
"""The keys in the order in which they are written. transformers has classes for two kinds of models: with RMSNorm, a
gated SiLU, no biases, a serial residual, and heads that rotate as a whole; or with LayerNorm, an MLP without a gate,
biases everywhere, and a key and value for each head."""
CONDITIONS = {
    "llama": frozenset({"rms", "rotary"}),
    "pythia": frozenset({"layernorm", "rotary", "pythia"}),
    "gpt2": frozenset({"layernorm", "learned"}),
}
"""The conditions of the rows by kind of model (`Family.neox`). Learned positions are added to the embedding, OPT counts
them from 2 and muP multiplies them (word_embeddings.py:142); models with them have a serial residual."""
CAUSAL_SOFTMAX = "scaled_upper_triang_masked_softmax_fusion"
WINDOW = "sliding_window_width"
"""The key for the number of earlier tokens that a token attends to: the left window of flash-attn (transformer.py:602),
and the number of diagonals of the mask below the main diagonal (utils.py:77)."""
YARN_ORIGINAL = "yarn_original_max_position_embeddings"
YARN_USUAL = {"yarn_attention_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
FUSED = {"pythia": "gelu_fast", "gpt2": "gelu_new"}
"""transformers' name of the activation that is fused with its bias, the approximation with tanh (activations.py:83), by
kind of model. An activation that is not fused is `gelu`."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def number(value: Any) -> Any:
    """A value of a yml, as a number if it is the text of one; PyYAML reads `3e-06`, which has no point, as text."""
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def groups(key: str) -> Codec:
    """A codec of the number of key/value heads; the key is absent if each head has its own."""
    return Codec(
        lambda spelled, context: spelled.get(key) or context.values["heads"],
        lambda value, context: {} if value == context.values["heads"] else {key: value},
    )


def window(key: str) -> Codec:
    """A codec of a window, which counts the token itself; null overrules that of a kept yml if the model has none."""
    return Codec(
        lambda spelled, context: positive_int(spelled[key], key, context.where) + 1 if key in spelled else None,
        lambda value, context: {key: value - 1} if value else dict.fromkeys({key} & {*context.file}),
    )


def attention_kinds(value: Any, where: str) -> set[Any]:
    """The kinds of attention in an attention_config; NeoX writes it as `[[["global"], 3]]`, for 3 layers or `all`.

    Raises:
        SourceError: it is no list of layers.
    """
    kinds, rest = set[Any](), [value or "global"]
    for _ in range(MOST_LAYERS):
        if not rest:
            return kinds
        kind = rest.pop()
        if isinstance(kind, list):
            rest += kind
        elif kind != "all" and type(kind) is not int:
            kinds.add(kind if isinstance(kind, str) else short(kind))
    raise SourceError(f"{where}: its attention_config is no list of layers")


def flash(key: str) -> Codec:
    """A codec of the kinds of attention: flash in all layers of a model with a window, which keeps to it in every run.

    Flash-attn has the window (transformer.py:602), and so has the mask of a pipeline (training.py:485, utils.py:67),
    which the fused softmax for causal models does not read (fused_softmax.py:162-178). Without a pipeline the mask has
    none (training.py:523-531).
    """

    def read_kinds(spelled: Spelled, context: Context) -> None:
        window, length = context.values["sliding_window"], context.file.get("seq_length")
        stages = context.file.get("pipe_parallel_size", 0)
        masked = type(stages) is int and stages > 0 and not context.file.get(CAUSAL_SOFTMAX)
        others = attention_kinds(spelled.get(key), context.where) - {"flash", *(["global"] if masked else [])}
        if window is not None and others and not (type(length) is int and length <= window):
            raise UnsupportedError(
                f"{context.where}: {WINDOW} = {window - 1} with seq_length = {short(length)} and attention of the kind "
                f"{', '.join(sorted(others))}: GPT-NeoX keeps to a window in flash attention and, in a pipeline "
                f"without {CAUSAL_SOFTMAX}, in global attention",
                f"--set sliding_window=none if the run computed without it, or --set sliding_window={window}",
            )

    def write_kinds(_: Any, context: Context) -> Spelled:
        return {key: [[["flash"], context.values["layers"]]]} if context.values["sliding_window"] else {}

    return Codec(read_kinds, write_kinds)


def summed(key: str) -> Codec:
    """A codec of whether output layers are Transformer Engine's: of a parallel residual only without tensor parallel.

    They sum up over the ranks by themselves (transformer_engine.py `TERowParallelLinear`, which has no use for its
    `parallel_output`), and the layer sums up once more (transformer.py:1116): its output is multiplied by the ranks.
    """

    def read_layers(spelled: Spelled, context: Context) -> None:
        ranks = context.file.get("model_parallel_size", 1)
        if spelled.get(key) and context.values["parallel_residual"] and ranks != 1:
            raise UnsupportedError(
                f"{context.where}: {key} = True with gpt_j_residual = True and {short(ranks)} tensor parallel ranks is "
                "not supported: GPT-NeoX sums up the outputs of attention and MLP twice, which multiplies them",
                f"if the code of the run sums up once: --config a copy of the yml without {key}",
            )

    return Codec(
        read_layers,
        lambda _, context: {key: False} if context.file.get(key) and context.values["parallel_residual"] else {},
    )


def inner(key: str, ratio: int = 1) -> Codec:
    """A codec of the width of the MLP, which is read from the weights.

    NeoX's number is the width times `ratio`: 3 for a gated MLP, whose gate and up together have two thirds of it.
    """
    return scalar(key, lambda _, context: context.values["ffn"], lambda value, _: ratio * value)


def yarn(key: str) -> Codec:
    """A codec of YaRN, which is read; only the key of a kept yml is written, as false if the model has no YaRN."""
    return Codec(
        lambda _, context: yarn_of(context.file, context.where),
        lambda value, context: {key: False} if context.file.get(key) and not value else {},
    )


def yarn_of(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The YaRN of a yml as transformers spells it; None without YaRN.

    The fork multiplies cosine and sine by 0.1 * yarn_attention_factor * ln(factor) + 1; the attention_factor of
    transformers is the result of this formula, not the factor in it (modeling_rope_utils.py, 5.23.0).
    """
    if not config.get("yarn"):
        return None
    original = positive_int(config.get(YARN_ORIGINAL), YARN_ORIGINAL, where)
    factor = number(config.get("yarn_factor"))
    if factor is None:
        factor = positive_int(config.get("seq_length"), "seq_length", where) / original
    factor = positive_float(factor, "yarn_factor", where)
    scale, fast, slow = (
        positive_float(number(config.get(name, usual)), name, where) for name, usual in YARN_USUAL.items()
    )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": 0.1 * scale * math.log(factor) + 1,
        "beta_fast": fast,
        "beta_slow": slow,
    }


def must_be(value: float) -> Maker:
    """A codec of a key that has to have one value, NeoX's default; it is not written."""

    def codec(key: str) -> Codec:
        def read_value(spelled: Spelled, context: Context) -> None:
            if number(spelled.get(key, value)) != value:
                raise UnsupportedError(f"{context.where}: {key} = {short(spelled[key])} is not supported, only {value}")

        return Codec(read_value, lambda *_: {})

    return codec


def fused(name: str) -> Maker:
    """A codec of whether the activation is fused with its bias; the fused activation is called `name`."""
    return single(lambda value, _: name if value else "gelu", lambda value, _: {"gelu": False, name: True}[value])


CODECS: Mapping[str, Maker] = {
    "number": single(lambda value, _: number(value)),
    "integer if whole": single(
        lambda value, _: number(value), lambda value, _: int(value) if value == int(value) else value
    ),
    "absent if heads": groups,
    "without the token itself": window,
    "flash with a window": flash,
    "sums once": summed,
    "ffn": inner,
    "3 * ffn": lambda key: inner(key, 3),
    "YaRN": yarn,
    **{f"must be {value}": must_be(value) for value in (0, 1)},
    **{f"gelu or {name}": fused(name) for name in FUSED.values()},
}
ROWS = rows(TABLE, CODECS)
