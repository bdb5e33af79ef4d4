"""Gemma 3 (text) in Megatron-Bridge: its Gemma3ModelProvider, with norms, windows and rotary bases of its own.

    window_size               the number of tokens that a token sees, itself included, as transformers counts them; in
                              0.3.1 those to its left alone, one less
    interleaved_attn_pattern  (local, global): of each local + global layers the last has no window
    rotary_base               (local, global); `rope_scaling_factor` divides the frequencies of the global base alone
    softmax_scale             the root of 1 / query_pre_attn_scalar

The weights of all norms are stored minus 1, as in Hugging Face's files. The class ignores `qk_layernorm` (queries and
keys have norms), `rotary_percent` (all of a head rotates) and `rope_scaling`, and the norms that it adds have the
epsilon of megatron-core's TENorm. The import of 0.3.1 from Hugging Face writes a `window_size` that is one too large.

Facts: Megatron-Bridge 0.3.1 to 0.6.2 models/gemma/gemma3_provider.py and gemma3_bridge.py (the epsilon is in
models/common/te_layers.py of 0.6.2 too; `Gemma3TEDotProductAttention` takes one off the window from 0.4.0 on);
megatron-core 0.16.1 extensions/transformer_engine.py (`TENorm`: eps = 1e-5; `TEDotProductAttention` passes window_size
on); Transformer Engine's documentation of DotProductAttention: a query at i attends to the keys from i - window_size[0]
to i + window_size[1], both included. Bridge's own files are in tests/golden/bridge/gemma3 and gemma3_0.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from formats.errors import short
from formats.megatron.args.layers import FULL, SLIDING
from formats.megatron.args.mlp import GELU
from formats.megatron.args.provider import Provider, own_attention, refusal, unsupported_field
from formats.megatron.args.releases import FIRST_RELEASE, LATER
from formats.megatron.args.rope import plain, write_base
from formats.model.accepted import EPSILON as DEVIATION
from formats.model.codec import Codec, Context, Maker, Row, choice, default, fixed, rows, single
from formats.model.values import LARGEST, positive_float, positive_int, some_layers

MODULE = "megatron.bridge.models.gemma.gemma3_provider"
EPSILON = 1e-5
"""The epsilon of the norms that the provider adds."""
MARKS = ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")
"""Fields of GPTModelProvider from 0.4.0 on (0.3.1 to 0.6.2, models/gpt_provider.py)."""
PATCH = (
    "in class TERowParallelLinearLayerNorm (models/common/te_layers.py, up to 0.5 models/gemma/gemma3_provider.py): "
    "self.post_layernorm = TENorm(config, output_size, config.layernorm_epsilon)"
)
TURNS = 6
"""Of each so many layers the last has no window, by default (transformers 5.23.0 `Gemma3TextConfig`)."""

SMALLEST = 1e-6
"""A smaller factor of attention scores is refused."""

TEXT = """
layers                         num_layers
hidden                         hidden_size
heads                          num_attention_heads
kv_heads                       num_query_groups                 default heads
head_dim                       kv_channels                      default hidden / heads
ffn                            ffn_hidden_size                  default 4 hidden
vocab                          vocab_size
max_positions                  seq_length
norm_epsilon                   layernorm_epsilon                positive number
tied                           share_embeddings_and_output_weights
rope_theta                     rotary_base                      second of pair
rope_local_base_freq           rotary_base                      first of pair
rope_scaling                   rope_scaling_factor              linear factor
sliding_window                 window_size                      window
layer_types                    interleaved_attn_pattern         local and global
sliding_window_pattern         interleaved_attn_pattern         local and global, by step
query_pre_attn_scalar          softmax_scale                    inverse square root
activation                     activation_func                  GELU with tanh
attn_logit_softcapping         -                                must be null
final_logit_softcapping        -                                must be null
use_bidirectional_attention    -                                must be false
-                              transformer_layer_spec           layer spec
-                              attention_backend                own attention
-                              normalization                    = "RMSNorm"
-                              position_embedding_type          = "rope"
-                              layernorm_zero_centered_gamma    = true
-                              gated_linear_unit                = true
-                              add_bias_linear                  = false
-                              add_qkv_bias                     = false
-                              is_vision_language               = false
-                              num_moe_experts                  = null
-                              mtp_num_layers                   = null
-                              no_rope_freq                     = null
-                              window_attn_skip_freq            = null
-                              seq_len_interpolation_factor     = null
"""
MARKED = "".join(f"-  {name}  = null\n" for name in MARKS)
"""The rows of fields that 0.3.1 has not."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < LARGEST


