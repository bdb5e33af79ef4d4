"""OLMoE: Llama with experts, and norms over all queries and all keys (transformers models/olmoe, 5.23.0)."""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                      embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                   query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight                   key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight                   value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight                   output: hidden (group head dim)
model.layers.{layer}.self_attn.q_norm.weight                   query_width_norm: (group head half pair)
model.layers.{layer}.self_attn.k_norm.weight                   key_width_norm: (group half pair)
model.layers.{layer}.mlp.gate.weight                           router: expert hidden                   sparse
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight     expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight     expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                  expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                     expert_down: expert hidden expert_ffn   sparse fused
model.layers.{layer}.input_layernorm.weight                    input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight           post_norm: hidden
model.norm.weight                                              final_norm: hidden
lm_head.weight                                                 head: vocab hidden          untied
lm_head.weight                                                 embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False, "sliding_window": None},
    mha=True,
    keys={
        "experts": "num_experts num_local_experts",
        "top_k": "num_experts_per_tok",
        "router_normalized": "norm_topk_prob",
    },
    defaults={"experts": 64, "top_k": 8, "router_normalized": False},
    own={"clip_qkv": None},
    only_here="megatron-core has no norms over all heads of a token, and clips neither queries nor keys nor values",
    router="softmax",
    tokens={"eos_token_id": 50279},
)
