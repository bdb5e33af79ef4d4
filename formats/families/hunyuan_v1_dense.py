"""Hunyuan dense: Llama with norms on query and key heads, after their rotation.

Facts: transformers models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py, 5.23.0. Rotary settings of the kind `dynamic`
may have an `alpha`, which stretches the base for good.
"""

from formats.families.blocks import GATED_MLP, HEAD, NORMS
from formats.families.family import Family

ATTENTION_WITH_NORMS = """
model.embed_tokens.weight                              embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight           query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_proj.bias             query_bias: (group head half pair)      qkv_bias
model.layers.{layer}.self_attn.k_proj.weight           key: (group half pair) hidden
model.layers.{layer}.self_attn.k_proj.bias             key_bias: (group half pair)             qkv_bias
model.layers.{layer}.self_attn.v_proj.weight           value: (group dim) hidden
model.layers.{layer}.self_attn.v_proj.bias             value_bias: (group dim)                 qkv_bias
model.layers.{layer}.self_attn.o_proj.weight           output: hidden (group head dim)
model.layers.{layer}.self_attn.o_proj.bias             output_bias: hidden                     output_bias
model.layers.{layer}.self_attn.query_layernorm.weight  query_norm: (half pair)
model.layers.{layer}.self_attn.key_layernorm.weight    key_norm: (half pair)
"""
TABLE = ATTENTION_WITH_NORMS + GATED_MLP + NORMS + HEAD

FAMILY = Family(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    biases={"attention_bias": ("qkv_bias output_bias", False)},
    mha=True,
    only_here="megatron-core has its norms on query and key before their rotation",
)