def _base(place: int) -> Callable[[str], Codec]:
    """A codec of one of the pair of rotary bases: place 0 is that of layers with a window, place 1 of all others."""

    def read(spelled: Any, context: Context) -> float:
        if not isinstance(spelled, list | tuple) or len(spelled) != 2:
            raise unsupported_field(context.where, f"rotary_base = {short(spelled)} is no pair of bases")
        return positive_float(spelled[place], "rotary_base", context.where)

    def write(_: Any, context: Context) -> list[Any]:
        bases = (context.values["rope_local_base_freq"], context.values["rope_theta"])
        if not all(map(_is_number, bases)):
            raise refusal(f"its rotary bases are {short(bases)}")
        return [write_base(base, context) for base in bases]

    return single(read, write)


def _read_factor(spelled: Any, context: Context) -> Mapping[str, Any] | None:
    factor = positive_float(1.0 if spelled is None else spelled, "rope_scaling_factor", context.where)
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _write_factor(value: Mapping[str, Any] | None, context: Context) -> float:
    scaling = plain(value or {}, context.values["max_positions"])
    kind, factor = scaling.pop("rope_type", "linear"), scaling.pop("factor", 1.0)
    if kind != "linear" or scaling or not _is_number(factor):
        raise refusal(f"its rotary embeddings are scaled by a factor alone (linear), these so: {short(value)}")
    return float(factor)


def _window(uncounted: int) -> Maker:
    """A codec of the tokens that a token sees, of which the field does not count so many."""

    def read(spelled: Any, context: Context) -> int | None:
        if spelled is None:  # no layer has a window
            return None
        if type(spelled) is not int or spelled + uncounted < 1:
            raise unsupported_field(context.where, f"window_size = {short(spelled)} is no number of tokens")
        return spelled + uncounted

    return single(read, lambda tokens, _: None if tokens is None else tokens - uncounted)


def _kinds(full_each: int, layers: int) -> list[str]:
    """The kinds of `layers` layers; the last of each `full_each` layers has no window."""
    return [SLIDING if (layer + 1) % full_each else FULL for layer in range(layers)]


def _read_turns(spelled: Any, context: Context) -> list[str]:
    match spelled:
        case [int(local), int(full)] if local >= 0 and full >= 0 and local + full > 0:
            layers = context.values["layers"]
            if layers is None:
                raise unsupported_field(context.where, "there is no num_layers")
            return _kinds(local + full, len(some_layers(layers)))
    raise unsupported_field(context.where, f"interleaved_attn_pattern = {short(spelled)} is no pair of numbers")


def _write_turns(_: Any, context: Context) -> list[int]:
    layers, turns = context.values["layers"], context.values["sliding_window_pattern"]
    turns = TURNS if turns is None else turns
    if type(turns) is not int or turns < 1:
        raise refusal(f"its sliding_window_pattern is {short(turns)}")
    kinds = context.values["layer_types"] or _kinds(turns, layers)
    full_each = kinds.index(FULL) + 1 if FULL in kinds else max(TURNS, layers + 1)
    if kinds != _kinds(full_each, layers):
        raise refusal(f"of each so many layers the last has no window, those of this model are {short(kinds)}")
    return [full_each - 1, 1]


def _read_root(spelled: Any, context: Context) -> int:
    if spelled is None:  # default of Transformer Engine's attention
        return positive_int(context.values["head_dim"], "kv_channels", context.where)
    scale = positive_float(spelled, "softmax_scale", context.where)
    scalar = scale**-2 if SMALLEST < scale <= 1 else 0.5
    if not math.isclose(scalar, round(scalar), rel_tol=1e-9):
        raise unsupported_field(context.where, f"softmax_scale = {spelled} is the root of one part of no whole number")
    return round(scalar)


