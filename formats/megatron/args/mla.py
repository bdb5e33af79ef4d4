"""Megatron's multi-latent attention (MLA, as in DeepSeek): its tensors and its arguments.

    linear_q_proj                            queries without a latent
    linear_q_down_proj, linear_q_up_proj     queries with a latent: down to the latent, up to the heads
    linear_kv_down_proj, linear_kv_up_proj   keys and values, likewise; the rows of the rotating key follow their latent

Facts: megatron-core 0.16.1, transformer/multi_latent_attention.py and models/gpt/gpt_layer_specs.py: the down
projections of Transformer Engine's layers are whole on every tensor rank, local layers cut them. transformers 5.23.0,
models/deepseek_v2/modeling_deepseek_v2.py: the norms of latents have an epsilon of their own.
"""

from __future__ import annotations

from formats.errors import RefusedError
from formats.layout.table import rules
from formats.megatron.args import indexer
from formats.megatron.args.codecs import epsilon_of
from formats.model.codec import Codec
from formats.model.spec import ModelSpec

RULES = rules("""
decoder.layers.{layer}.input_layernorm.weight                                                         input_norm: hidden    latent
decoder.layers.{layer}.self_attention.linear_q_proj.weight                                            latent_query: (group query_dim)/tp hidden
decoder.layers.{layer}.self_attention.linear_q_down_proj.weight                                       query_down: query_rank hidden
decoder.layers.{layer}.self_attention.{linear_q_up_proj.layer_norm_weight|q_layernorm.weight}         query_latent_norm: query_rank    unindexed
decoder.layers.{layer}.self_attention.linear_q_up_proj.weight                                         query_up: (group query_dim)/tp query_rank
decoder.layers.{layer}.self_attention.linear_kv_down_proj.weight                                      latent_down: joint_dim hidden
decoder.layers.{layer}.self_attention.{linear_kv_up_proj.layer_norm_weight|kv_layernorm.weight}       latent_norm: latent_rank    unindexed
decoder.layers.{layer}.self_attention.linear_kv_up_proj.weight                                        latent_up: (group up_dim)/tp latent_rank
""")
"""The tensors of MLA in a layer, under the names of Transformer Engine and of the local layers."""

EPSILON = 1e-6
"""The epsilon of the norms of latents in transformers, whatever the epsilon of other norms in the config is."""
STATES = ("linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")


epsilon = epsilon_of("latents", EPSILON)


def rope_fusion(key: str) -> Codec:
    """A codec of the fused rotation, which says nothing of a model: it rotates by YaRN alone.

    With plain rope `MLATransformerConfig` stops at it (transformer/transformer_config.py, 0.19.2).
    """
    return Codec(lambda *_: None, lambda _, context: {} if context.values["rope_scaling"] else {key: False})


def require_names(spec: ModelSpec, norm: str, tp: int) -> None:
    """Refuse local layers on several tensor ranks for a model with latents: their down projections have other shapes.

    Raises:
        RefusedError: the options ask for local layers and several tensor ranks.
    """
    if spec.latent_rank and norm == "local" and tp > 1:
        raise RefusedError(
            f"the local layers of megatron-core cut the down projections of a {spec.family} over tp = {tp}, "
            "Transformer Engine's do not",
            "--norm te, or --tp 1",
        )


def states(spec: ModelSpec, *, te: bool) -> list[str]:
    """The modules of each layer's attention whose `_extra_state` a strict load of torch_dist needs."""
    query = ("linear_q_down_proj", "linear_q_up_proj") if spec.query_rank else ("linear_q_proj",)
    norms = indexer.NORMS if spec.index_heads else ()
    return [f"self_attention.{name}" for name in (*query, *STATES, *norms)] + (["input_layernorm"] if te else [])
