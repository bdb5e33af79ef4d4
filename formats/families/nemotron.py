"""Nemotron 3 (8B), 4 and Minitron: LayerNorm, the square of ReLU, half of each head rotates.

Facts: transformers models/nemotron/modeling_nemotron.py, 5.23.0. The weights of norms are stored minus 1, as in
Megatron, from which the model comes.
"""

from formats.families.blocks import ATTENTION, LAYER_NORM_HEAD, LAYER_NORMS, PLAIN_MLP
from formats.families.family import Family

TABLE = ATTENTION + PLAIN_MLP + LAYER_NORMS + LAYER_NORM_HEAD

FAMILY = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    table=TABLE,
    requires={"attention_bias": False, "mlp_bias": False},
    nulls=("head_dim",),
    centred=True,
    keys={"norm_epsilon": "norm_eps", "activation": "hidden_act", "rotary_fraction": "partial_rotary_factor"},
    defaults={"norm_epsilon": 1e-5, "activation": "relu2", "rotary_fraction": 0.5},
)
