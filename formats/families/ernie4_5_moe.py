"""ERNIE 4.5 (text): experts after a softmax whose router has a bias, neighbours that turn.

Facts: transformers models/ernie4_5_moe/modeling_ernie4_5_moe.py and conversion_mapping.py, 5.23.0: what predicts a second
token is not loaded; `apply_rotary_pos_emb` turns neighbours. megatron-core 0.16.1, transformer/transformer_config.py.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                      embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                   query: (group head pair half) hidden
model.layers.{layer}.self_attn.k_proj.weight                   key: (group pair half) hidden
model.layers.{layer}.self_attn.v_proj.weight                   value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight                   output: hidden (group head dim)
model.layers.{layer}.mlp.gate_proj.weight                      gate: ffn hidden                        dense
model.layers.{layer}.mlp.up_proj.weight                        up: ffn hidden                          dense
model.layers.{layer}.mlp.down_proj.weight                      down: hidden ffn                        dense
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse
model.layers.{layer}.mlp.moe_statics.e_score_correction_bias       router_choice_bias: () expert           sparse separate
model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias  router_choice_bias: () expert           sparse fused
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight     expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight     expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                  expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                     expert_down: expert hidden expert_ffn   sparse fused
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
