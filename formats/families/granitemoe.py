"""Granite 3 with experts: the attention and multipliers of Granite, experts in one matrix for each half of the MLP.

Facts: transformers models/granitemoe/modeling_granitemoe.py and conversion_mapping.py, 5.23.0: gate and up are the two
halves of the rows of `input_linear`; in memory they have other names.
"""

from dataclasses import replace

from formats.families import granite

TABLE = """
model.embed_tokens.weight                                        embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight                     query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight                     key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight                     value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight                     output: hidden (group head dim)
model.layers.{layer}.input_layernorm.weight                      input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight             post_norm: hidden
model.layers.{layer}.block_sparse_moe.router.layer.weight        router: expert hidden                   sparse separate
model.layers.{layer}.block_sparse_moe.router.weight              router: expert hidden                   sparse fused
model.layers.{layer}.block_sparse_moe.input_linear.weight        expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse separate
model.layers.{layer}.block_sparse_moe.experts.gate_up_proj       expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.block_sparse_moe.output_linear.weight       expert_down: expert hidden expert_ffn   sparse separate
model.layers.{layer}.block_sparse_moe.experts.down_proj          expert_down: expert hidden expert_ffn   sparse fused
model.norm.weight                                                final_norm: hidden
lm_head.weight                                                   head: vocab hidden          untied
lm_head.weight                                                   embedding: vocab hidden     tied optional
"""

FAMILY = replace(
    granite.FAMILY,
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    keys={"experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    defaults={"experts": 8, "top_k": 2},
    router="softmax",
)
