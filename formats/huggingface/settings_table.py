"""The table of settings and their keys in config.json, for all families; the keys of a family choose its rows.

Codecs of layers, which the setting lists by number; "words", "flags" and "list" are of one entry for each layer, and
what follows "or" holds where they are absent:

    words or first n           words, or the number of layers at the start (`first n`, `last n`: that number alone)
    words or step              words, or the distance between layers of the other kind; `flags or step`: 0 and 1
    words or default           words, or the default of transformers; `Mamba words or all`: all layers
    words or flags             words, or a list of numbers, 0 for the other kind; `... of map`: that list in a map
    words, pattern or step     words, letters in a string, or a distance behind some first layers
    words or attention list    words, or the layers of the other kind (`all but a list`: that list alone)
    words or lists of map      words, or two lists in a map, which count layers from 1
    dense list and step        the dense layers, and the distance between those with experts
    sparse list or step        the layers with experts, or the distance between them
    sparse range and step      the first and the last layer with experts, and the distance between them
    MLP blocks, ...            letters or words for layers of one block each; `number of blocks`: how many they are

Codecs of sizes:

    n * expert_ffn             a number of experts: the setting is their width together
    2 * value, 2 * ffn if true    twice the value of the key; twice the setting `ffn`, if the key is true
    0 for none                 the value; None for 0
    1 unless group-limited     the value, if the method of routing is by groups
    size or auto               the value, or the width of all heads divided by their number
    adjusted width             two thirds of the value, times a factor, rounded up
    map[KEY] or value          KEY of a map, or the value of a key of its own
    SIZE of full layers        SIZE in a map of layers, or the value of a key of its own
    default of family          the value, or the default of transformers
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
layers               hybrid_override_pattern                             number of blocks
biases               *                                                   biases
mlp_layers           *                                                   MLP blocks
dense_layers         hybrid_override_pattern                             dense MLP blocks
state_layers         hybrid_override_pattern                             Mamba blocks
state_layers         layer_types                                         Mamba words or all
state_layers         attn_layer_indices                                  all but a list
short_layers         * full_attn_idxs                                    words or attention list
state_dim            mamba_d_head mamba_expand mamba_d_ssm               size or auto
ffn                  block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of  adjusted width
dense_layers         first_k_dense_replace                               first n
dense_layers         mlp_layer_types first_k_dense_replace               words or first n
dense_layers         moe_layer_freq mlp_layer_types                      words or flags
dense_layers         moe_layers interleave_moe_layer_step                sparse list or step
dense_layers         moe_layer_start_index moe_layer_end_index moe_layer_interval  sparse range and step
dense_layers         * decoder_sparse_step                               dense list and step
shared_ffn           n_shared_experts                                    n * expert_ffn
shared_ffn           num_shared_experts                                  n * expert_ffn
shared_ffn           moe_num_shared_experts                              n * expert_ffn
shared_ffn           *                                                   default of family
router_groups        topk_method n_group                                 1 unless group-limited
router_top_groups    topk_method topk_group                              1 unless group-limited
shared_index_layers  * index_topk_pattern index_topk_freq index_skip_topk_offset  words, pattern or step
nope_layers          * no_rope_layer_interval                            flags or step
recurrent_layers     * full_attention_interval                           words or step
full_layers          *                                                   words or default
recurrent_layers     linear_attn_config layer_types                      words or lists of map
linear_key_heads     linear_num_heads linear_attn_config                 map[num_heads] or value
linear_value_heads   linear_num_heads linear_attn_config                 map[num_heads] or value
linear_key_dim       linear_head_dim linear_attn_config                  map[head_dim] or value
linear_value_dim     linear_head_dim linear_attn_config                  map[head_dim] or value
linear_taps          linear_conv_kernel_dim linear_attn_config           map[short_conv_kernel_size] or value
index_heads          index_n_heads sparse_attention_config               map[sparse_num_index_heads] or value
index_dim            index_head_dim sparse_attention_config              map[sparse_index_dim] or value
block_layers         sparse_attention_config layer_types                 words or flags of map
window_kv_heads      num_key_value_heads                                 2 * value
full_head_dim        global_head_dim per_layer_config                    head_dim of full layers
full_kv_heads        num_global_key_value_heads per_layer_config attention_k_eq_v  kv_heads of full layers
reusing_layers       num_kv_shared_layers                                last n
reusing_ffn          use_double_wide_mlp                                 2 * ffn if true
layer_width          *                                                   0 for none
sliding_window       *
rope                 *                                                   rope
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
    "first n": layers.leading_dense_layers,
    "words or first n": layers.dense_layers_by_word,
    "sparse list or step": layers.sparse_layers_by_list,
    "sparse range and step": layers.sparse_layers_by_range,
    "dense list and step": layers.dense_layers_by_list,
    "n * expert_ffn": layers.shared_expert_count,
    "default of family": layers.shared_ffn,
    "flags or step": layers.layers_without_rotation,
    "words or default": layers.layers_without_window,
    "words or step": layers.linear_layers_by_step,
    "rope": rope.rotary,
    "number of blocks": layers.of_kind(),
    "MLP blocks": layers.of_kind(layers.MLP, layers.MOE),
    "dense MLP blocks": layers.of_kind(layers.MLP),
    "Mamba blocks": layers.of_kind(layers.LINEAR),
    "Mamba words or all": layers.state_layers,
    "all but a list": layers.layers_not_listed,
    "words or attention list": layers.convolution_layers,
    "words or lists of map": layers.linear_layers_by_lists,
    "words or flags": layers.dense_layers_by_flag,
    "words or flags of map": layers.block_layers,
    "last n": layers.last_layers,
    "map[num_heads] or value": sizes.size_in_map("num_heads"),
    "map[head_dim] or value": sizes.size_in_map("head_dim"),
    "map[short_conv_kernel_size] or value": sizes.size_in_map("short_conv_kernel_size"),
    "map[sparse_num_index_heads] or value": sizes.size_in_map("sparse_num_index_heads"),
    "map[sparse_index_dim] or value": sizes.size_in_map("sparse_index_dim"),
    "2 * value": sizes.doubled,
    "2 * ffn if true": sizes.double_ffn,
    "head_dim of full layers": sizes.size_of_full_layers("full_head_dim", "head_dim"),
    "kv_heads of full layers": sizes.size_of_full_layers("full_kv_heads", "num_key_value_heads"),
    "0 for none": sizes.zero_or,
    "words, pattern or step": layers.layers_without_indexer,
    "1 unless group-limited": sizes.group_count,
    "size or auto": sizes.state_head_dim,
    "adjusted width": sizes.adjusted_ffn,
}


def _lines(table: str) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    for line in table.strip().splitlines():
        setting, keys, codec = (*re.split(r"\s{2,}", line), "")[:3]
        first, _, further = keys.partition(" ")
        yield (setting, first), (further, codec)


LINES = dict(_lines(TABLE))
"""Setting and first key, or a star: further keys, and the name of the codec."""
LAST = list(dict.fromkeys(setting for setting, _ in LINES))


def keys_of(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """The config key of each setting of a family that has a key: of several names the first that the config has."""
    keys = {name: key.split() for name, key in {**USUAL, **family.keys}.items() if key}
    return {name: next((key for key in names if key in config), names[0]) for name, names in keys.items()}


def rows_of(family: Family, config: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows of a family, with all key names that the config has, in the order in which they are written."""
    keys, names_of = keys_of(family, config), {**USUAL, **family.keys}
    keys = {
        setting: "|".join([key, *(name for name in names_of[setting].split() if name in config and name != key)])
        for setting, key in keys.items()
    }
    first = {name: key.split()[0] for name, key in {**USUAL, **family.keys}.items() if key}
    rotary = [rope.PARAMETERS, keys.pop("rope_theta", rope.THETA), rope.SCALING, rope.ORIGINAL]
    rotary += [keys.pop("rotary_fraction", "")]
    keys |= {"biases": " ".join(family.biases), "sliding_window": family.window}
    keys |= {"rope": "" if family.rope_theta is None else " ".join(rotary)}
    names = sorted((name for name in keys if keys[name]), key=lambda name: LAST.index(name) if name in LAST else -1)
    lines = ((name, LINES.get((name, first.get(name, "")), LINES.get((name, "*"), ("", "")))) for name in names)
    return rows("\n".join(f"{name}  {keys[name]} {further}  {codec}" for name, (further, codec) in lines), CODECS)


def keys_read(family: Family) -> set[str]:
    """The config keys that a family's table reads, with all their names, and those in other rows of its settings."""
    keys = {key for row in rows_of(family, {}) for names in row.keys for key in names}
    keys |= {key for (name, _), (further, _) in LINES.items() if name in family.keys for key in further.split()}
    keys |= {*" ".join(family.keys.values()).split(), *family.switch.split()}
    return keys | {*family.requires, *family.marks, *family.own, *family.copied}


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
