"""Ministral 3 in Megatron-Bridge: its Ministral3ModelProvider, with YaRN and queries that grow with their position.

    yarn_*       the parameters of YaRN; `yarn_correction_range_round_to_int` is transformers' truncate
    hf_config    the Mistral3Config of the whole; from its text the class takes by what, and each how many positions,
                 queries grow

The class builds its language model with a tower alone, and none of a text without `llama_4_scaling_beta` (Mistral
Small 3.1). Bridge's own import from Hugging Face leaves the parameters of YaRN at its defaults, whatever the model has:
32, 1, 16 and 16384, mscale and mscale_all_dim of 1, and no truncation, where transformers truncates unless told
otherwise.

Facts: Megatron-Bridge 0.4.2, 0.5.1 and 0.6.2 models/ministral3/ministral3_provider.py and ministral3_bridge.py
(`MinistralTEDotProductAttention`), mistral/mistral_provider.py; megatron-core 0.19.2 models/gpt/gpt_model.py. A file
that 0.6.2 wrote is in tests/golden/bridge/mistral3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import short
from formats.megatron.args.provider import Provider, own_attention, refusal, unsupported_field
from formats.megatron.args.releases import LATER
from formats.megatron.args.rope import YARN_FIELDS as FIELDS
from formats.megatron.args.rope import plain, read_yarn, write_base, yarn
from formats.megatron.args.vision import config_in
from formats.model.codec import Codec, Context, Maker, Spelled, choice, rows, single
from formats.model.values import positive_float

MODULE = "megatron.bridge.models.ministral3.ministral3_provider"
WHOLE = "hf_config"
"""The field that is the config of the whole model."""
BETA, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"

TEXT = """
layers          num_layers
hidden          hidden_size
heads           num_attention_heads
kv_heads        num_query_groups
head_dim        kv_channels
ffn             ffn_hidden_size
vocab           vocab_size
max_positions   seq_length
norm_epsilon    layernorm_epsilon                      positive number
tied            share_embeddings_and_output_weights
rope_theta      rotary_base                            integer if whole
rope_scaling    {fields}                               YaRN with growth
sliding_window  window_size                            must be null
-               transformer_layer_spec                 layer spec
-               attention_backend                      own attention
-               activation_func                        SiLU
-               position_embedding_type                = "yarn"
-               normalization                          = "RMSNorm"
-               gated_linear_unit                      = true
-               add_bias_linear                        = false
-               add_qkv_bias                           = false
-               num_moe_experts                        = null
-               mtp_num_layers                         = null
-               no_rope_freq                           = null
-               window_attn_skip_freq                  = null
-               seq_len_interpolation_factor           = null
"""
SILU = {"_target_": "torch.nn.functional.silu", "_call_": False}
SPEC = {"_target_": f"{MODULE}.ministral_layer_spec", "_call_": False}


def _growing(*_: str) -> Codec:
    """A codec of YaRN in the fields of the class, and of the growth of queries in the config of the whole."""

    def read(_: Spelled, context: Context) -> Mapping[str, Any]:
        whole = config_in(context.file.get(WHOLE) or {})
        ropes = (whole.get("text_config") or {}).get("rope_parameters") or {}
        scaling = read_yarn(context.file, FIELDS, context.where)
        if ropes.get(LENGTH) != scaling[LENGTH]:
            raise unsupported_field(
                context.where,
                f"{FIELDS[LENGTH]} = {short(scaling[LENGTH])}, and queries grow each {short(ropes.get(LENGTH))} "
                "positions: transformers has one number for both",
            )
        return {**scaling, BETA: positive_float(ropes.get(BETA), BETA, context.where)}

    def write(value: Mapping[str, Any] | None, context: Context) -> Spelled:
        positions = context.values["max_positions"]
        scaling = {name: of for name, of in plain(value or {}, positions).items() if name != "max_position_embeddings"}
        beta = scaling.pop(BETA, None)
        fields = yarn(scaling, FIELDS, positions) if scaling else None
        if fields is None or type(beta) not in (int, float):
            raise refusal(f"its rotary embeddings are YaRN, with {BETA}, and these are {short(value)}")
        ropes = {BETA: beta, LENGTH: fields[FIELDS[LENGTH]]}
        return {**fields, WHOLE: {"text_config": {"rope_parameters": ropes}}}

    return Codec(read, write)


def _without_window() -> Maker:
    def write(value: Any, _: Context) -> None:
        if value is not None:
            raise refusal(f"its attention has no window, and this model's {short(value)}")

    def read(spelled: Any, context: Context) -> None:
        if spelled is not None:
            raise unsupported_field(context.where, f"window_size = {short(spelled)} is not supported, only None")

    return single(read, write)


DEFAULTS = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 14336,
    "vocab_size": 32768,
    "seq_length": 32768,
    "layernorm_epsilon": 1e-5,
    "share_embeddings_and_output_weights": False,
    "rotary_base": 1000000,
    "position_embedding_type": "yarn",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "activation_func": SILU,
    "yarn_rotary_scaling_factor": 16.0,
    "yarn_original_max_position_embeddings": 16384,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 1.0,
}  # fmt: skip
"""The values of fields that a file does not have."""

PROVIDER = Provider(
    family="ministral3",
    target=f"{MODULE}.Ministral3ModelProvider",
    table=rows(
        TEXT.format(fields=" ".join((*FIELDS.values(), WHOLE))),
        {
            "positive number": single(lambda epsilon, context: positive_float(epsilon, "norm_epsilon", context.where)),
            "integer if whole": single(
                lambda base, context: positive_float(base, "rotary_base", context.where), write_base
            ),
            "YaRN with growth": _growing,
            "must be null": _without_window(),
            "layer spec": choice((SPEC, None)),
            "own attention": own_attention,
            "SiLU": choice((SILU, None)),
        },
    ),
    defaults=DEFAULTS,
    releases=LATER,
    tower="mistral3",
)
