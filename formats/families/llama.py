"""Llama 1, 2 and 3, and every model with their tensors (transformers models/llama/modeling_llama.py, 5.23.0)."""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_proj.bias               query_bias: (group head half pair)  qkv_bias
model.layers.{layer}.self_attn.k_proj.weight             key: (group half pair) hidden
model.layers.{layer}.self_attn.k_proj.bias               key_bias: (group half pair)   qkv_bias
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
model.layers.{layer}.self_attn.v_proj.bias               value_bias: (group dim)     qkv_bias
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.self_attn.o_proj.bias               output_bias: hidden         output_bias
model.layers.{layer}.mlp.gate_proj.weight                gate: ffn hidden
model.layers.{layer}.mlp.gate_proj.bias                  gate_bias: ffn              mlp_bias
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.up_proj.bias                    up_bias: ffn                mlp_bias
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.mlp.down_proj.bias                  down_bias: hidden           mlp_bias
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.norm.weight                                        final_norm: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

TORCHTITAN = """
tok_embeddings.weight                                    embedding: vocab hidden
layers.{layer}.attention.{qkv_linear.wq|wq}.weight       query: (group head pair half) hidden
layers.{layer}.attention.{qkv_linear.wk|wk}.weight       key: (group pair half) hidden
layers.{layer}.attention.{qkv_linear.wv|wv}.weight       value: (group dim) hidden
layers.{layer}.attention.wo.weight                       output: hidden (group head dim)
layers.{layer}.feed_forward.w1.weight                    gate: ffn hidden
layers.{layer}.feed_forward.w3.weight                    up: ffn hidden
layers.{layer}.feed_forward.w2.weight                    down: hidden ffn
layers.{layer}.attention_norm.weight                     input_norm: hidden
layers.{layer}.ffn_norm.weight                           post_norm: hidden
norm.weight                                              final_norm: hidden
{lm_head|output}.weight                                  head: vocab hidden          untied
{lm_head|output}.weight                                  embedding: vocab hidden     tied optional
"""
"""The native names of torchtitan, which Meta's own files have too; torchtitan rotates adjacent rows of a head."""

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    divided=True,
    general=True,
    table=TABLE,
    drops=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    requires={"hidden_act": "silu"},
    nulls=("head_dim",),
    biases={"attention_bias": ("qkv_bias output_bias", False), "mlp_bias": ("mlp_bias", False)},
    mha=True,
    native={"torchtitan": TORCHTITAN},
    neox="llama",
)
