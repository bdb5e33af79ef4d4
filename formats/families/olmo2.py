"""OLMo 2: norms behind attention and MLP, and over all queries and all keys of a token.

Facts: transformers models/olmo2/modeling_olmo2.py, 5.23.0.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight             key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.self_attn.q_norm.weight             query_width_norm: (group head half pair)
model.layers.{layer}.self_attn.k_norm.weight             key_width_norm: (group half pair)
model.layers.{layer}.mlp.gate_proj.weight                gate: ffn hidden
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.post_attention_layernorm.weight     output_norm: hidden
model.layers.{layer}.post_feedforward_layernorm.weight   down_norm: hidden
model.norm.weight                                        final_norm: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    only_here="megatron-core has no norms behind attention and MLP, and none over all heads of a token",
    mha=True,
    tokens={"eos_token_id": 50279},
)
