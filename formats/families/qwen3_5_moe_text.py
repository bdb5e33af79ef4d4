"""Qwen3.5 with experts (text) (transformers 5.23.0, models/qwen3_5_moe/modeling_qwen3_5_moe.py)."""

from formats.families.blocks import (
    EMBEDDING,
    HEAD,
    NORMS,
    TORCHTITAN_ENDS,
    TORCHTITAN_MIXTURE,
    TORCHTITAN_NORMS,
    TORCHTITAN_SHARED_EXPERTS,
    second,
)
from formats.families.family import Family
from formats.families.qwen3_5_text import LINEAR, TORCHTITAN_MIXERS
from formats.families.qwen3_next import DEFAULTS, EXPERT_KEYS, GATED_ATTENTION, JOIN, KEYS, MIXTURE, MTP

BLOCK = GATED_ATTENTION + MIXTURE + NORMS
TABLE = EMBEDDING + LINEAR + BLOCK + HEAD + JOIN + second(BLOCK, MTP)

TORCHTITAN_GATE = """
layers.{layer}.moe.shared_experts.gate.weight    shared_router: () hidden    sparse
"""
TORCHTITAN_EXPERTS = TORCHTITAN_MIXTURE + TORCHTITAN_SHARED_EXPERTS + TORCHTITAN_GATE
TORCHTITAN = TORCHTITAN_MIXERS + TORCHTITAN_EXPERTS + TORCHTITAN_NORMS + TORCHTITAN_ENDS
"""The native names of torchtitan, as of the dense Qwen3.5."""

FAMILY = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    head_dim=256,
    centred=True,
    keys={"ffn": "moe_intermediate_size", **KEYS, **EXPERT_KEYS},
    defaults={**DEFAULTS, "ffn": 512, "experts": 256, "top_k": 8, "expert_ffn": 512, "shared_ffn": 512},
    router="softmax",
)
