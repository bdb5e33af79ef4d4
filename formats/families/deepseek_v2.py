"""DeepSeek-V2: keys and values from a latent (MLA), experts with a softmax router (transformers, 5.23.0).

Facts: models/deepseek_v2/modeling_deepseek_v2.py: the last elements of a head rotate, in adjacent pairs; the router
ignores norm_topk_prob. DeepSeek-V2-Lite has queries without a latent, and chooses the best of all experts; the large
models choose the best experts of the groups whose best expert has the highest score. Megatron ranks a group by as many
experts as are chosen per group, which is two for the large models: it can only hold models where that number is one.
"""

from formats.families.blocks import DENSE_MLP, EMBEDDING, EXPERTS, HEAD, NORMS, ROUTER, SHARED_EXPERTS
from formats.families.family import Family

LATENT = """
model.layers.{layer}.self_attn.q_proj.weight                   latent_query: (group query_dim) hidden    uncompressed
model.layers.{layer}.self_attn.q_a_proj.weight                 query_down: query_rank hidden           compressed
model.layers.{layer}.self_attn.q_a_layernorm.weight            query_latent_norm: query_rank           compressed
model.layers.{layer}.self_attn.q_b_proj.weight                 query_up: (group query_dim) query_rank    compressed
model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight       latent_down: joint_dim hidden
model.layers.{layer}.self_attn.kv_a_layernorm.weight           latent_norm: latent_rank
model.layers.{layer}.self_attn.kv_b_proj.weight                latent_up: (group up_dim) latent_rank
model.layers.{layer}.self_attn.o_proj.weight                   output: hidden (group head dim)
"""
LATENT_ATTENTION = EMBEDDING + LATENT
TABLE = LATENT_ATTENTION + DENSE_MLP + EXPERTS + ROUTER + SHARED_EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    divided=True,
    table=TABLE,
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
    },
    mha=True,
    nulls=("n_group", "topk_group"),
    keys={
        "head_dim": "v_head_dim",
        "query_rank": "q_lora_rank",
        "latent_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "experts": "n_routed_experts num_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "shared_ffn": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "router_normalized": "norm_topk_prob",
        "router_scale": "routed_scaling_factor",
        "router_groups": "topk_method",
        "router_top_groups": "topk_method",
    },
    defaults={
        "head_dim": 128,
        "query_rank": 1536,
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
