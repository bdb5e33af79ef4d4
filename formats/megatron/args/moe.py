"""The arguments of Megatron's mixtures of experts, and the ranks that hold their parts.

Facts: megatron-core 0.16.1, transformer/moe/moe_utils.py `topk_routing_with_score_function` (weights of the chosen),
`group_limited_topk` (groups), transformer/transformer_config.py (what it refuses), parallel_state.py (the order of
ranks); megatron/training/checkpointing.py at 0.18 (which ranks write a file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.mesh import Mesh
from formats.model.codec import Codec, Context, scalar
from formats.model.spec import ModelSpec, real, whole

INTERLEAVE = {"interleave": "moe_mlp_glu_interleave_size", "shared_interleave": "moe_shared_expert_glu_interleave_size"}
"""Rows of gate and of up that alternate in an expert, and in the shared ones: since 0.18, and 0.19."""
ACTS = {"interleave": "moe_grouped_gemm", "shared_interleave": "use_grouped_gemm_for_shared_expert"}
"""The argument without which each has no effect (transformer/moe/experts.py, shared_experts.py, 0.19.2)."""

ROUTERS = ("softmax", "sigmoid")
BALANCING = (None, "aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""How loads may be balanced: by losses alone, which leave the choice of experts to their scores."""


# --- codecs ----------------------------------------------------------------------------------------------------------


def score(key: str) -> Codec:
    """How the router makes weights of scores."""

    def read(spelled: Any, context: Context) -> Any:
        if (spelled or ROUTERS[0]) not in ROUTERS:
            raise UnsupportedError(f"{context.where}: {key} = {short(spelled)} is not supported")
        return spelled or ROUTERS[0]

    return scalar(key, read, lambda router, _: router)


def balancing(key: str) -> Codec:
    """How loads are balanced, which no model has to know."""

    def read(spelled: Any, context: Context) -> None:
        for kind in spelled if isinstance(spelled, list) else [spelled]:
            if kind not in BALANCING:
                raise UnsupportedError(f"{context.where}: {key} = {short(kind)} is not supported")

    return Codec(lambda spelled, context: read(spelled.get(key), context), lambda *_: {})


def width(key: str) -> Codec:
    """The width of an expert, that of the MLP where nothing else is said."""
    return scalar(
        key,
        lambda spelled, context: spelled or context.values["ffn"],
        lambda value, context: value or context.values["ffn"],
    )


def scale(key: str) -> Codec:
    """What weights are multiplied by, 1 where nothing is said."""
    return scalar(
        key,
        lambda spelled, context: 1.0 if spelled is None else real(spelled, "router_scale", context.where),
        lambda value, _: value if value != 1.0 else None,
    )


def normalized(key: str) -> Codec:
    """Whether weights add up to 1: of a softmax if it is taken of the chosen, of a sigmoid if more than one is."""

    def read(spelled: Any, context: Context) -> bool:
        return not (context.values["top_k"] == 1 if context.values["router"] == "sigmoid" else spelled)

    def write(value: bool, context: Context) -> bool:
        sigmoid, single = context.values["router"] == "sigmoid", context.values["top_k"] == 1
        if sigmoid and not value and not single:
            raise RefusedError(_cannot(context, "of a sigmoid's scores its weights always add up to 1"))
        if value and single:
            raise RefusedError(_cannot(context, "of a single expert it has no weight that is normalized"))
        return not sigmoid and not value

    return scalar(key, read, write)


def groups(key: str, top_groups: str) -> Codec:
    """Into how many groups experts fall; one where there is no choice of them."""
    return Codec(
        lambda spelled, _: spelled.get(key) if spelled.get(top_groups) else 1,
        lambda value, _: {key: value if value > 1 else None},
    )


def top_groups(key: str) -> Codec:
    """How many groups are chosen. Megatron ranks them by `top_k` // groups of their experts, transformers by two."""

    def read(spelled: Any, context: Context) -> Any:
        top_k = context.values["top_k"]
        if spelled and not (type(top_k) is int and type(spelled) is int and spelled > 0 and top_k // spelled == 2):
            raise UnsupportedError(
                f"{context.where}: {key} = {short(spelled)} is not supported with moe_router_topk = {short(top_k)}, "
                "only half of it"
            )
        return spelled or 1

    def write(value: int, context: Context) -> int | None:
        grouped, top_k = context.values["router_groups"] > 1, context.values["top_k"]
        if grouped and top_k // value != 2:
            raise RefusedError(
                _cannot(context, f"it ranks groups by {top_k} // {value} of their experts, this model by 2")
            )
        return value if grouped else None

    return scalar(key, read, write)


def _cannot(context: Context, why: str) -> str:
    return f"megatron-core cannot compute this {context.values['family']}: {why}"


# --- how experts are stored ------------------------------------------------------------------------------------------


def interleaves_of(args: Mapping[str, Any], where: str) -> dict[str, int]:
    """How many rows of gate and up alternate, by the name that patterns have for it; 0 where they do not.

    Experts one by one, as the local layers have them, are never interleaved.
    """
    known = {"interleave": args.get("moe_grouped_gemm") is not False and args.get("transformer_impl") != "local"}
    known["shared_interleave"] = bool(args.get(ACTS["shared_interleave"]))
    sizes = {name: args.get(key) if args.get("num_experts") is not None else None for name, key in INTERLEAVE.items()}
    return {
        name: whole(size, INTERLEAVE[name], where) if size is not None and known[name] else 0
        for name, size in sizes.items()
    }


def sizes(spec: ModelSpec, mesh: Mesh, names: str) -> dict[str, Any]:
    """The arguments that say how experts lie in a checkpoint; `names` are those of Options."""
    if not spec.experts:
        return {"expert_model_parallel_size": 1}
    # without grouped layers the fusion clamps what has no bias yet (fused_bias_geglu.py, 0.15 to 0.19)
    clamped = {"bias_gelu_fusion": names == "te"} if "expert_down_bias" in spec.tensors else {}
    return clamped | {
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "moe_grouped_gemm": names == "te",
        "moe_use_legacy_grouped_gemm": False,
        **{INTERLEAVE[name]: size or None for name, size in mesh.interleaves.items()},
        ACTS["shared_interleave"]: bool(mesh.shared_interleave),
    }
