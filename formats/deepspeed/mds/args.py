"""The arguments of Megatron-DeepSpeed in those of Megatron-LM, which it began with and which say what they mean.

Facts: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed at 6acc370a and of OpenLLM-France's at a106b24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError, short
from formats.torch_files.pickle_values import Opaque

NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
NO_EXPERTS = (None, 1, [1])
"""`num_experts` of a model without any: it is a number for each layer that has some."""
REQUIRED: Mapping[str, tuple[Any, ...]] = {"mlp_type": (None, "standard"), "embed_layernorm": (None, False)}
"""Arguments that change what a model computes: the values that are supported."""
RUN = frozenset({
    "attn_mask", "checkpoint_num_layers", "consumed_train_tokens", "deepspeed", "disable_mem_efficient_ln",
    "ds_pipeline_enabled", "ds_sequence_parallel_size", "expert_interval", "kd_alpha_ce", "kd_beta_ce", "kd_temp",
    "mem_efficient_ln", "moe_eval_capacity_factor", "moe_expert_parallel_size", "moe_loss_coeff", "moe_min_capacity",
    "moe_top2_2nd_expert_sampling", "moe_train_capacity_factor", "num_experts_teacher", "profile_steps",
    "remote_device", "rotary_pos_emb", "tile_factor", "topk", "zero_stage",
})  # fmt: skip
"""Arguments that Megatron-LM has not, and that change neither layout nor computation: they are not at their zeros."""


def translated(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments as Megatron-LM spells them.

    Args:
        args: the attributes of the namespace.
        where: what to call its file in an error.

    Raises:
        UnsupportedError: the model has something that has no layout here.
    """
    for name, values in REQUIRED.items():
        if args.get(name) not in values:
            raise UnsupportedError(f"{where}: {name} = {short(args[name])} is not supported, only {values[-1]}")
    if args.get("num_experts") not in NO_EXPERTS:
        raise UnsupportedError(f"{where}: {short(args['num_experts'])} experts, which are not supported")
    rotary = args.get("use_rotary_position_embeddings")
    kind = args.get("position_embedding_type", "rope" if rotary else "learned_absolute")
    if isinstance(kind, Opaque):
        raise UnsupportedError(
            f"{where}: the positions of BigScience's tree ({short(kind.args)}, of BLOOM) are not supported",
            "bigscience/bloom is on the Hub with its weights",
        )
    norm, groups = args.get("normalization", "layernorm"), args.get("num_key_value_heads")
    own = {
        "num_experts": None,
        "normalization": NORMS.get(norm, norm) if isinstance(norm, str) else norm,
        "position_embedding_type": kind,
        "rotary_base": args.get("rope_theta", 10000),
        "num_query_groups": groups,
        "group_query_attention": groups is not None,
    }
    theirs = {"mlp_type", "embed_layernorm", "num_key_value_heads", "rope_theta"} | RUN
    return {name: value for name, value in args.items() if name not in theirs} | own
