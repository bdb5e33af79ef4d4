"""Jais 2: LayerNorm, biases in every linear layer, the square of ReLU (transformers models/jais2, 5.23.0)."""

from formats.families.blocks import ALL_BIASES, LAYER_NORM_HEAD, LAYER_NORMS
from formats.families.family import Family

MLP = """
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.up_proj.bias                    up_bias: ffn
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.mlp.down_proj.bias                  down_bias: hidden
"""
TABLE = ALL_BIASES + MLP + LAYER_NORMS + LAYER_NORM_HEAD

FAMILY = Family(
    name="jais2",
    architecture="Jais2ForCausalLM",
    divided=True,
    table=TABLE,
    requires={"attention_bias": True, "mlp_bias": True},
    nulls=("head_dim",),
    mha=True,
    keys={"norm_epsilon": "layer_norm_eps", "activation": "hidden_act"},
    defaults={"norm_epsilon": 1e-5, "activation": "relu2"},
    tokens={"eos_token_id": 150024},
)
