"""dots.llm1: the attention of Qwen3 with the experts of DeepSeek-V3, of which some are shared.

Facts: transformers models/dots1/modeling_dots1.py and conversion_mapping.py, 5.23.0.
"""

from formats.families.blocks import ATTENTION, EXPERT_KEYS, HEAD, MIXTURE, NORMS, QK_NORMS, ROUTER_DEFAULTS
from formats.families.family import Family

TABLE = ATTENTION + QK_NORMS + MIXTURE + NORMS + HEAD

FAMILY = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    keys={
        **EXPERT_KEYS,
        "shared_ffn": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
    },
    defaults={
        "kv_heads": 32,
        "expert_ffn": 1408,
        **ROUTER_DEFAULTS,
        "router_normalized": False,
    },
    router="sigmoid",
    window_default=4096,
    full_until=("max_window_layers", 62),
)
