"""The table of settings and their keys in config.json, for all families; the keys of a family choose its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError, short
from formats.families import family_named
from formats.families.family import Family
from formats.huggingface import layers, rope, sizes
from formats.model.codec import Codec, Context, Maker, Row, Spelled, rows, write

USUAL = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Setting: its config key, where a family has no key of its own for it."""

TABLE = """
layers             hybrid_override_pattern                                         blocks
biases             *                                                               biases
mlp_layers         *                                                               MLPs
dense_layers       hybrid_override_pattern                                         dense MLPs
state_layers       hybrid_override_pattern                                         state spaces
state_layers       layer_types                                                     with states
state_layers       attn_layer_indices                                              without
short_layers       * full_attn_idxs                                                convolved
state_dim          mamba_d_head mamba_expand mamba_d_ssm                           expanded
ffn                block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of    adjusted
dense_layers       first_k_dense_replace                                           in_front
dense_layers       mlp_layer_types first_k_dense_replace                           worded
dense_layers       moe_layer_freq mlp_layer_types                                  flagged
dense_layers       moe_layers interleave_moe_layer_step                            unlisted
dense_layers       moe_layer_start_index moe_layer_end_index moe_layer_interval    bounded
dense_layers       * decoder_sparse_step                                           listed
shared_ffn         n_shared_experts                                                counted
shared_ffn         num_shared_experts                                              counted
shared_ffn         moe_num_shared_experts                                          counted
shared_ffn         *                                                               uncounted
router_groups      topk_method n_group                                             limited
router_top_groups  topk_method topk_group                                          limited
shared_index_layers  * index_topk_pattern index_topk_freq index_skip_topk_offset    sharing
nope_layers        * no_rope_layer_interval                                        rotating
recurrent_layers   * full_attention_interval                                       alternating
full_layers        *                                                               windowed
recurrent_layers   linear_attn_config layer_types                                  delta
linear_key_heads   linear_num_heads linear_attn_config                             inner_heads
linear_value_heads  linear_num_heads linear_attn_config                            inner_heads
linear_key_dim     linear_head_dim linear_attn_config                              inner_dim
linear_value_dim   linear_head_dim linear_attn_config                              inner_dim
linear_taps        linear_conv_kernel_dim linear_attn_config                       inner_taps
index_heads        index_n_heads sparse_attention_config                           inner_index_heads
index_dim          index_head_dim sparse_attention_config                          inner_index_dim
block_layers       sparse_attention_config layer_types                             in_blocks
window_kv_heads    num_key_value_heads                                             twice
full_head_dim      global_head_dim per_layer_config                                head_dim_of_full
full_kv_heads      num_global_key_value_heads per_layer_config attention_k_eq_v    kv_heads_of_full
reusing_layers     num_kv_shared_layers                                            at_the_end
reusing_ffn        use_double_wide_mlp                                             double
layer_width        *                                                               zero_or
sliding_window     *
rope               *                                                               rotary
"""
"""Columns: setting, its keys, codec. A star is any key of the family for the setting; of several names of that key the
first stands for all. A setting without a row is a plain value. These settings are written after all others, in this
order."""


def _family(context: Context) -> Family:
    return family_named(context.values["family"])


def biases(*keys: str) -> Codec:
    """The codec of the conditions of layout that config keys turn on.

    Reading raises UnsupportedError where a key is neither true nor false.
    """

    def read(_: Spelled, context: Context) -> tuple[str, ...]:
        given = {key: context.file.get(key, _family(context).biases[key][1]) for key in keys}
        for key, value in given.items():
            if not isinstance(value, bool):
                raise UnsupportedError(f"{context.where}: {key} = {short(value)} is neither true nor false")
        return _family(context).biases_of(given)

    def write(conditions: tuple[str, ...], context: Context) -> Spelled:
        return {key: set(_family(context).biases[key][0].split()) <= set(conditions) for key in keys}

    return Codec(read, write)


