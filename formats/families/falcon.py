"""Falcon 7B: one key and value for all heads, attention and MLP in parallel after one norm.

Facts: transformers models/falcon/modeling_falcon.py, 5.23.0. In every Falcon the fused projection holds, group by
group, the queries of the group, its key and its value.
"""

from formats.families.family import Family

TABLE = """
transformer.word_embeddings.weight                            embedding: vocab hidden
transformer.h.{layer}.self_attention.query_key_value.weight   (group (query: head half pair | key: half pair | value: dim)) hidden
transformer.h.{layer}.self_attention.dense.weight             output: hidden (group head dim)
transformer.h.{layer}.mlp.dense_h_to_4h.weight                up: ffn hidden
transformer.h.{layer}.mlp.dense_4h_to_h.weight                down: hidden ffn
transformer.h.{layer}.input_layernorm.weight                  input_norm: hidden
transformer.h.{layer}.input_layernorm.bias                    input_norm_bias: hidden
transformer.ln_f.weight                                       final_norm: hidden
transformer.ln_f.bias                                         final_norm_bias: hidden
lm_head.weight                                                head: vocab hidden          untied
lm_head.weight                                                embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    table=TABLE,
    requires={
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "apply_residual_connection_post_layernorm": False,
    },
    linear="FalconLinear",
    ffn_ratio=4,
    keys={
        "kv_heads": "",
        "head_dim": "",
        "ffn": "ffn_hidden_size",
        "norm_epsilon": "layer_norm_epsilon",
        "activation": "activation",
    },
    defaults={"kv_heads": 1, "norm_epsilon": 1e-5, "activation": "gelu", "max_positions": 2048, "tied": True},
    only_here="its attention and MLP read the same residual, those of megatron-core follow one another",
    tokens={"bos_token_id": 11, "eos_token_id": 11},
)
