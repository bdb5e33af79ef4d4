"""LFM2: a short convolution between two gates in most layers, attention in the others.

Facts: transformers 5.23.0, models/lfm2/modeling_lfm2.py and configuration_lfm2.py.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                             embedding: vocab hidden
model.layers.{layer}.conv.conv.weight                 short_taps: channel () tap    short
model.layers.{layer}.conv.in_proj.weight              (short_b: channel | short_c: channel | short_x: channel) hidden    short
model.layers.{layer}.conv.out_proj.weight             short_output: hidden channel    short
model.layers.{layer}.self_attn.q_proj.weight          query: (group head half pair) hidden    attention
model.layers.{layer}.self_attn.k_proj.weight          key: (group half pair) hidden    attention
model.layers.{layer}.self_attn.v_proj.weight          value: (group dim) hidden    attention
model.layers.{layer}.self_attn.out_proj.weight        output: hidden (group head dim)    attention
model.layers.{layer}.self_attn.q_layernorm.weight     query_norm: (half pair)    attention
model.layers.{layer}.self_attn.k_layernorm.weight     key_norm: (half pair)    attention
model.layers.{layer}.feed_forward.w1.weight           gate: ffn hidden
model.layers.{layer}.feed_forward.w3.weight           up: ffn hidden
model.layers.{layer}.feed_forward.w2.weight           down: hidden ffn
model.layers.{layer}.operator_norm.weight             input_norm: hidden
model.layers.{layer}.ffn_norm.weight                  post_norm: hidden
model.embedding_norm.weight                           final_norm: hidden
lm_head.weight                                        head: vocab hidden         untied
lm_head.weight                                        embedding: vocab hidden    tied optional
"""

FAMILY = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    table=TABLE,
    requires={"conv_bias": False},
    rope_theta=1000000.0,
    keys={
        "ffn": "block_ff_dim intermediate_size",
        "norm_epsilon": "norm_eps",
        "tied": "tie_embedding tie_word_embeddings",
        "short_layers": "layer_types",
        "taps": "conv_L_cache",
    },
    defaults={"kv_heads": 8, "norm_epsilon": 1e-5, "tied": True, "taps": 3},
    nulls=("full_attn_idxs",),
    only_here="megatron-core has no short convolutions",
)
