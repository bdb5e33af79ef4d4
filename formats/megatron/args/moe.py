"""The arguments of Megatron's mixture-of-experts layers: codecs of the router, and how experts are stored.

Facts: megatron-core 0.16.1, transformer/moe/moe_utils.py `topk_routing_with_score_function` (weights of the chosen),
`group_limited_topk` (groups), transformer/transformer_config.py (what it refuses), parallel_state.py (the order of
ranks); megatron/training/checkpointing.py at 0.18 (which ranks write a file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import SourceError, UnsupportedError, short
from formats.megatron.args.codecs import refusal
from formats.megatron.mesh import Mesh
from formats.model.codec import Codec, Context, Maker, single
from formats.model.spec import ModelSpec
from formats.model.values import positive_float, positive_int

INTERLEAVE = {"interleave": "moe_mlp_glu_interleave_size", "shared_interleave": "moe_shared_expert_glu_interleave_size"}
"""The arguments for the block size, in rows, in which gate and up alternate: experts since 0.18, shared ones 0.19."""
ACTS = {"interleave": "moe_grouped_gemm", "shared_interleave": "use_grouped_gemm_for_shared_expert"}
"""The arguments without which those of `INTERLEAVE` have no effect (transformer/moe/experts.py, shared_experts.py,
0.19.2)."""

BALANCING = (None, "aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""The supported kinds of load balancing: losses, which leave the choice of experts to the scores, or none."""


# --- codecs ----------------------------------------------------------------------------------------------------------


def _read_score(spelled: Any, context: Context) -> bool:
    if (spelled or "softmax") not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"{context.where}: moe_router_score_function = {short(spelled)} is not supported")
    return bool(spelled == "sigmoid")


def _read_balancing(spelled: Any, context: Context) -> None:
    for kind in spelled if isinstance(spelled, list) else [spelled]:
        if kind not in BALANCING:
            raise UnsupportedError(f"{context.where}: moe_router_load_balancing_type = {short(kind)} is not supported")


def _write_normalized(value: bool, context: Context) -> bool:
    sigmoid, single = context.values["sigmoid"], context.values["top_k"] == 1
    if sigmoid and not value and not single:
        raise refusal(context, "of a sigmoid's scores its weights always add up to 1")
    if value and single:
        raise refusal(context, "of a single expert it has no weight that is normalized")
    return not sigmoid and not value


def _ranked(top_k: Any, groups: Any, context: Context) -> str:
    """Why Megatron ranks groups of experts in another way than transformers; empty if both rank them alike.

    transformers ranks a group by its two best experts if scores are sigmoids (models/deepseek_v3), by its best expert
    if scores are a softmax (models/deepseek_v2).
    """
    ours = 2 if context.values["sigmoid"] else 1
    theirs = top_k // groups if type(top_k) is int and type(groups) is int and groups > 0 else 0
    return (
        "" if theirs == ours else f"it ranks groups by {short(top_k)} // {short(groups)} of their experts, not {ours}"
    )


def _read_groups(groups: Any, top: Any, context: Context) -> Any:
    if top and not groups:
        raise SourceError(f"{context.where}: moe_router_group_topk = {short(top)}, and no moe_router_num_groups")
    return groups if top else 1


def _read_top_groups(spelled: Any, context: Context) -> Any:
    one = context.values["router_groups"] == 1  # that of all experts
    if spelled and not one and (why := _ranked(context.values["top_k"], spelled, context)):
        raise UnsupportedError(f"{context.where}: moe_router_group_topk = {short(spelled)} is not supported: {why}")
    return spelled or 1


def _write_top_groups(value: int, context: Context) -> int | None:
    grouped = context.values["router_groups"] > 1
    if grouped and (why := _ranked(context.values["top_k"], value, context)):
        raise refusal(context, why)
    return value if grouped else None


CODECS: Mapping[str, Maker] = {
    "default ffn": single(
        lambda spelled, context: spelled or context.values["ffn"], lambda value, context: value or context.values["ffn"]
    ),
    "null if 1.0": single(
        lambda spelled, context: 1.0 if spelled is None else positive_float(spelled, "router_scale", context.where),
        lambda value, _: value if value != 1.0 else None,
    ),
    "null if 1 group": lambda key, top: Codec(
        lambda spelled, context: _read_groups(spelled.get(key), spelled.get(top), context),
        lambda value, _: {key: value if value > 1 else None},
    ),
    "top groups of experts": single(_read_top_groups, _write_top_groups),
    "softmax or sigmoid": single(_read_score, lambda sigmoid, _: "sigmoid" if sigmoid else "softmax"),
    "load balancing": lambda key: Codec(
        lambda spelled, context: _read_balancing(spelled.get(key), context), lambda *_: {}
    ),
    "unless pre-softmax": single(
        lambda spelled, context: not (context.values["top_k"] == 1 if context.values["sigmoid"] else spelled),
        _write_normalized,
    ),
}
"""The codecs of a router by name. Weights are a softmax of the chosen scores or of all scores; of sigmoids their sum is
1."""


# --- how experts are stored ------------------------------------------------------------------------------------------


def interleaves_of(args: Mapping[str, Any], where: str) -> dict[str, int]:
    """Rows of the interleaved blocks of gate and up, by their names in patterns; 0 if gate and up do not alternate.

    Experts that are not grouped, such as those of local layers, are never interleaved.
    """
    known = {"interleave": args.get("moe_grouped_gemm") is not False and args.get("transformer_impl") != "local"}
    known["shared_interleave"] = bool(args.get(ACTS["shared_interleave"]))
    sizes = {name: args.get(key) if args.get("num_experts") is not None else None for name, key in INTERLEAVE.items()}
    return {
        name: positive_int(size, INTERLEAVE[name], where) if size is not None and known[name] else 0
        for name, size in sizes.items()
    }


def sizes(spec: ModelSpec, mesh: Mesh, names: str) -> dict[str, Any]:
    """The arguments that describe how experts are stored in a checkpoint.

    Args:
        spec: the model.
        mesh: how experts are cut over ranks.
        names: the naming of the experts, `te` or `local` (`Options.experts`).
    """
    if not spec.experts:
        return {"expert_model_parallel_size": 1}
    # without grouped layers the fusion clamps before the bias is added (fused_bias_geglu.py, 0.15 to 0.19)
    clamped = {"bias_gelu_fusion": names == "te"} if "expert_down_bias" in spec.tensors else {}
    return clamped | {
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "moe_grouped_gemm": names == "te",
        "moe_use_legacy_grouped_gemm": False,
        **{INTERLEAVE[name]: size or None for name, size in mesh.interleaves.items()},
        ACTS["shared_interleave"]: bool(mesh.shared_interleave),
    }
