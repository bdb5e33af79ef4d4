"""Apertus: norms on query and key heads, an MLP without a gate, and the activation xIELU, which has weights.

Facts: transformers models/apertus/modeling_apertus.py and activations.py `XIELUActivation`, 5.23.0. Two of the four
numbers of xIELU are buffers of shape ().
"""

from formats.families.blocks import HEAD, OPTIONAL_BIASES, QK_NORMS
from formats.families.family import Family

XIELU_MLP = """
model.layers.{layer}.mlp.up_proj.weight                up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight              down: hidden ffn
model.layers.{layer}.mlp.act_fn.alpha_p                xielu_positive: unit
model.layers.{layer}.mlp.act_fn.alpha_n                xielu_negative: unit
model.layers.{layer}.mlp.act_fn.beta                   xielu_beta:
model.layers.{layer}.mlp.act_fn.eps                    xielu_eps:
"""
NORMS = """
model.layers.{layer}.attention_layernorm.weight        input_norm: hidden
model.layers.{layer}.feedforward_layernorm.weight      post_norm: hidden
"""
TABLE = OPTIONAL_BIASES + QK_NORMS + XIELU_MLP + NORMS + HEAD

FAMILY = Family(
    name="apertus",
    architecture="ApertusForCausalLM",
    table=TABLE,
    requires={"hidden_act": "xielu"},
    rope_theta=12000000.0,
    mha=True,
    biases={"attention_bias": ("qkv_bias output_bias", False)},
    defaults={
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
    only_here="megatron-core has no xIELU",
)
