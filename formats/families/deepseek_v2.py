"""DeepSeek-V2: keys and values out of a latent, experts after a softmax (transformers, 5.23.0).

Facts: models/deepseek_v2/modeling_deepseek_v2.py: the elements of a head that rotate are its last, neighbours are
turned; its router heeds no norm_topk_prob. DeepSeek-V2-Lite has queries without a latent, and takes the best experts;
the large one takes them out of groups that it ranks by their best expert.
"""

from formats.families.family import Family

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
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    table=TABLE,
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
        "topk_method": "greedy",
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
    },
    defaults={
        "head_dim": 128,
        "latent_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "experts": 64,
        "expert_ffn": 1407,
        "shared_ffn": 2,
        "router_normalized": False,
        "router_scale": 1.0,
    },
    router="softmax",
)
