"""Megatron's arguments as a table: setting, argument, codec, and the condition under which the row holds.

Traits of a model are settings too, and are read back. The argument of a row without a setting follows from the other
settings; if its codec is one value, other values are refused. Facts: megatron/training/arguments.py at 0.18 and at
d98e8a64; fusions/fused_layer_norm.py (`zero_centered_gamma`, of which older trees read one name and newer trees the
other).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.families.family import TRAITS
from formats.huggingface import settings_table
from formats.megatron.args import indexer, layers, mla, mlp, moe, rope, state_space
from formats.megatron.args.codecs import derived, switch
from formats.megatron.pipeline import PATTERN
from formats.model.codec import Codec, Context, choice, rows, single
from formats.model.settings import FIXED
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

TEXT = f"""
learned            position_embedding_type                         learned or rope
layers             num_layers
hidden             hidden_size
heads              num_attention_heads
kv_heads           num_query_groups group_query_attention          grouped heads
head_dim           kv_channels                                     default hidden / heads
ffn                ffn_hidden_size
max_positions      max_position_embeddings
norm_epsilon       layernorm_epsilon|norm_epsilon
norm_epsilon       layernorm_epsilon|norm_epsilon                  latent epsilon               latent
norm_epsilon       layernorm_epsilon|norm_epsilon                  state epsilon                state
rope_theta         rotary_base                                     integer if whole
rotary_fraction    rotary_percent
-                  swiglu                                          = true                       gated
-                  swiglu                                          = false                      ungated
-                  swiglu                                          = false                      sinks
layer_norm         normalization                                   RMSNorm                      gated
layer_norm         normalization                                   LayerNorm or RMSNorm         ungated
layer_norm         normalization                                   RMSNorm                      sinks
every_bias         add_bias_linear disable_bias_linear             biases, default off          gated
every_bias         add_bias_linear disable_bias_linear             biases, default on           ungated
every_bias         add_bias_linear disable_bias_linear             biases, always on            sinks
-                  openai_gelu                                     = false                      ungated
activation         squared_relu bias_gelu_fusion                   activation                   ungated
parallel_residual  -                                               serial only                  ungated
centred            apply_layernorm_1p layernorm_zero_centered_gamma  any of two flags           ungated
mtp_layers         mtp_num_layers                                  null if 0
experts            num_experts
top_k              moe_router_topk                                 same                         moe
expert_ffn         moe_ffn_hidden_size                             default ffn                  moe
shared_experts     moe_shared_expert_intermediate_size             whether present              moe
shared_ffn         moe_shared_expert_intermediate_size             same                         moe
router_scale       moe_router_topk_scaling_factor                  null if 1.0                  moe
sigmoid            moe_router_score_function                       softmax or sigmoid           moe
router_groups      moe_router_num_groups moe_router_group_topk     null if 1 group              moe
router_top_groups  moe_router_group_topk                           top groups of experts        moe
-                  moe_router_load_balancing_type                  load balancing               moe
router_normalized  moe_router_pre_softmax                          unless pre-softmax           moe
router_bias        moe_router_enable_expert_bias                   flag                         moe
shared_router      moe_shared_expert_gate                          flag                         moe
dense_layers       moe_layer_freq                                  MoE frequency                moe without state
-                  group_query_attention                           write kv_heads != heads
-                  use_rotary_position_embeddings                  write false
-                  add_position_embedding                          write true
tied               untie_embeddings_and_output_weights             opposite
qkv_bias           add_qkv_bias                                    qkv bias
qk_norm            qk_layernorm                                    flag                         direct
-                  qk_layernorm                                    = true                       latent
nope_layers        no_rope_freq                                    no-RoPE layers
sliding_window     window_size                                     left window
full_layers        window_attn_skip_freq window_size               full-attention layers
-                  masked_softmax_fusion                           not with a window
-                  seq_length                                      write max_positions
-                  vocab_size                                      write vocab
vocab              true_vocab_size
rope_scaling       {rope.DIRECT_KEYS}                              rope scaling                 rotating
-                  {" ".join(rope.NONE)}                           no scaling                   latent
-                  multi_latent_attention                          = true                       latent
-                  position_embedding_type                         = "rope"                     latent
-                  rotary_percent                                  = 1.0                        latent
query_rank         q_lora_rank                                     same                         latent
latent_rank        kv_lora_rank                                    same                         latent
nope_dim           qk_head_dim                                     same                         latent
rope_dim           qk_pos_emb_head_dim                             same                         latent
head_dim           v_head_dim                                      same                         latent
rope_scaling       {rope.LATENT_KEYS}                              latent rope scaling          latent
-                  apply_rope_fusion                               YaRN alone                   latent
-                  experimental_attention_variant                  = "dsa"                      indexed
index_heads        dsa_indexer_n_heads                             same                         indexed
index_dim          dsa_indexer_head_dim                            same                         indexed
index_top_k        dsa_indexer_topk                                same                         indexed
shared_index_layers  dsa_indexer_topk_freq dsa_indexer_skip_topk_offset  indexer step and offset  indexed
index_pairs        dsa_indexer_rope_interleaved                    required flag                indexed
-                  apply_rope_fusion                               write false                  indexed
-                  dsa_indexer_scoring_relu                        = true                       indexed
-                  dsa_indexer_k_norm_epsilon                      1e-6 or null                 indexed
-                  dsa_indexer_rotate_activation                   any, write false             indexed
-                  dsa_indexer_k_norm_fp32                         any, write false             indexed
-                  experimental_attention_variant                  = "gated_delta_net"          recurrent
-                  attention_output_gate                           stated true                  recurrent
centred            apply_layernorm_1p layernorm_zero_centered_gamma  any of two flags           recurrent
recurrent_layers   linear_attention_freq                           linear layers                recurrent
linear_key_heads   linear_num_key_heads                            same                         recurrent
linear_value_heads  linear_num_value_heads                         same                         recurrent
linear_key_dim     linear_key_head_dim                             same                         recurrent
linear_value_dim   linear_value_head_dim                           same                         recurrent
linear_taps        linear_conv_kernel_dim                          same                         recurrent
-                  is_hybrid_model                                 any, write true              state
-                  position_embedding_type                         = "none"                     state
-                  {" ".join(rope.NONE)}                           no scaling                   state
-                  spec                                            layers of hybrids            state
mlp_layers         {PATTERN}                                       MLP blocks                   state
state_layers       {PATTERN}                                       Mamba blocks                 state
dense_layers       {PATTERN}                                       dense MLP blocks             moe with state
expert_latent      moe_latent_size                                 same                         moe with state
state_size         mamba_state_dim                                 same                         state
state_dim          mamba_head_dim                                  same                         state
state_groups       mamba_num_groups                                same                         state
state_heads        mamba_num_heads                                 default 2 hidden / state_dim  state
taps               -                                               must be 4                    state
-                  quick_geglu                                     stated true                  sinks
-                  glu_linear_offset                               stated 1.0                   sinks
-                  softmax_type                                    = "learnable"                sinks
-                  bias_gelu_fusion                                any, write true              sinks
swiglu_alpha       -                                               must be 1.702                sinks
swiglu_limit       activation_func_clamp_value                     positive number              sinks
layer_types        window_attn_skip_freq                           layer types                  sinks
"""


def _read_groups(groups: Any, context: Context) -> Any:
    grouped = context.file.get("group_query_attention") and groups is not None
    return groups if grouped else context.values["heads"]


TABLE = rows(
    TEXT,
    {
        **layers.CODECS,
        **moe.CODECS,
        "layers of hybrids": choice(*((spec.split() if spec else None, None) for spec in state_space.SPECS)),
        "RMSNorm": choice(("RMSNorm", False)),
        "LayerNorm or RMSNorm": choice(("LayerNorm", True), ("RMSNorm", False)),
        "required flag": indexer.pairs,
        "indexer step and offset": indexer.layers_without_indexer,
        "1e-6 or null": choice((mla.EPSILON, None), (None, None)),
        "any, write false": choice((False, None), (True, None)),
        "any, write true": choice((True, None), (False, None)),
        "flag": single(lambda value, _: bool(value), lambda value, _: bool(value)),
        "whether present": single(lambda value, _: value is not None, lambda value, _: value or None),
        "biases, default off": switch(False, True, opposite=["disable_bias_linear"]),
        "biases, default on": switch(True, False, opposite=["disable_bias_linear"]),
        "biases, always on": switch(True, opposite=["disable_bias_linear"]),
        "qkv bias": mlp.qkv_bias,
        "any of two flags": switch(False, True),
        "null if 0": single(
            lambda value, context: positive_int(value, "mtp_num_layers", context.where) if value else 0,
            lambda value, _: value or None,
        ),
        "write max_positions": derived(lambda values: values["max_positions"]),
        "write vocab": derived(lambda values: values["vocab"]),
        "write kv_heads != heads": derived(lambda values: values["kv_heads"] != values["heads"]),
        "grouped heads": single(_read_groups),
        "latent epsilon": mla.epsilon,
        "YaRN alone": mla.rope_fusion,
        "state epsilon": state_space.epsilon,
        "default 2 hidden / state_dim": state_space.heads,
        "must be 4": state_space.taps,
        **{name: settings_table.CODECS[name] for name in ("MLP blocks", "Mamba blocks", "dense MLP blocks")},
        "learned or rope": single(
            lambda kind, _: kind == "learned_absolute", lambda value, _: "learned_absolute" if value else "rope"
        ),
        "integer if whole": single(lambda theta, _: theta, rope.write_base),
        "rope scaling": rope.direct,
        "latent rope scaling": rope.latent,
        "no scaling": lambda *_: Codec(lambda *_: None, lambda *_: rope.NONE),
        "activation": mlp.activation,
        "serial only": mlp.serial,
        "must be 1.702": mlp.gain,
        "positive number": mlp.clamp,
    },
)
MARKS = ("latent", "indexed", "recurrent", "state", "moe with state", "sinks", "gated", "ungated")
"""The conditions whose rows check all values of their arguments; `fields.py` checks arguments of other rows."""


def marks(args: Mapping[str, Any]) -> set[str]:
    """The traits of a model in its args that determine which rows hold."""
    sinks = args.get("softmax_type") == "learnable"
    traits = {
        "latent": args.get("multi_latent_attention") is True,
        "indexed": args.get("experimental_attention_variant") == "dsa",
        "recurrent": args.get("experimental_attention_variant") == "gated_delta_net",
        "state": any(args.get(name) is not None for name in PATTERN.split("|")),
        "sinks": sinks,
        "ungated": args.get("swiglu") is False and not args.get("quick_geglu") and not sinks,
        "moe": args.get("num_experts") is not None,
    }
    return {trait for trait, holds in traits.items() if holds}


def conditions(traits: Collection[str]) -> set[str]:
    """The conditions of the rows that hold for a model with some traits."""
    kinds = {"sinks", "ungated"}.intersection(traits) or {"gated"}
    moe = {f"moe {'with' if 'state' in traits else 'without'} state"} if "moe" in traits else set[str]()
    rotating = {"rotating"} if {"latent", "state"}.isdisjoint(traits) else set[str]()
    return {*traits, *kinds, *moe, *rotating, "latent" if "latent" in traits else "direct"}


def described(traits: Collection[str]) -> dict[str, bool]:
    """The traits of a model as settings: whether the model has each of `TRAITS`."""
    return {trait: trait in traits for trait in TRAITS}


def values_of(spec: ModelSpec) -> dict[str, Any]:
    """The settings and traits of a model, as the rows of the table use them."""
    fixed = {name: value for name, value in FIXED.items() if getattr(spec, name) is None}
    return {**vars(spec), **fixed, **spec.own, **described(spec.traits)}