CODECS: Mapping[str, Maker] = {
    "biases": biases,
    "in_front": layers.leading_dense_layers,
    "worded": layers.dense_layers_by_word,
    "unlisted": layers.sparse_layers_by_list,
    "bounded": layers.sparse_layers_by_range,
    "listed": layers.dense_layers_by_list,
    "counted": layers.shared_expert_count,
    "uncounted": layers.shared_ffn,
    "rotating": layers.layers_without_rotation,
    "windowed": layers.layers_without_window,
    "alternating": layers.linear_layers_by_step,
    "rotary": rope.rotary,
    "blocks": layers.of_kind(),
    "MLPs": layers.of_kind(layers.MLP, layers.MOE),
    "dense MLPs": layers.of_kind(layers.MLP),
    "state spaces": layers.of_kind(layers.LINEAR),
    "with states": layers.state_layers,
    "without": layers.layers_not_listed,
    "convolved": layers.convolution_layers,
    "delta": layers.linear_layers_by_lists,
    "flagged": layers.dense_layers_by_flag,
    "in_blocks": layers.block_layers,
    "at_the_end": layers.last_layers,
    "inner_heads": sizes.size_in_map("num_heads"),
    "inner_dim": sizes.size_in_map("head_dim"),
    "inner_taps": sizes.size_in_map("short_conv_kernel_size"),
    "inner_index_heads": sizes.size_in_map("sparse_num_index_heads"),
    "inner_index_dim": sizes.size_in_map("sparse_index_dim"),
    "twice": sizes.doubled,
    "double": sizes.double_ffn,
    "head_dim_of_full": sizes.size_of_full_layers("full_head_dim", "head_dim"),
    "kv_heads_of_full": sizes.size_of_full_layers("full_kv_heads", "num_key_value_heads"),
    "zero_or": sizes.zero_or,
    "sharing": layers.layers_without_indexer,
    "limited": sizes.group_count,
    "expanded": sizes.state_head_dim,
    "adjusted": sizes.adjusted_ffn,
}
LINES = {(line.split()[0], line.split()[1]): line for line in TABLE.strip().splitlines()}
LAST = list(dict.fromkeys(setting for setting, _ in LINES))


def keys_of(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """The config key of each setting of a family that has a key: of several names the first that the config has."""
    keys = {name: key.split() for name, key in {**USUAL, **family.keys}.items() if key}
    return {name: next((key for key in names if key in config), names[0]) for name, names in keys.items()}


def rows_of(family: Family, config: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows of a family, with the key names that the config has, in the order in which they are written."""
    keys = keys_of(family, config)
    first = {name: key.split()[0] for name, key in {**USUAL, **family.keys}.items() if key}
    rotary = [rope.PARAMETERS, keys.pop("rope_theta", rope.THETA), rope.SCALING, keys.pop("rotary_fraction", "")]
    keys |= {"biases": " ".join(family.biases), "sliding_window": family.window}
    keys |= {"rope": "" if family.rope_theta is None else " ".join(rotary)}
    names = sorted((name for name in keys if keys[name]), key=lambda name: LAST.index(name) if name in LAST else -1)
    lines = {name: LINES.get((name, first.get(name, ""))) or LINES.get((name, "*")) or f"{name}  *" for name in names}
    named = [re.sub(rf"(?<=\s)(?:\*|{first.get(name, '-')})(?=\s|$)", keys[name], line) for name, line in lines.items()]
    return rows("\n".join(map(str.strip, named)), CODECS)


def keys_read(family: Family) -> set[str]:
    """The config keys that a family's table reads, with all their names, and those in other rows of its settings."""
    keys = {key for row in rows_of(family, {}) for names in row.keys for key in names}
    keys |= {key for (name, _), line in LINES.items() if name in family.keys for key in line.split()[2:-1]}
    keys |= {*" ".join(family.keys.values()).split(), *family.switch.split()}
    return keys | {*family.requires, *family.marks, *family.own}


def required(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in `requires` of a family that spell a setting, as the config of a model with `values` has them."""
    known = {**values, "family": family.name, "rope": rope.Rope(*map(values.get, rope.Rope._fields))}
    table = [
        row
        for row in rows_of(family, family.requires)
        if known.get(row.setting) is not None and {name for names in row.keys for name in names} & {*family.requires}
    ]
    written = write(table, known, (), family.name)
    return {key: value for key, value in written.items() if key in family.requires}
