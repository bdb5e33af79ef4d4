"""DeepSeek-V3 and R1: the attention of DeepSeek-V2, experts after a sigmoid.

Facts: transformers 5.23.0, models/deepseek_v3/modeling_deepseek_v3.py: the layer behind the last, which predicts a
second token, is not loaded of a model with 61 layers.
"""

from formats.families import Family
from formats.layout import rules

TABLE = """
model.embed_tokens.weight                                      embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                   latent_query: (group query_dim) hidden    uncompressed
model.layers.{layer}.self_attn.q_a_proj.weight                 query_down: query_rank hidden           compressed
model.layers.{layer}.self_attn.q_a_layernorm.weight            query_latent_norm: query_rank           compressed
model.layers.{layer}.self_attn.q_b_proj.weight                 query_up: (group query_dim) query_rank    compressed
model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight       latent_down: joint_dim hidden
model.layers.{layer}.self_attn.kv_a_layernorm.weight           latent_norm: latent_rank
model.layers.{layer}.self_attn.kv_b_proj.weight                latent_up: (group up_dim) latent_rank
model.layers.{layer}.self_attn.o_proj.weight                   output: hidden (group head dim)
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
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tensors=rules(TABLE),
    drops=(r"model\.layers\.61\..*",),
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    mha=True,
    keys={
        "head_dim": "v_head_dim",
        "query_rank": "q_lora_rank",
        "latent_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
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
        "head_dim": 128,
        "latent_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "experts": 256,
        "top_k": 8,
        "expert_ffn": 2048,
        "shared_ffn": 1,
        "dense_layers": 3,
        "router_normalized": True,
        "router_scale": 2.5,
        "router_groups": 8,
        "router_top_groups": 4,
    },
    router="sigmoid",
)
