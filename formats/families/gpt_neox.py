"""GPT-NeoX-20B, Pythia and similar models (transformers models/gpt_neox/modeling_gpt_neox.py, 5.23.0).

Megatron has only models whose MLP follows attention; in most models, such as Pythia, both read the same residual.
transformers 5 calls the head `lm_head` in memory, and `embed_out` in files, as every earlier version does. A `head_dim` in
a config changes what rotates (`compute_default_rope_parameters`), and no shape: it may be hidden / heads alone.
"""

from formats.families.family import Family

TABLE = """
gpt_neox.embed_in.weight                                     embedding: vocab hidden
gpt_neox.layers.{layer}.input_layernorm.weight               input_norm: hidden
gpt_neox.layers.{layer}.input_layernorm.bias                 input_norm_bias: hidden
gpt_neox.layers.{layer}.post_attention_layernorm.weight      post_norm: hidden
gpt_neox.layers.{layer}.post_attention_layernorm.bias        post_norm_bias: hidden
gpt_neox.layers.{layer}.attention.query_key_value.weight     (group (query: head half pair | key: half pair | value: dim)) hidden
gpt_neox.layers.{layer}.attention.query_key_value.bias       (group (query_bias: head half pair | key_bias: half pair | value_bias: dim))
gpt_neox.layers.{layer}.attention.dense.weight               output: hidden (group head dim)
gpt_neox.layers.{layer}.attention.dense.bias                 output_bias: hidden
gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight             up: ffn hidden
gpt_neox.layers.{layer}.mlp.dense_h_to_4h.bias               up_bias: ffn
gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight             down: hidden ffn
gpt_neox.layers.{layer}.mlp.dense_4h_to_h.bias               down_bias: hidden
gpt_neox.final_layer_norm.weight                             final_norm: hidden
gpt_neox.final_layer_norm.bias                               final_norm_bias: hidden
{embed_out|lm_head}.weight                                   head: vocab hidden          untied separate
{lm_head|embed_out}.weight                                   head: vocab hidden          untied fused
{embed_out|lm_head}.weight                                   embedding: vocab hidden     tied optional separate
{lm_head|embed_out}.weight                                   embedding: vocab hidden     tied optional fused
"""

FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    divided=True,
    table=TABLE,
    drops=(r"gpt_neox\.layers\.\d+\.attention\.(?:masked_bias|bias|rotary_emb\.inv_freq)",),
    requires={"attention_bias": True},
    keys={
        "kv_heads": "",
        "head_dim": "",
        "norm_epsilon": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
        "activation": "hidden_act",
        "rope_theta": "rotary_emb_base",
        "rotary_fraction": "rotary_pct",
    },
    defaults={"parallel_residual": True, "activation": "gelu", "norm_epsilon": 1e-5, "rotary_fraction": 0.25},
    mha=True,
    neox="pythia",
)
