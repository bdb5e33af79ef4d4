"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts and a shared expert.

Facts: transformers models/qwen2_moe/modeling_qwen2_moe.py and conversion_mapping.py, 5.23.0, which fuses the experts of
a layer in memory.
"""

from formats.families.blocks import BIASED_ATTENTION, DENSE_MLP, EXPERTS, GATED_SHARED_EXPERT, HEAD, NORMS, ROUTER
from formats.families.family import Family

TABLE = BIASED_ATTENTION + DENSE_MLP + ROUTER + EXPERTS + GATED_SHARED_EXPERT + NORMS + HEAD

FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "use_sliding_window": False, "qkv_bias": True},
    switch="use_sliding_window",
    window_default=4096,
    keys={
        "experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "shared_ffn": "shared_expert_intermediate_size",
        "dense_layers": "mlp_only_layers",
        "router_normalized": "norm_topk_prob",
    },
    defaults={"experts": 60, "top_k": 4, "expert_ffn": 1408, "router_normalized": False},
    router="softmax",
)
