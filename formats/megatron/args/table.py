"""Megatron's arguments as a table: setting, argument, codec, and for which models the row holds.

Rows of traits are read back like all others. A row without a setting is checked when it is read, if its codec names a
value, and follows from the settings when it is written. Facts: megatron/training/arguments.py at 0.18 and at d98e8a64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.families import family_named
from formats.families.family import TRAITS
from formats.layout.table import BIASES
from formats.megatron.args import layers, mla, mlp, moe, rope
from formats.megatron.args.mlp import choice
from formats.model.codec import Codec, Context, Maker, Spelled, opposite, rows, same, scalar
from formats.model.spec import FIXED, ModelSpec, whole

TEXT = f"""
learned            position_embedding_type                         learned
layers             num_layers
hidden             hidden_size
heads              num_attention_heads
kv_heads           num_query_groups group_query_attention          groups_of_heads
head_dim           kv_channels                                     per_head
ffn                ffn_hidden_size
max_positions      max_position_embeddings
norm_epsilon       layernorm_epsilon|norm_epsilon
norm_epsilon       layernorm_epsilon|norm_epsilon                  latent_epsilon           latent
rope_theta         rotary_base                                     base
rotary_fraction    rotary_percent
-                  swiglu                                          true                     gated
-                  swiglu                                          false                    ungated
-                  swiglu                                          false                    sinks
layer_norm         normalization                                   RMSNorm                  gated
layer_norm         normalization                                   LayerNorm or RMSNorm     ungated
layer_norm         normalization                                   RMSNorm                  sinks
linear_biases      add_bias_linear disable_bias_linear add_qkv_bias    some biases          gated
linear_biases      add_bias_linear disable_bias_linear add_qkv_bias    biases or not        ungated
linear_biases      add_bias_linear disable_bias_linear add_qkv_bias    every bias           sinks
-                  openai_gelu                                     false                    ungated
activation         squared_relu bias_gelu_fusion                   activation               ungated
centred            apply_layernorm_1p layernorm_zero_centered_gamma    centred              ungated
experts            num_experts
top_k              moe_router_topk                              same                     moe
expert_ffn         moe_ffn_hidden_size                             width                    moe
shared_experts     moe_shared_expert_intermediate_size             given                    moe
shared_ffn         moe_shared_expert_intermediate_size          same                     moe
router_scale       moe_router_topk_scaling_factor                  scale                    moe
router_groups      moe_router_num_groups moe_router_group_topk     groups                   moe
router_top_groups  moe_router_group_topk                           top_groups               moe
router             moe_router_score_function                       score                    moe
-                  moe_router_load_balancing_type                  balancing                moe
router_normalized  moe_router_pre_softmax                          normalized               moe
router_bias        moe_router_enable_expert_bias                   on                       moe
shared_router      moe_shared_expert_gate                          on                       moe
dense_layers       moe_layer_freq                                  dense                    moe
-                  group_query_attention                           fewer groups than heads
-                  use_rotary_position_embeddings                  write false
-                  add_position_embedding                          write true
tied               untie_embeddings_and_output_weights             opposite
-                  add_qkv_bias                                    qkv bias
qk_norm            qk_layernorm                                    on                       direct
-                  qk_layernorm                                    true                     latent
nope_layers        no_rope_freq                                    nope
sliding_window     window_size                                     window
full_layers        window_attn_skip_freq window_size               full
-                  seq_length                                      write max_positions
-                  vocab_size                                      write vocab
vocab              true_vocab_size
rope_scaling       {rope.DIRECT_KEYS}                              rope scaling             direct
-                  {" ".join(rope.NONE)}                           no scaling               latent
-                  multi_latent_attention                          true                     latent
-                  position_embedding_type                         rope                     latent
-                  rotary_percent                                  1.0                      latent
query_rank         q_lora_rank                                  same                     latent
latent_rank        kv_lora_rank                                 same                     latent
nope_dim           qk_head_dim                                  same                     latent
rope_dim           qk_pos_emb_head_dim                          same                     latent
head_dim           v_head_dim                                   same                     latent
rope_scaling       {rope.LATENT_KEYS}                              latent scaling           latent
-                  quick_geglu                                     true                     sinks
-                  glu_linear_offset                               1.0                      sinks
-                  softmax_type                                    learnable                sinks
-                  bias_gelu_fusion                                fusion                   sinks
swiglu_alpha       -                                               gain                     sinks
swiglu_limit       activation_func_clamp_value                     clamp                    sinks
layer_types        window_attn_skip_freq                           kinds                    sinks
"""


def only(value: Any) -> Maker:
    """An argument that has one value."""
    return choice((value, None))


def write(value: Callable[[Mapping[str, Any]], Any]) -> Maker:
    """An argument that is written, as it follows from the settings, and not read."""
    return lambda key, *_: Codec(lambda *_: None, lambda _, context: {key: value(context.values)})


def on(key: str) -> Codec:
    """A switch, off where it is absent."""
    return scalar(key, lambda value, _: bool(value), lambda value, _: bool(value))


def learned(key: str) -> Codec:
    """Whether there is a weight for each position; else heads rotate, by YaRN too."""
    kinds = {True: "learned_absolute", False: "rope"}
    return scalar(key, lambda value, _: value == kinds[True], lambda value, _: kinds[bool(value)])


def groups_of_heads(groups: str, grouped: str) -> Codec:
    """Groups of heads that share keys and values: as many as heads, unless queries are grouped."""

    def read(spelled: Spelled, context: Context) -> Any:
        return spelled[groups] if spelled.get(grouped) and groups in spelled else context.values["heads"]

    return Codec(read, lambda value, _: {groups: value})


def per_head(key: str) -> Codec:
    """Elements of a head: hidden / heads where nothing else is said."""

    def read(spelled: Any, context: Context) -> Any:
        if spelled is not None:
            return spelled
        hidden, heads = (whole(context.values[name], name, context.where) for name in ("hidden", "heads"))
        return hidden // heads

    return scalar(key, read, lambda value, _: value)


def given(key: str) -> Codec:
    """Whether an argument has a value, which another row writes."""
    return scalar(key, lambda value, _: value is not None, lambda value, _: value or None)


TABLE = rows(
    TEXT,
    {
        "same": same,
        "opposite": opposite,
        "true": only(True),
        "false": only(False),
        "1.0": only(1.0),
        "rope": only("rope"),
        "learnable": only("learnable"),
        "fusion": choice((True, None), (False, None)),
        "on": on,
        "given": given,
        "write false": write(lambda _: False),
        "write true": write(lambda _: True),
        "write max_positions": write(lambda values: values["max_positions"]),
        "write vocab": write(lambda values: values["vocab"]),
        "fewer groups than heads": write(lambda values: values["kv_heads"] != values["heads"]),
        "qkv bias": write(lambda values: values["linear_biases"] == mlp.EVERYWHERE[-1:] or values["sinks"]),
        "no scaling": lambda *_: Codec(lambda *_: None, lambda *_: rope.NONE),
        "learned": learned,
        "groups_of_heads": groups_of_heads,
        "per_head": per_head,
        "base": rope.base,
        "latent_epsilon": mla.epsilon,
        "rope scaling": rope.direct,
        "latent scaling": rope.latent,
        "RMSNorm": choice(("RMSNorm", False)),
        "LayerNorm or RMSNorm": choice(("LayerNorm", True), ("RMSNorm", False)),
        "some biases": mlp.linear_biases(False, True),
        "biases or not": mlp.linear_biases(True, False),
        "every bias": mlp.linear_biases(True),
        "activation": mlp.activation,
        "centred": mlp.centred,
        "gain": mlp.gain,
        "clamp": mlp.clamp,
        "width": moe.width,
        "scale": moe.scale,
        "groups": moe.groups,
        "top_groups": moe.top_groups,
        "score": moe.score,
        "balancing": moe.balancing,
        "normalized": moe.normalized,
        "dense": layers.dense,
        "nope": layers.nope,
        "window": layers.window,
        "full": layers.full,
        "kinds": layers.kinds,
    },
)
MARKS = ("latent", "sinks", "gated", "ungated")
"""The conditions whose rows judge all values of their arguments; of others `fields.py` judges some."""


def marks(args: Mapping[str, Any]) -> set[str]:
    """The traits of a model by which the rows are chosen that read its args."""
    sinks = args.get("softmax_type") == "learnable"
    traits = {
        "latent": args.get("multi_latent_attention") is True,
        "sinks": sinks,
        "ungated": args.get("swiglu") is False and not args.get("quick_geglu") and not sinks,
        "moe": args.get("num_experts") is not None,
    }
    return {trait for trait, there in traits.items() if there}


def conditions(traits: Collection[str]) -> set[str]:
    """Which rows hold for a model with such traits."""
    kinds = {"sinks", "ungated"}.intersection(traits) or {"gated"}
    return {*traits, *kinds, "latent" if "latent" in traits else "direct"}


def described(traits: Collection[str], router: str = "") -> dict[str, Any]:
    """The traits of a model as values of rows; `router` is that of its family."""
    values: dict[str, Any] = {trait: trait in traits for trait in (*TRAITS, "centred")}
    return values | {"linear_biases": tuple(sorted(BIASES.intersection(traits))), "router": router}


def values_of(spec: ModelSpec) -> dict[str, Any]:
    """The settings and traits of a model, each as a row has it."""
    fixed = {name: value for name, value in FIXED.items() if getattr(spec, name) is None}
    return {**vars(spec), **fixed, **spec.own, **described(spec.traits, family_named(spec.family).router)}
