"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of them for all tokens.

Facts: transformers models/qwen2_moe/modeling_qwen2_moe.py and conversion_mapping.py, 5.23.0, which fuses the experts of a
layer in memory.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                      embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                   query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_proj.bias                     query_bias: (group head half pair)
model.layers.{layer}.self_attn.k_proj.weight                   key: (group half pair) hidden
model.layers.{layer}.self_attn.k_proj.bias                     key_bias: (group half pair)
model.layers.{layer}.self_attn.v_proj.weight                   value: (group dim) hidden
model.layers.{layer}.self_attn.v_proj.bias                     value_bias: (group dim)
model.layers.{layer}.self_attn.o_proj.weight                   output: hidden (group head dim)
model.layers.{layer}.mlp.gate_proj.weight                      gate: ffn hidden                        dense
model.layers.{layer}.mlp.up_proj.weight                        up: ffn hidden                          dense
model.layers.{layer}.mlp.down_proj.weight                      down: hidden ffn                        dense
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight     expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight     expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                  expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                     expert_down: expert hidden expert_ffn   sparse fused
model.layers.{layer}.mlp.shared_expert.gate_proj.weight        shared_gate: shared_ffn hidden          sparse
model.layers.{layer}.mlp.shared_expert.up_proj.weight          shared_up: shared_ffn hidden            sparse
model.layers.{layer}.mlp.shared_expert.down_proj.weight        shared_down: hidden shared_ffn          sparse
model.layers.{layer}.mlp.shared_expert_gate.weight             shared_router: () hidden                sparse
model.layers.{layer}.input_layernorm.weight                    input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight           post_norm: hidden
model.norm.weight                                              final_norm: hidden
lm_head.weight                                                 head: vocab hidden          untied
lm_head.weight                                                 embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "use_sliding_window": False, "qkv_bias": True},
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
