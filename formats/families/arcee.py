"""Arcee (AFM): Llama with an MLP without a gate, and the square of ReLU (transformers models/arcee, 5.23.0)."""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight             key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.norm.weight                                        final_norm: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    table=TABLE,
    requires={"attention_bias": False, "mlp_bias": False},
    mha=True,
    keys={"activation": "hidden_act"},
    defaults={"activation": "relu2"},
    tokens={"bos_token_id": 128000, "eos_token_id": 128001},
)
