"""Granite 3: the tensors of Llama, and four multipliers (transformers models/granite/modeling_granite.py, 5.23.0)."""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    table=ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    own={"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    only_here="megatron-core multiplies neither embeddings nor residuals nor logits",
    mha=True,
)
