"""Helium 1: Llama with a rotary embedding of adjacent elements (transformers models/helium/modeling_helium.py, 5.23.0).

So the order of a head is `pair half` here (`rotate_half`). The output projection has no bias, and is `hidden` by
`hidden` (`HeliumAttention`), so that a model with another total width of its heads cannot be computed.
"""

from formats.families.blocks import HEAD, NORMS, OPTIONAL_QKV_BIASES
from formats.families.family import Family

MLP = """
model.layers.{layer}.mlp.gate_proj.weight        gate: ffn hidden
model.layers.{layer}.mlp.gate_proj.bias          gate_bias: ffn       mlp_bias
model.layers.{layer}.mlp.up_proj.weight          up: ffn hidden
model.layers.{layer}.mlp.up_proj.bias            up_bias: ffn         mlp_bias
model.layers.{layer}.mlp.down_proj.weight        down: hidden ffn
model.layers.{layer}.mlp.down_proj.bias          down_bias: hidden    mlp_bias
"""

FAMILY = Family(
    name="helium",
    architecture="HeliumForCausalLM",
    table=OPTIONAL_QKV_BIASES.replace("half pair", "pair half") + MLP + NORMS + HEAD,
    requires={"hidden_act": "silu"},
    rope_theta=100000.0,
    head_dim=128,
    square=True,
    defaults={"kv_heads": 20, "norm_epsilon": 1e-8},
    biases={"attention_bias": ("qkv_bias", False), "mlp_bias": ("mlp_bias", False)},
)
