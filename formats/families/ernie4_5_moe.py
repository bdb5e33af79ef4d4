"""ERNIE 4.5 with experts (text): a softmax router with a bias, and a rotary embedding of adjacent elements.

Facts: transformers models/ernie4_5_moe/modeling_ernie4_5_moe.py and conversion_mapping.py, 5.23.0: the layers that
predict a second token (MTP) are not loaded; `apply_rotary_pos_emb` rotates adjacent elements. megatron-core 0.16.1,
transformer/transformer_config.py.
"""

from formats.families.blocks import DENSE_MLP, EXPERTS, HEAD, NORMS, PAIRED_ATTENTION, SHARED_EXPERTS
from formats.families.family import Family

ROUTER = """
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse
model.layers.{layer}.mlp.moe_statics.e_score_correction_bias       router_choice_bias: () expert           sparse separate
model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias  router_choice_bias: () expert           sparse fused
"""
TABLE = PAIRED_ATTENTION + DENSE_MLP + ROUTER + EXPERTS + SHARED_EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    table=TABLE,
    drops=(".*mtp.*",),
    requires={"hidden_act": "silu", "use_bias": False},
    rope_theta=500000.0,
    keys={
        "experts": "moe_num_experts num_experts",
        "top_k": "moe_k num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "shared_ffn": "moe_num_shared_experts",
        "dense_layers": "moe_layer_start_index",
    },
    defaults={"tied": True, "experts": 64, "top_k": 6, "expert_ffn": 1536, "shared_ffn": 2, "dense_layers": 1},
    own={"moe_norm_min": 1e-12},
    only_here="megatron-core adds a bias to a router's scores after a sigmoid alone, not after a softmax",
    router="softmax",
)
