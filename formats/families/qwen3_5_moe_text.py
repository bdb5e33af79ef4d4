"""Qwen3.5 with experts (text) (transformers 5.23.0, models/qwen3_5_moe/modeling_qwen3_5_moe.py)."""

from formats.families.blocks import EMBEDDING, HEAD, NORMS, second
from formats.families.family import Family
from formats.families.qwen3_5_text import LINEAR
from formats.families.qwen3_next import DEFAULTS, EXPERT_KEYS, GATED_ATTENTION, JOIN, KEYS, MIXTURE, MTP

BLOCK = GATED_ATTENTION + MIXTURE + NORMS
TABLE = EMBEDDING + LINEAR + BLOCK + HEAD + JOIN + second(BLOCK, MTP)

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
