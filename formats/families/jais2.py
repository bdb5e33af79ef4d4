"""Jais 2: LayerNorm, biases everywhere, the square of ReLU (transformers models/jais2, 5.23.0)."""

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
model.layers.{layer}.self_attn.o_proj.bias               output_bias: hidden
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.up_proj.bias                    up_bias: ffn
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.mlp.down_proj.bias                  down_bias: hidden
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.input_layernorm.bias                input_norm_bias: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.layers.{layer}.post_attention_layernorm.bias       post_norm_bias: hidden
model.norm.weight                                        final_norm: hidden
model.norm.bias                                          final_norm_bias: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="jais2",
    architecture="Jais2ForCausalLM",
    table=TABLE,
    requires={"attention_bias": True, "mlp_bias": True},
    mha=True,
    keys={"norm_epsilon": "layer_norm_eps", "activation": "hidden_act"},
    defaults={"norm_epsilon": 1e-5, "activation": "relu2"},
    tokens={"eos_token_id": 150024},
)
