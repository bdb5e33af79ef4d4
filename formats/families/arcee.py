"""Arcee (AFM): Llama with an MLP without a gate, and the square of ReLU (transformers models/arcee, 5.23.0)."""

from formats.families.blocks import ATTENTION, HEAD, NORMS, PLAIN_MLP
from formats.families.family import Family

TABLE = ATTENTION + PLAIN_MLP + NORMS + HEAD

FAMILY = Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    divided=True,
    table=TABLE,
    requires={"attention_bias": False, "mlp_bias": False},
    nulls=("head_dim",),
    mha=True,
    keys={"activation": "hidden_act"},
    defaults={"activation": "relu2"},
    tokens={"bos_token_id": 128000, "eos_token_id": 128001},
)
