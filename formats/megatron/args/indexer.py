"""Megatron's sparse attention (DSA): multi-latent attention to tokens that an indexer chooses; tensors and arguments.

Facts: megatron-core 0.19.2, transformer/experimental_attention_variant/dsa.py: the first elements of a head of the
indexer rotate, in halves or by neighbours (`_apply_rope`); up to 0.18 the last elements did, by neighbours, in tensors
of the same names and shapes. A Hadamard transform, which changes scores by rounding alone, can be left out since 0.19.
models/gpt/experimental_attention_variant_module_specs.py: only Transformer Engine's layers have it, and the norms of
latents are modules of their own.
"""

from __future__ import annotations

from typing import Any

from formats.errors import RefusedError, UnsupportedError
from formats.layout.table import rules
from formats.megatron.args.codecs import refusal
from formats.model.codec import Codec, Context, Spelled, single
from formats.model.spec import ModelSpec
from formats.model.values import positive_int, some_layers

INDEXER = "self_attention.core_attention.indexer"
RULES = rules(f"""
decoder.layers.{{layer}}.self_attention.q_layernorm.weight       query_latent_norm: query_rank    indexed
decoder.layers.{{layer}}.self_attention.kv_layernorm.weight      latent_norm: latent_rank    indexed
decoder.layers.{{layer}}.{INDEXER}.linear_wq_b.weight            index_query: (index_head index_dim) query_rank    indexing
decoder.layers.{{layer}}.{INDEXER}.linear_wk.weight              index_key: index_dim hidden    indexing
decoder.layers.{{layer}}.{INDEXER}.k_norm.weight                 index_norm: index_dim    indexing
decoder.layers.{{layer}}.{INDEXER}.k_norm.bias                   index_norm_bias: index_dim    indexing
decoder.layers.{{layer}}.{INDEXER}.linear_weights_proj.weight    index_weights: index_head hidden    indexing
""")
"""The tensors of the indexer, which are whole on every tensor rank, and of the norms of latents."""

NORMS = ("q_layernorm", "kv_layernorm")
"""The modules beside the indexer whose `_extra_state` a strict load of torch_dist needs."""
STATES = ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")
"""The modules of the indexer whose `_extra_state` a strict load of torch_dist needs."""


def _read_pairs(spelled: Any, context: Context) -> bool:
    if spelled is None:
        raise UnsupportedError(
            f"{context.where}: args say no dsa_indexer_rope_interleaved: Megatron-LM before 0.19 saved it, where other "
            "elements of the indexer's heads rotate",
        )
    return bool(spelled)


pairs = single(_read_pairs, lambda value, _: bool(value))


def _shared(layers: range, step: int, first: int) -> tuple[int, ...]:
    """The layers without an indexer (dsa.py `is_dsa_skip_topk_layer`, which counts them from 1)."""
    return tuple(layer for layer in layers if max(layer + 1 - max(first, 1), 0) % step)


def layers_without_indexer(step: str, first: str) -> Codec:
    """A codec of the layers without an indexer.

    Args:
        step: the argument for the distance between layers with an indexer.
        first: the argument for the number of leading layers that all have an indexer.
    """

    def read(spelled: Spelled, context: Context) -> tuple[int, ...]:
        distance, offset = spelled.get(step) or 1, spelled.get(first) or 0
        layers = some_layers(context.values["layers"])
        return _shared(
            layers,
            positive_int(distance, step, context.where),
            positive_int(offset, first, context.where) if offset else 0,
        )

    def write(some: tuple[int, ...], context: Context) -> Spelled:
        layers = some_layers(context.values["layers"])
        for distance in range(1, len(layers) + 1):
            for offset in range(len(layers) + 1) if some else [0]:
                if _shared(layers, distance, offset) == tuple(some or ()):
                    return {step: distance, first: offset}
        raise refusal(context, f"its layers share indexers at equal distances, here {list(some)} have none")

    return Codec(read, write)


def split(spec: ModelSpec, tp: int) -> dict[str, Any]:
    """The argument that sparse attention on several tensor ranks needs (absorbed_mla.py); empty for other models."""
    return {"sequence_parallel": tp > 1} if spec.index_heads else {}


def require_topology(spec: ModelSpec, norm: str) -> None:
    """Refuse local layers for a model with sparse attention, which only Transformer Engine's layers have.

    Raises:
        RefusedError: the options ask for the names of local layers.
    """
    if spec.index_heads and norm == "local":
        raise RefusedError(
            f"megatron-core has the sparse attention of a {spec.family} in Transformer Engine's layers alone",
            "--norm te",
        )
