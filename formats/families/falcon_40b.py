"""Falcon 40B and 180B: grouped queries, and a norm each for attention and MLP (transformers models/falcon, 5.23.0)."""

from dataclasses import replace

from formats.families import falcon
from formats.layout import rules

TABLE = """
transformer.word_embeddings.weight                            embedding: vocab hidden
transformer.h.{layer}.self_attention.query_key_value.weight   (group (query: head half pair | key: half pair | value: dim)) hidden
transformer.h.{layer}.self_attention.dense.weight             output: hidden (group head dim)
transformer.h.{layer}.mlp.dense_h_to_4h.weight                up: ffn hidden
transformer.h.{layer}.mlp.dense_4h_to_h.weight                down: hidden ffn
transformer.h.{layer}.ln_attn.weight                          input_norm: hidden
transformer.h.{layer}.ln_attn.bias                            input_norm_bias: hidden
transformer.h.{layer}.ln_mlp.weight                           post_norm: hidden
transformer.h.{layer}.ln_mlp.bias                             post_norm_bias: hidden
transformer.ln_f.weight                                       final_norm: hidden
transformer.ln_f.bias                                         final_norm_bias: hidden
lm_head.weight                                                head: vocab hidden          untied
lm_head.weight                                                embedding: vocab hidden     tied optional
"""

FAMILY = replace(
    falcon.FAMILY,
    name="falcon_40b",
    model_type="falcon",
    marks={"new_decoder_architecture": True},
    tensors=rules(TABLE),
    requires={"alibi": False, "bias": False, "parallel_attn": True, "apply_residual_connection_post_layernorm": False},
    keys={**falcon.FAMILY.keys, "kv_heads": "num_kv_heads"},
    defaults={name: value for name, value in falcon.FAMILY.defaults.items() if name != "kv_heads"},
    mha=True,
)
