"""Nemotron 3 (8B), 4 and Minitron: LayerNorm, the square of ReLU, half of a head rotates.

Facts: transformers models/nemotron/modeling_nemotron.py, 5.23.0. The weights of its norms are stored less one, as they
are in Megatron, where it comes from.
"""

from formats.families.blocks import ATTENTION, PLAIN_MLP
from formats.families.family import Family

NORMS_AND_HEAD = """
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.input_layernorm.bias                input_norm_bias: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.layers.{layer}.post_attention_layernorm.bias       post_norm_bias: hidden
model.norm.weight                                        final_norm: hidden
model.norm.bias                                          final_norm_bias: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""
TABLE = ATTENTION + PLAIN_MLP + NORMS_AND_HEAD

FAMILY = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    table=TABLE,
    requires={"attention_bias": False, "mlp_bias": False},
    centred=True,
    keys={"norm_epsilon": "norm_eps", "activation": "hidden_act", "rotary_fraction": "partial_rotary_factor"},
    defaults={"norm_epsilon": 1e-5, "activation": "relu2", "rotary_fraction": 0.5},
)
