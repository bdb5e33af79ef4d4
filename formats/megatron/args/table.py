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
from formats.megatron.args.codecs import choice, derived, only, single, switch
from formats.model.codec import Codec, Context, opposite, rows, same
from formats.model.settings import FIXED
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

PATTERN = "hybrid_override_pattern|hybrid_layer_pattern"
"""The arguments for the kind of each layer of a hybrid, as letters; the second is the name since 0.17."""
TEXT = f"""
learned            position_embedding_type                         learned
layers             num_layers
hidden             hidden_size
heads              num_attention_heads
kv_heads           num_query_groups group_query_attention          groups of heads
head_dim           kv_channels                                     hidden / heads
ffn                ffn_hidden_size
max_positions      max_position_embeddings
norm_epsilon       layernorm_epsilon|norm_epsilon
norm_epsilon       layernorm_epsilon|norm_epsilon                  latent epsilon           latent
norm_epsilon       layernorm_epsilon|norm_epsilon                  state epsilon            state
rope_theta         rotary_base                                     base
rotary_fraction    rotary_percent
-                  swiglu                                          = true                   gated
-                  swiglu                                          = false                  ungated
-                  swiglu                                          = false                  sinks
layer_norm         normalization                                   RMSNorm                  gated
layer_norm         normalization                                   LayerNorm or RMSNorm     ungated
layer_norm         normalization                                   RMSNorm                  sinks
every_bias         add_bias_linear disable_bias_linear             some biases              gated
every_bias         add_bias_linear disable_bias_linear             biases or not            ungated
every_bias         add_bias_linear disable_bias_linear             biases                   sinks
-                  openai_gelu                                     = false                  ungated
activation         squared_relu bias_gelu_fusion                   activation               ungated
parallel_residual  -                                               one after the other      ungated
centred            apply_layernorm_1p layernorm_zero_centered_gamma  centred                  ungated
mtp_layers         mtp_num_layers                                  none or so many
experts            num_experts
top_k              moe_router_topk                                 same                     moe
expert_ffn         moe_ffn_hidden_size                             width                    moe
shared_experts     moe_shared_expert_intermediate_size             given                    moe
shared_ffn         moe_shared_expert_intermediate_size             same                     moe
router_scale       moe_router_topk_scaling_factor                  1 unless said            moe
sigmoid            moe_router_score_function                       score                    moe
router_groups      moe_router_num_groups moe_router_group_topk     groups                   moe
router_top_groups  moe_router_group_topk                           top groups               moe
-                  moe_router_load_balancing_type                  balancing                moe
router_normalized  moe_router_pre_softmax                          normalized               moe
router_bias        moe_router_enable_expert_bias                   on                       moe
shared_router      moe_shared_expert_gate                          on                       moe
dense_layers       moe_layer_freq                                  no experts               whole moe
-                  group_query_attention                           fewer groups than heads
-                  use_rotary_position_embeddings                  write false
-                  add_position_embedding                          write true
tied               untie_embeddings_and_output_weights             opposite
qkv_bias           add_qkv_bias                                    qkv bias
qk_norm            qk_layernorm                                    on                       direct
-                  qk_layernorm                                    = true                   latent
nope_layers        no_rope_freq                                    no rope
sliding_window     window_size                                     window
full_layers        window_attn_skip_freq window_size               no window
-                  seq_length                                      write max_positions
-                  vocab_size                                      write vocab
vocab              true_vocab_size
rope_scaling       {rope.DIRECT_KEYS}                              rope scaling             rotating
-                  {" ".join(rope.NONE)}                           no scaling               latent
-                  multi_latent_attention                          = true                   latent
-                  position_embedding_type                         = "rope"                 latent
-                  rotary_percent                                  = 1.0                    latent
query_rank         q_lora_rank                                     same                     latent
latent_rank        kv_lora_rank                                    same                     latent
nope_dim           qk_head_dim                                     same                     latent
rope_dim           qk_pos_emb_head_dim                             same                     latent
head_dim           v_head_dim                                      same                     latent
rope_scaling       {rope.LATENT_KEYS}                              latent scaling           latent
-                  experimental_attention_variant                  = "dsa"                  indexed
index_heads        dsa_indexer_n_heads                             same                     indexed
index_dim          dsa_indexer_head_dim                            same                     indexed
index_top_k        dsa_indexer_topk                                same                     indexed
shared_index_layers  dsa_indexer_topk_freq dsa_indexer_skip_topk_offset  shared indexers  indexed
index_pairs        dsa_indexer_rope_interleaved                    pairs                    indexed
-                  apply_rope_fusion                               write false              indexed
-                  dsa_indexer_scoring_relu                        = true                   indexed
-                  dsa_indexer_k_norm_epsilon                      its own or that of all   indexed
-                  dsa_indexer_rotate_activation                   rounding                 indexed
-                  dsa_indexer_k_norm_fp32                         rounding                 indexed
-                  experimental_attention_variant                  = "gated_delta_net"      recurrent
-                  attention_output_gate                           = true                   recurrent
centred            apply_layernorm_1p layernorm_zero_centered_gamma  centred                recurrent
recurrent_layers   linear_attention_freq                           linear                   recurrent
linear_key_heads   linear_num_key_heads                            same                     recurrent
linear_value_heads  linear_num_value_heads                         same                     recurrent
linear_key_dim     linear_key_head_dim                             same                     recurrent
linear_value_dim   linear_value_head_dim                           same                     recurrent
linear_taps        linear_conv_kernel_dim                          same                     recurrent
-                  is_hybrid_model                                 = true                   state
-                  position_embedding_type                         = "none"                 state
-                  {" ".join(rope.NONE)}                           no scaling               state
-                  spec                                            {state_space.SPEC}       state
mlp_layers         {PATTERN}                                       MLPs                     state
state_layers       {PATTERN}                                       state spaces             state
dense_layers       {PATTERN}                                       dense MLPs               state moe
expert_latent      moe_latent_size                                 same                     state moe
state_size         mamba_state_dim                                 same                     state
state_dim          mamba_head_dim                                  same                     state
state_groups       mamba_num_groups                                same                     state
state_heads        mamba_num_heads                                 state heads              state
taps               -                                               four                     state
-                  quick_geglu                                     = true                   sinks
-                  glu_linear_offset                               = 1.0                    sinks
-                  softmax_type                                    = "learnable"            sinks
-                  bias_gelu_fusion                                fusion                   sinks
swiglu_alpha       -                                               gain                     sinks
swiglu_limit       activation_func_clamp_value                     clamp                    sinks
layer_types        window_attn_skip_freq                           kinds                    sinks
"""


