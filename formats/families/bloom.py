"""BLOOM: positions only by a slope for each head (ALiBi), a norm after the embedding, biases in every linear layer.

Facts: transformers models/bloom/modeling_bloom.py, 5.23.0. The fused projection holds query, key and value head by
head. The width of the MLP is four times the hidden size, whatever `n_inner` is, and no config of the Hub has another
`n_inner`; a sequence may have any length, and `seq_length` is that of the training.
"""

from formats.families.family import Family

TABLE = """
transformer.word_embeddings.weight                            embedding: vocab hidden
transformer.word_embeddings_layernorm.weight                  embedding_norm: hidden
transformer.word_embeddings_layernorm.bias                    embedding_norm_bias: hidden
transformer.h.{layer}.input_layernorm.weight                  input_norm: hidden
transformer.h.{layer}.input_layernorm.bias                    input_norm_bias: hidden
transformer.h.{layer}.self_attention.query_key_value.weight   (group (query: head half pair | key: half pair | value: dim)) hidden
transformer.h.{layer}.self_attention.query_key_value.bias     (group (query_bias: head half pair | key_bias: half pair | value_bias: dim))
transformer.h.{layer}.self_attention.dense.weight             output: hidden (group head dim)
transformer.h.{layer}.self_attention.dense.bias               output_bias: hidden
transformer.h.{layer}.post_attention_layernorm.weight         post_norm: hidden
transformer.h.{layer}.post_attention_layernorm.bias           post_norm_bias: hidden
transformer.h.{layer}.mlp.dense_h_to_4h.weight                up: ffn hidden
transformer.h.{layer}.mlp.dense_h_to_4h.bias                  up_bias: ffn
transformer.h.{layer}.mlp.dense_4h_to_h.weight                down: hidden ffn
transformer.h.{layer}.mlp.dense_4h_to_h.bias                  down_bias: hidden
transformer.ln_f.weight                                       final_norm: hidden
transformer.ln_f.bias                                         final_norm_bias: hidden
lm_head.weight                                                head: vocab hidden          untied
lm_head.weight                                                embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    table=TABLE,
    requires={"apply_residual_connection_post_layernorm": False},
    rope_theta=None,
    ffn_ratio=4,
    keys={
        "layers": "n_layer num_hidden_layers",
        "hidden": "hidden_size n_embed",
        "heads": "n_head num_attention_heads",
        "kv_heads": "",
        "head_dim": "",
        "ffn": "n_inner",
        "max_positions": "seq_length",
        "norm_epsilon": "layer_norm_epsilon",
    },
    defaults={"norm_epsilon": 1e-5, "max_positions": 2048, "tied": True},
    only_here="megatron-core has no ALiBi, and no norm after the embedding",
)
