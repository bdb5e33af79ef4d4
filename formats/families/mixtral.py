"""Mixtral: Mistral with experts for its MLP (transformers models/mixtral/modeling_mixtral.py, 5.23.0).

transformers 5 fuses the experts of a layer in memory, and writes the Hub's names (conversion_mapping.py).
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                              embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                           query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight                           key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight                           value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight                           output: hidden (group head dim)
model.layers.{layer}.block_sparse_moe.gate.weight                      router: expert hidden                   sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight       expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight       expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.gate.weight                                   router: expert hidden                   sparse fused
model.layers.{layer}.mlp.experts.gate_up_proj                          expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                             expert_down: expert hidden expert_ffn   sparse fused
model.layers.{layer}.input_layernorm.weight                            input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight                   post_norm: hidden
model.norm.weight                                                      final_norm: hidden
lm_head.weight                                                         head: vocab hidden          untied
lm_head.weight                                                         embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    rope_theta=1000000.0,
    window="sliding_window",
    keys={"experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    defaults={"experts": 8, "top_k": 2},
    router="softmax",
)
