"""Hunyuan 3: dots.llm1 with names of its own for the router and the shared experts.

Facts: transformers models/hy_v3/modeling_hy_v3.py and conversion_mapping.py, 5.23.0: tensors have either the Hub's
names and separate experts, or the names in memory and fused experts; the layer after the last is not loaded in a model
with 80 layers. `enable_moe_fp32_combine` only affects precision.
"""

from formats.families.blocks import ATTENTION, DENSE_MLP, EXPERTS, HEAD, NORMS, QK_NORMS
from formats.families.family import Family

ROUTER = """
model.layers.{layer}.mlp.router.gate.weight                    router: expert hidden                   sparse separate
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse fused
model.layers.{layer}.mlp.expert_bias                           router_bias: expert                     sparse separate
model.layers.{layer}.mlp.e_score_correction_bias               router_bias: expert                     sparse fused
"""
SHARED = """
model.layers.{layer}.mlp.shared_mlp.gate_proj.weight           shared_gate: shared_ffn hidden          sparse separate
model.layers.{layer}.mlp.shared_mlp.up_proj.weight             shared_up: shared_ffn hidden            sparse separate
model.layers.{layer}.mlp.shared_mlp.down_proj.weight           shared_down: hidden shared_ffn          sparse separate
model.layers.{layer}.mlp.shared_experts.gate_proj.weight       shared_gate: shared_ffn hidden          sparse fused
model.layers.{layer}.mlp.shared_experts.up_proj.weight         shared_up: shared_ffn hidden            sparse fused
model.layers.{layer}.mlp.shared_experts.down_proj.weight       shared_down: hidden shared_ffn          sparse fused
"""
TABLE = ATTENTION + QK_NORMS + DENSE_MLP + ROUTER + EXPERTS + SHARED + NORMS + HEAD

FAMILY = Family(
    name="hy_v3",
    architecture="HYV3ForCausalLM",
    table=TABLE,
    drops=(r"model\.layers\.80\..*",),
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
        "route_norm": True,
        "first_k_dense_replace": 1,
    },
    rope_theta=11158840.0,
    head_dim=128,
    keys={
        "experts": "num_experts num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "shared_ffn": "num_shared_experts",
        "dense_layers": "mlp_layer_types",
        "router_scale": "router_scaling_factor",
    },
    defaults={
        "experts": 192,
        "top_k": 8,
        "expert_ffn": 1536,
        "shared_ffn": 1,
        "dense_layers": 1,
        "router_scale": 2.826,
    },
    router="sigmoid",
)
