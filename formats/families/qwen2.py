"""Qwen2 and Qwen2.5: Llama with biases on query, key and value (transformers models/qwen2/modeling_qwen2.py, 5.23.0)."""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_proj.bias               query_bias: (group head half pair)
model.layers.{layer}.self_attn.k_proj.weight             key: (group half pair) hidden
model.layers.{layer}.self_attn.k_proj.bias               key_bias: (group half pair)
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
model.layers.{layer}.self_attn.v_proj.bias               value_bias: (group dim)
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.mlp.gate_proj.weight                gate: ffn hidden
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.norm.weight                                        final_norm: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    switch="use_sliding_window",
    window_default=4096,
    full_until=("max_window_layers", 28),
)
