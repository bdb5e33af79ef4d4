"""The names and layouts of the tensors of Megatron-LM's models; each line is proven by the tests that name it.

Facts: megatron-core 0.16.1, where nothing else is named.
"""

from __future__ import annotations

import re

from formats.layout.table import rules
from formats.megatron import mtp
from formats.megatron.args import indexer, linear_attention, mla, state_space

GROUPED = re.compile(r".*\.mlp\.experts\.weight[12]")
"""The key of a matrix that holds all experts of a layer."""

DECODER = (
    *mla.RULES,
    *indexer.RULES,
    *linear_attention.RULES,
    *state_space.RULES,
    *rules("""
embedding.word_embeddings.weight                                                             (embedding: vocab | ~padding)/tp hidden    first
embedding.position_embeddings.weight                                                         positions: position hidden    first
decoder.layers.{layer}.{self_attention.linear_qkv.layer_norm_weight|input_layernorm.weight}  input_norm: hidden    direct attention
decoder.layers.{layer}.{self_attention.linear_qkv.layer_norm_bias|input_layernorm.bias}      input_norm_bias: hidden
decoder.layers.{layer}.self_attention.linear_qkv.weight                                      (group (query: head half pair | key: half pair | value: dim))/tp hidden    attention no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.bias                                        (group (query_bias: head half pair | key_bias: half pair | value_bias: dim))/tp
decoder.layers.{layer}.self_attention.core_attention.softmax_offset                          sinks: (group head)/tp
decoder.layers.{layer}.self_attention.q_layernorm.weight                                     query_norm: (half pair)    attention
decoder.layers.{layer}.self_attention.k_layernorm.weight                                     key_norm: (half pair)    attention
decoder.layers.{layer}.self_attention.linear_proj.weight                                     output: hidden (group head dim)/tp    attention
decoder.layers.{layer}.self_attention.linear_proj.bias                                       output_bias: hidden
decoder.layers.{layer}.{mlp.linear_fc1.layer_norm_weight|pre_mlp_layernorm.weight}           post_norm: hidden    dense
decoder.layers.{layer}.{mlp.linear_fc1.layer_norm_bias|pre_mlp_layernorm.bias}               post_norm_bias: hidden
decoder.layers.{layer}.pre_mlp_layernorm.weight                                              post_norm: hidden    sparse
decoder.layers.{layer}.mlp.linear_fc1.weight                                                 (gate: ffn/tp | up: ffn/tp) hidden    dense
decoder.layers.{layer}.mlp.linear_fc1.weight                                                 up: ffn/tp hidden    dense plain
decoder.layers.{layer}.mlp.linear_fc1.bias                                                   (gate_bias: ffn/tp | up_bias: ffn/tp)
decoder.layers.{layer}.mlp.linear_fc1.bias                                                   up_bias: ffn/tp    plain
decoder.layers.{layer}.mlp.linear_fc2.weight                                                 down: hidden ffn/tp    dense
decoder.layers.{layer}.mlp.linear_fc2.bias                                                   down_bias: hidden
decoder.layers.{layer}.mlp.router.weight                                                     router: expert hidden    sparse
decoder.layers.{layer}.mlp.router.expert_bias                                                router_bias: expert    sparse
decoder.layers.{layer}.mlp.router.bias                                                       router_score_bias: expert    sparse
decoder.layers.{layer}.mlp.experts.{linear_fc1.weight{expert}|local_experts.{expert}.linear_fc1.weight}  (expert_gate: expert_ffn/etp | expert_up: expert_ffn/etp)%interleave hidden    sparse separate
decoder.layers.{layer}.mlp.experts.{linear_fc1.weight{expert}|local_experts.{expert}.linear_fc1.weight}  expert_up: expert_ffn/etp hidden    sparse separate plain
decoder.layers.{layer}.mlp.experts.{linear_fc1.weight{expert}|local_experts.{expert}.linear_fc1.weight}  latent_expert_up: expert_ffn/etp expert_latent    sparse separate
decoder.layers.{layer}.mlp.experts.{linear_fc1.bias{expert}|local_experts.{expert}.linear_fc1.bias}  (expert_gate_bias: expert_ffn/etp | expert_up_bias: expert_ffn/etp)%interleave    sparse separate
decoder.layers.{layer}.mlp.experts.{linear_fc2.weight{expert}|local_experts.{expert}.linear_fc2.weight}  expert_down: hidden expert_ffn/etp    sparse separate
decoder.layers.{layer}.mlp.experts.{linear_fc2.weight{expert}|local_experts.{expert}.linear_fc2.weight}  latent_expert_down: expert_latent expert_ffn/etp    sparse separate
decoder.layers.{layer}.mlp.fc1_latent_proj.weight                                            experts_in: expert_latent hidden    sparse
decoder.layers.{layer}.mlp.fc2_latent_proj.weight                                            experts_out: hidden expert_latent    sparse
decoder.layers.{layer}.mlp.experts.{linear_fc2.bias{expert}|local_experts.{expert}.linear_fc2.bias}  expert_down_bias: hidden    sparse separate
decoder.layers.{layer}.mlp.experts.weight1                                                   (expert/ep hidden (expert_gate: expert_ffn/etp | expert_up: expert_ffn/etp))    sparse fused
decoder.layers.{layer}.mlp.experts.weight2                                                   expert_down: (expert/ep expert_ffn/etp hidden)    sparse fused
decoder.layers.{layer}.mlp.shared_experts.gate_weight                                        shared_router: () hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight                                  (shared_gate: shared_ffn/tp | shared_up: shared_ffn/tp)%shared_interleave hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight                                  shared_up: shared_ffn/tp hidden    sparse plain
decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight                                  shared_down: hidden shared_ffn/tp    sparse
decoder.final_layernorm.weight                                                               final_norm: hidden    last whole
decoder.final_layernorm.bias                                                                 final_norm_bias: hidden    last
"""),
)
"""The embeddings and the decoder of megatron-core's models."""
HEAD = rules("""
output_layer.weight                                                                          (head: vocab | ~padding)/tp hidden    last
output_layer.weight                                                                          (embedding: vocab | ~padding)/tp hidden    last tied copy
""")
MCORE = (*DECODER, *mtp.rules_of(rule for rule in DECODER if not GROUPED.fullmatch(rule.key)), *HEAD)
"""The layout of megatron-core's GPTModel. Of two names the first is Transformer Engine's, the second the local layers'.

`weight1` and `weight2` are the experts of megatron-core's own grouped GEMM, older than Transformer Engine's: they have
the shapes of matrices, but their elements are stacks of transposed experts (transformer/moe/experts.py `GroupedMLP`,
0.16.1). `weight1` and `weight2` are only read. Gate and up of grouped experts are interleaved if
`moe_mlp_glu_interleave_size` is set (the same file, `_remove_glu_interleaving`, 0.19.2).
"""

