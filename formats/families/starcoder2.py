"""StarCoder2: LayerNorm, biases everywhere, an MLP without a gate (transformers models/starcoder2, 5.23.0)."""

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
model.layers.{layer}.mlp.c_fc.weight                     up: ffn hidden
model.layers.{layer}.mlp.c_fc.bias                       up_bias: ffn
model.layers.{layer}.mlp.c_proj.weight                   down: hidden ffn
model.layers.{layer}.mlp.c_proj.bias                     down_bias: hidden
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
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    general=True,
    table=TABLE,
    requires={"use_bias": True},
    window="sliding_window",
    keys={"norm_epsilon": "norm_epsilon", "activation": "hidden_act"},
    defaults={"norm_epsilon": 1e-5, "activation": "gelu_pytorch_tanh", "tied": True},
    tokens={"bos_token_id": 50256, "eos_token_id": 50256},
)
