"""Qwen3-MoE: Qwen3 with experts.

Facts: transformers models/qwen3_moe/modeling_qwen3_moe.py and conversion_mapping.py, 5.23.0.
"""

from formats.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    HEAD,
    NORMS,
    QK_NORMS,
    ROUTER,
    TORCHTITAN_ATTENTION,
    TORCHTITAN_ENDS,
    TORCHTITAN_EXPERTS,
    TORCHTITAN_NORMS,
)
from formats.families.family import Family

TABLE = ATTENTION + QK_NORMS + DENSE_MLP + EXPERTS + ROUTER + NORMS + HEAD

TORCHTITAN_QK_NORMS = """
layers.{layer}.attention.q_norm.weight    query_norm: (half pair)
layers.{layer}.attention.k_norm.weight    key_norm: (half pair)
"""
TORCHTITAN = TORCHTITAN_ATTENTION + TORCHTITAN_QK_NORMS + TORCHTITAN_EXPERTS + TORCHTITAN_NORMS + TORCHTITAN_ENDS
"""The native names of torchtitan. The router bias, which torchtitan's adapter leaves out, has no place in Qwen3-MoE."""

FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    switch="use_sliding_window",
    window_default=4096,
    keys={
        "experts": "num_experts num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "dense_layers": "mlp_only_layers",
        "router_normalized": "norm_topk_prob",
    },
    defaults={"experts": 128, "top_k": 8, "expert_ffn": 768, "router_normalized": False},
    router="softmax",
    native={"torchtitan": TORCHTITAN},
)
