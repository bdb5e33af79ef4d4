"""Hunyuan 3: dots.llm1 with names of its own for the router and what is shared.

Facts: transformers models/hy_v3/modeling_hy_v3.py and conversion_mapping.py, 5.23.0: what it renames of the Hub's
tensors, it fuses too; the layer behind the last is not loaded of a model with 80 layers. `enable_moe_fp32_combine` is a
matter of precision alone.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                      embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                   query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight                   key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight                   value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight                   output: hidden (group head dim)
model.layers.{layer}.self_attn.q_norm.weight                   query_norm: (half pair)
model.layers.{layer}.self_attn.k_norm.weight                   key_norm: (half pair)
model.layers.{layer}.mlp.gate_proj.weight                      gate: ffn hidden                        dense
model.layers.{layer}.mlp.up_proj.weight                        up: ffn hidden                          dense
model.layers.{layer}.mlp.down_proj.weight                      down: hidden ffn                        dense
model.layers.{layer}.mlp.router.gate.weight                    router: expert hidden                   sparse separate
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse fused
model.layers.{layer}.mlp.expert_bias                           router_bias: expert                     sparse separate
model.layers.{layer}.mlp.e_score_correction_bias               router_bias: expert                     sparse fused
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight     expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight     expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                  expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                     expert_down: expert hidden expert_ffn   sparse fused
model.layers.{layer}.mlp.shared_mlp.gate_proj.weight           shared_gate: shared_ffn hidden          sparse separate
model.layers.{layer}.mlp.shared_mlp.up_proj.weight             shared_up: shared_ffn hidden            sparse separate
model.layers.{layer}.mlp.shared_mlp.down_proj.weight           shared_down: hidden shared_ffn          sparse separate
model.layers.{layer}.mlp.shared_experts.gate_proj.weight       shared_gate: shared_ffn hidden          sparse fused
model.layers.{layer}.mlp.shared_experts.up_proj.weight         shared_up: shared_ffn hidden            sparse fused
model.layers.{layer}.mlp.shared_experts.down_proj.weight       shared_down: hidden shared_ffn          sparse fused
model.layers.{layer}.input_layernorm.weight                    input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight           post_norm: hidden
model.norm.weight                                              final_norm: hidden
lm_head.weight                                                 head: vocab hidden          untied
lm_head.weight                                                 embedding: vocab hidden     tied optional
"""

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
