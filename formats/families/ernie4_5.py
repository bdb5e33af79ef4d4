"""ERNIE 4.5 (dense): Llama whose rotary embedding rotates adjacent elements (transformers models/ernie4_5, 5.23.0).

So the order of a head is `pair half` here (modeling_ernie4_5.py `rotate_half`).
"""

from formats.families.blocks import GATED_MLP, HEAD, NORMS, PAIRED_ATTENTION
from formats.families.family import Family

TABLE = PAIRED_ATTENTION + GATED_MLP + NORMS + HEAD

FAMILY = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "use_bias": False},
    nulls=("head_dim", "num_key_value_heads"),
    rope_theta=500000.0,
    head_dim=128,
    defaults={"tied": True},
)
