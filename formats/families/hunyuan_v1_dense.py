"""Hunyuan (dense): Llama with norms on query and key heads, after the rotary embedding.

Facts: transformers models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py, 5.23.0. Rotary settings of type `dynamic` may
have an `alpha`, which scales the base at every sequence length.
"""

from formats.families.blocks import GATED_MLP, HEAD, NORMS, OPTIONAL_BIASES
from formats.families.family import Family

NORMS_AFTER_ROTATION = """
model.layers.{layer}.self_attn.query_layernorm.weight  query_norm: (half pair)
model.layers.{layer}.self_attn.key_layernorm.weight    key_norm: (half pair)
"""
TABLE = OPTIONAL_BIASES + NORMS_AFTER_ROTATION + GATED_MLP + NORMS + HEAD

FAMILY = Family(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    biases={"attention_bias": ("qkv_bias output_bias", False)},
    mha=True,
    only_here="megatron-core has its norms on query and key before their rotation",
)
