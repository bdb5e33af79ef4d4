"""dots.llm1: the attention of Qwen3 with the experts of DeepSeek-V3, some of them for all tokens.

Facts: transformers models/dots1/modeling_dots1.py and conversion_mapping.py, 5.23.0.
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
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight     expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight     expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                  expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                     expert_down: expert hidden expert_ffn   sparse fused
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse
model.layers.{layer}.mlp.gate.e_score_correction_bias          router_bias: expert                     sparse
model.layers.{layer}.mlp.shared_experts.gate_proj.weight       shared_gate: shared_ffn hidden          sparse
model.layers.{layer}.mlp.shared_experts.up_proj.weight         shared_up: shared_ffn hidden            sparse
model.layers.{layer}.mlp.shared_experts.down_proj.weight       shared_down: hidden shared_ffn          sparse
model.layers.{layer}.input_layernorm.weight                    input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight           post_norm: hidden
model.norm.weight                                              final_norm: hidden
lm_head.weight                                                 head: vocab hidden          untied
lm_head.weight                                                 embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    mha=True,
    keys={
        "experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "shared_ffn": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "router_normalized": "norm_topk_prob",
        "router_scale": "routed_scaling_factor",
        "router_groups": "n_group",
        "router_top_groups": "topk_group",
    },
    defaults={
        "expert_ffn": 1408,
        "router_normalized": False,
        "router_scale": 1.0,
        "router_groups": 1,
        "router_top_groups": 1,
    },
    router="sigmoid",
    window_default=4096,
    full_until=("max_window_layers", 62),
)