LEGACY = rules("""
language_model.embedding.word_embeddings.weight                             (embedding: vocab | ~padding)/tp hidden    first
language_model.encoder.layers.{layer}.input_norm.weight                     input_norm: hidden
language_model.encoder.layers.{layer}.self_attention.query_key_value.weight  (group (query: head half pair | key: half pair | value: dim))/tp hidden
language_model.encoder.layers.{layer}.self_attention.query_key_value.bias    (group (query_bias: head half pair | key_bias: half pair | value_bias: dim))/tp
language_model.encoder.layers.{layer}.self_attention.dense.weight           output: hidden (group head dim)/tp
language_model.encoder.layers.{layer}.post_attention_norm.weight            post_norm: hidden
language_model.encoder.layers.{layer}.mlp.dense_h_to_4h.weight              (gate: ffn/tp | up: ffn/tp) hidden
language_model.encoder.layers.{layer}.mlp.dense_4h_to_h.weight              down: hidden ffn/tp
language_model.encoder.final_norm.weight                                    final_norm: hidden    last
language_model.output_layer.weight                                          (head: vocab | ~padding)/tp hidden    last
word_embeddings_for_head.weight                                             (embedding: vocab | ~padding)/tp hidden    last tied copy
""")
"""The layout of Megatron-LM's own models, from 2023-09 (RMSNorm arrived) to their removal in 2026-05; only read."""

BRIDGE = rules("""
decoder.layers.{layer}.self_attention.linear_proj.post_layernorm.weight    output_norm: hidden    attention
decoder.layers.{layer}.mlp.linear_fc2.post_layernorm.weight                down_norm: hidden    dense
""")
"""Tensors of Megatron-Bridge's own modules, beside those of megatron-core (0.3.1, models/gemma/gemma3_provider.py)."""
