"""GLM-4 (dense): four norms per layer, fused gate and up, biases on query, key and value; half of each head rotates.

Facts: transformers models/glm4/modeling_glm4.py and configuration_glm4.py, 5.23.0. The rotary embedding rotates
adjacent elements in the part of a head that rotates, which no layout here describes: `half pair` is only the order of
a head.
"""

from formats.families.blocks import FUSED_MLP, HEAD, OPTIONAL_QKV_BIASES
from formats.families.family import Family

FOUR_NORMS = """
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.layers.{layer}.post_self_attn_layernorm.weight     output_norm: hidden
model.layers.{layer}.post_mlp_layernorm.weight           down_norm: hidden
"""
TABLE = OPTIONAL_QKV_BIASES + FUSED_MLP + FOUR_NORMS + HEAD

FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    head_dim=128,
    biases={"attention_bias": ("qkv_bias", True)},
    keys={"rotary_fraction": "partial_rotary_factor"},
    defaults={"rotary_fraction": 0.5},
    only_here="megatron-core has no norms after attention and MLP",
    tokens={"pad_token_id": 151329},
)
