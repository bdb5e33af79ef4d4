"""ERNIE 4.5 (dense): Llama whose rotary embedding turns neighbours (transformers models/ernie4_5, 5.23.0).

So here the two halves of a head lie pair by pair (modeling_ernie4_5.py `rotate_half`).
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head pair half) hidden
model.layers.{layer}.self_attn.k_proj.weight             key: (group pair half) hidden
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
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
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "use_bias": False},
    rope_theta=500000.0,
    head_dim=128,
    defaults={"tied": True},
)
