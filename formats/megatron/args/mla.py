"""Megatron's multi-latent attention (MLA), that of DeepSeek: its tensors and its arguments.

    linear_q_proj                            queries, or, where they have a latent of their own,
    linear_q_down_proj, linear_q_up_proj     down to it and up to the heads
    linear_kv_down_proj, linear_kv_up_proj   the same of keys and values; below their latent lies the key that rotates

Facts: megatron-core 0.16.1, transformer/multi_latent_attention.py and models/gpt/gpt_layer_specs.py: Transformer Engine's
layers have the down projections whole on every tensor rank, the local ones cut them. transformers 5.23.0,
models/deepseek_v2/modeling_deepseek_v2.py: its norms of latents have an epsilon of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.layout.table import rules
from formats.megatron.args import rope
from formats.model.spec import ModelSpec

RULES = rules("""
decoder.layers.{layer}.input_layernorm.weight                                                         input_norm: hidden    latent
decoder.layers.{layer}.self_attention.linear_q_proj.weight                                            latent_query: (group query_dim)/tp hidden
decoder.layers.{layer}.self_attention.linear_q_down_proj.weight                                       query_down: query_rank hidden
decoder.layers.{layer}.self_attention.{linear_q_up_proj.layer_norm_weight|q_layernorm.weight}         query_latent_norm: query_rank
decoder.layers.{layer}.self_attention.linear_q_up_proj.weight                                         query_up: (group query_dim)/tp query_rank
decoder.layers.{layer}.self_attention.linear_kv_down_proj.weight                                      latent_down: joint_dim hidden
decoder.layers.{layer}.self_attention.{linear_kv_up_proj.layer_norm_weight|kv_layernorm.weight}       latent_norm: latent_rank
decoder.layers.{layer}.self_attention.linear_kv_up_proj.weight                                        latent_up: (group up_dim)/tp latent_rank
""")
"""The part of a layer that is MLA's own, in the names of Transformer Engine and of the local layers."""

ARGS = {
    "query_rank": "q_lora_rank",
    "latent_rank": "kv_lora_rank",
    "nope_dim": "qk_head_dim",
    "rope_dim": "qk_pos_emb_head_dim",
    "head_dim": "v_head_dim",
}
"""Setting: argument."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "multi_latent_attention": (True,),
    "qk_layernorm": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
}
"""What sets it apart."""
EPSILON = 1e-6
"""That of the norms of latents in transformers, whatever the config says of the others."""
STATES = ("linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
MORE = (*ARGS.values(), "rope_type")
"""Arguments with a rule of their own."""


def here(args: Mapping[str, Any]) -> bool:
    """Whether args are those of such a model."""
    return args.get("multi_latent_attention") is True


def found(args: Mapping[str, Any], epsilon: Any, where: str) -> dict[str, Any]:
    """The settings that args say, but for the rope scaling.

    Args:
        args: those of the checkpoint.
        epsilon: that of all norms.
        where: what to call the file in an error.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    if epsilon != EPSILON:
        raise UnsupportedError(
            f"{where}: layernorm_epsilon = {short(epsilon)} is not supported with latents, only {EPSILON}"
        )
    return {name: args.get(key) for name, key in ARGS.items()}


def scaling(args: Mapping[str, Any], base: ModelSpec | None, where: str) -> Mapping[str, Any] | None:
    """The rope scaling that args say, as the config spells it where that means the same.

    Raises:
        SourceError: a number is missing.
        UnsupportedError: transformers has no such scaling.
    """
    kind = args.get("rope_type") or "yarn"  # the default of MLATransformerConfig
    if kind == "yarn" and args.get("rotary_scaling_factor") == 1:  # which is plain rope
        return None
    if kind == "yarn":
        return rope.yarn_of(args, rope.LATENT, base, where)
    if kind != "rope" or args.get("mscale_all_dim"):  # by which scores are scaled, even then
        said = args.get("mscale_all_dim")
        raise UnsupportedError(
            f"{where}: rope_type = {short(kind)} with mscale_all_dim = {short(said)} is not supported"
        )
    return None


def arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of a model with latents.

    Raises:
        RefusedError: Megatron cannot compute it.
    """
    if spec.norm_epsilon != EPSILON:
        raise RefusedError(
            f"megatron-core cannot compute this {spec.family}: its norms have an epsilon of {spec.norm_epsilon:g}, "
            f"those of its latents {EPSILON:g}"
        )
    plain = {"rope_type": "rope", "rotary_scaling_factor": 1.0, **rope.NO_SCALE}
    names = rope.LATENT
    yarn = rope.yarn(spec.rope_scaling, names, spec.max_positions) if spec.rope_scaling else plain
    one_sided = not (spec.rope_scaling or {}).get("mscale") and (spec.rope_scaling or {}).get("mscale_all_dim")
    if yarn is None or one_sided:
        raise RefusedError(
            f"megatron-core has no rope scaling with latents like this: {short(dict(spec.rope_scaling or {}))}",
            "it knows YaRN with a factor above 1, original_max_position_embeddings, mscale and mscale_all_dim both or "
            "neither, and no truncate, or attention_factor but YaRN's own",
        )
    if spec.rope_scaling:
        yarn = {"rope_type": "yarn", **yarn}
    only = {name: allowed[0] for name, allowed in ONLY.items()}
    return only | {key: getattr(spec, name) for name, key in ARGS.items()} | yarn


def require_names(spec: ModelSpec, norm: str, tp: int) -> None:
    """The names of the local layers mean other shapes where a tensor rank holds a part.

    Raises:
        RefusedError: they do.
    """
    if spec.latent_rank and norm == "local" and tp > 1:
        raise RefusedError(
            f"the local layers of megatron-core cut the down projections of a {spec.family} over tp = {tp}, "
            "Transformer Engine's do not",
            "--norm te, or --tp 1",
        )


def states(spec: ModelSpec, *, te: bool) -> list[str]:
    """The modules of each layer's attention whose `_extra_state` a strict load of torch_dist asks for."""
    query = ("linear_q_down_proj", "linear_q_up_proj") if spec.query_rank else ("linear_q_proj",)
    return [f"self_attention.{name}" for name in (*query, *STATES)] + (["input_layernorm"] if te else [])