def _write_root(scalar: Any, _: Context) -> float:
    if not _is_number(scalar):
        raise refusal(f"its query_pre_attn_scalar is {short(scalar)}")
    return 1.0 / math.sqrt(scalar)


def _read_activation(spelled: Any, context: Context) -> str:
    if not isinstance(spelled, Mapping) or spelled.get("_target_") != TANH["_target_"]:
        raise unsupported_field(
            context.where, f"activation_func = {short(spelled)} is not supported, only {TANH['_target_']}"
        )
    return next(iter(GELU))


def _write_activation(value: Any, _: Context) -> Mapping[str, Any]:
    if not GELU.get(value):
        raise refusal(f"its activation is gelu_pytorch_tanh, this model's {short(value)}")
    return TANH


def _without(why: str, *allowed: Any) -> Maker:
    """A codec of a setting without a field, with the reason for which other values than those allowed are refused."""
    return fixed(*allowed, error=lambda value, _: refusal(why.format(short(value))))


def _default_ffn(context: Context) -> int:
    return 4 * positive_int(context.values["hidden"], "hidden_size", context.where)


def _sizes(*numbers: float) -> dict[str, Any]:
    return dict(zip(NAMES, numbers, strict=True))


TANH = {"_target_": "megatron.core.activations.fast_gelu", "_call_": False}
SPEC = {"_target_": f"{MODULE}.gemma3_layer_spec", "_call_": False}
DEFAULTS = {
    "seq_length": 131072, "rotary_base": [10000, 1000000], "share_embeddings_and_output_weights": True,
    "normalization": "RMSNorm", "layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-6, "window_size": 512,
    "interleaved_attn_pattern": [5, 1], "rope_scaling_factor": 1.0, "softmax_scale": 1 / 16, "gated_linear_unit": True,
    "add_bias_linear": False, "activation_func": TANH, "is_vision_language": False, "position_embedding_type": "rope",
}  # fmt: skip
NAMES = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "window_size", "rope_scaling_factor", "vocab_size",
)  # fmt: skip
OF_IMAGES = {"is_vision_language": True}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "1B": {**_sizes(26, 1152, 4, 1, 256, 6912, 512, 1.0, 262144), "seq_length": 32768},
    "4B": {**_sizes(34, 2560, 8, 4, 256, 10240, 1024, 8.0, 262208), **OF_IMAGES},
    "12B": {**_sizes(48, 3840, 16, 8, 256, 15360, 1024, 8.0, 262208), **OF_IMAGES},
    "27B": {**_sizes(62, 5376, 32, 16, 128, 21504, 1024, 8.0, 262208), **OF_IMAGES, "softmax_scale": 168**-0.5},
}
"""The defaults of the classes of the released sizes that differ from `DEFAULTS`."""


def _table(text: str, window: Maker) -> tuple[Row, ...]:
    return rows(
        text,
        {
            "positive number": single(lambda epsilon, context: positive_float(epsilon, "norm_epsilon", context.where)),
            "default 4 hidden": default(_default_ffn),
            "second of pair": _base(1),
            "first of pair": _base(0),
            "linear factor": single(_read_factor, _write_factor),
            "window": window,
            "local and global": single(_read_turns, _write_turns),
            "local and global, by step": single(lambda *_: None, _write_turns),
            "inverse square root": single(_read_root, _write_root),
            "GELU with tanh": single(_read_activation, _write_activation),
            "must be null": _without("it caps no logits, and this model at {}", None),
            "must be false": _without("it sees what is before a token alone", False, None),
            "layer spec": choice((SPEC, None)),
            "own attention": own_attention,
        },
    )


PROVIDER = Provider(
    family="gemma3_text",
    target=f"{MODULE}.Gemma3ModelProvider",
    table=_table(TEXT + MARKED, _window(0)),
    defaults=DEFAULTS,
    releases=LATER,
    sizes={f"Gemma3ModelProvider{size}": fields for size, fields in SIZES.items()},
    epsilon=EPSILON,
    accept=DEVIATION,
    patch=PATCH,
    marks=MARKS,
)
FIRST = replace(PROVIDER, table=_table(TEXT, _window(1)), releases=FIRST_RELEASE, marks=())
"""The class in 0.3.1."""