def _read_groups(groups: Any, context: Context) -> Any:
    grouped = context.file.get("group_query_attention") and groups is not None
    return groups if grouped else context.values["heads"]


def _read_head_dim(spelled: Any, context: Context) -> Any:
    if spelled is not None:
        return spelled
    hidden, heads = (positive_int(context.values[name], name, context.where) for name in ("hidden", "heads"))
    return hidden // heads


TABLE = rows(
    TEXT,
    {
        **layers.CODECS,
        **moe.CODECS,
        "same": same,
        "opposite": opposite,
        **only(True, False, 1.0, "rope", "none", "learnable", "gated_delta_net", "dsa"),
        state_space.SPEC: choice((state_space.SPEC.split(), None)),
        "RMSNorm": choice(("RMSNorm", False)),
        "LayerNorm or RMSNorm": choice(("LayerNorm", True), ("RMSNorm", False)),
        "pairs": indexer.pairs,
        "shared indexers": indexer.layers_without_indexer,
        "its own or that of all": choice((mla.EPSILON, None), (None, None)),
        "rounding": choice((False, None), (True, None)),
        "fusion": choice((True, None), (False, None)),
        "on": single(lambda value, _: bool(value), lambda value, _: bool(value)),
        "given": single(lambda value, _: value is not None, lambda value, _: value or None),
        "some biases": switch(False, True, opposite=["disable_bias_linear"]),
        "biases or not": switch(True, False, opposite=["disable_bias_linear"]),
        "biases": switch(True, opposite=["disable_bias_linear"]),
        "qkv bias": mlp.qkv_bias,
        "centred": switch(False, True),
        "none or so many": single(
            lambda value, context: positive_int(value, "mtp_num_layers", context.where) if value else 0,
            lambda value, _: value or None,
        ),
        "write false": derived(lambda _: False),
        "write true": derived(lambda _: True),
        "write max_positions": derived(lambda values: values["max_positions"]),
        "write vocab": derived(lambda values: values["vocab"]),
        "fewer groups than heads": derived(lambda values: values["kv_heads"] != values["heads"]),
        "groups of heads": single(_read_groups),
        "hidden / heads": single(_read_head_dim),
        "latent epsilon": mla.epsilon,
        "state epsilon": state_space.epsilon,
        "state heads": state_space.heads,
        "four": state_space.taps,
        **{name: settings_table.CODECS[name] for name in ("MLPs", "state spaces", "dense MLPs")},
        "learned": single(
            lambda kind, _: kind == "learned_absolute", lambda value, _: "learned_absolute" if value else "rope"
        ),
        "base": single(lambda theta, _: theta, rope.write_base),
        "rope scaling": rope.direct,
        "latent scaling": rope.latent,
        "no scaling": lambda *_: Codec(lambda *_: None, lambda *_: rope.NONE),
        "activation": mlp.activation,
        "one after the other": mlp.serial,
        "gain": mlp.gain,
        "clamp": mlp.clamp,
    },
)
MARKS = ("latent", "indexed", "recurrent", "state", "state moe", "sinks", "gated", "ungated")
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
    return {trait for trait, there in traits.items() if there}


def conditions(traits: Collection[str]) -> set[str]:
    """The conditions of the rows that hold for a model with some traits."""
    kinds = {"sinks", "ungated"}.intersection(traits) or {"gated"}
    both = (
        {"whole moe" if "moe" in traits and "state" not in traits else "state moe"} if "moe" in traits else set[str]()
    )
    rotating = {"rotating"} if not {"latent", "state"}.intersection(traits) else set[str]()
    return {*traits, *kinds, *both, *rotating, "latent" if "latent" in traits else "direct"}


def described(traits: Collection[str]) -> dict[str, bool]:
    """The traits of a model as settings: whether the model has each of `TRAITS`."""
    return {trait: trait in traits for trait in TRAITS}


def values_of(spec: ModelSpec) -> dict[str, Any]:
    """The settings and traits of a model, as the rows of the table use them."""
    fixed = {name: value for name, value in FIXED.items() if getattr(spec, name) is None}
    return {**vars(spec), **fixed, **spec.own, **described(spec.traits)}
