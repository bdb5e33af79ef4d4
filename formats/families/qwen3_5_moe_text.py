"""Qwen3.5 with experts, its language model (transformers 5.23.0, models/qwen3_5_moe/modeling_qwen3_5_moe.py)."""

from formats.families.blocks import HEAD, NORMS
from formats.families.family import Family
from formats.families.qwen3_5_text import MIXERS
from formats.families.qwen3_next import DEFAULTS, EMBEDDING, EXPERT_KEYS, KEYS, MIXTURE

TABLE = EMBEDDING + MIXERS + MIXTURE + NORMS + HEAD

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
