"""StarCoder2: LayerNorm, biases in every linear layer, MLP without a gate (transformers models/starcoder2, 5.23.0)."""

from formats.families.blocks import ALL_BIASES, LAYER_NORM_HEAD, LAYER_NORMS
from formats.families.family import Family

MLP = """
model.layers.{layer}.mlp.c_fc.weight                     up: ffn hidden
model.layers.{layer}.mlp.c_fc.bias                       up_bias: ffn
model.layers.{layer}.mlp.c_proj.weight                   down: hidden ffn
model.layers.{layer}.mlp.c_proj.bias                     down_bias: hidden
"""
TABLE = ALL_BIASES + MLP + LAYER_NORMS + LAYER_NORM_HEAD

FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    general=True,
    table=TABLE,
    requires={"use_bias": True},
    nulls=("head_dim",),
    window="sliding_window",
    keys={"norm_epsilon": "norm_epsilon", "activation": "hidden_act"},
    defaults={"norm_epsilon": 1e-5, "activation": "gelu_pytorch_tanh", "tied": True},
    tokens={"bos_token_id": 50256, "eos_token_id": 50256},
)
