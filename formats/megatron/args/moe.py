"""The arguments of Megatron's mixtures of experts, and the ranks that hold their parts.

Facts: megatron-core 0.16.1, transformer/moe/moe_utils.py `topk_routing_with_score_function` (weights of the chosen),
`group_limited_topk` (groups), transformer/transformer_config.py (what it refuses), parallel_state.py (the order of
ranks); megatron/training/checkpointing.py at 0.18 (which ranks write a file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.families import family_named
from formats.megatron.mesh import Mesh
from formats.model.spec import EXPERTS, ModelSpec, real, some_layers, whole

ARGS = {
    "experts": "num_experts",
    "top_k": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "router_scale": "moe_router_topk_scaling_factor",
    "router_groups": "moe_router_num_groups",
    "router_top_groups": "moe_router_group_topk",
}
"""Setting: argument."""

INTERLEAVE = {"interleave": "moe_mlp_glu_interleave_size", "shared_interleave": "moe_shared_expert_glu_interleave_size"}
"""Rows of gate and of up that alternate in an expert, and in the shared ones: since 0.18, and 0.19."""
ACTS = {"interleave": "moe_grouped_gemm", "shared_interleave": "use_grouped_gemm_for_shared_expert"}
"""The argument without which each has no effect (transformer/moe/experts.py, shared_experts.py, 0.19.2)."""

BALANCING = (None, "aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""How loads may be balanced: by losses alone, which leave the choice of experts to their scores."""


# --- settings --------------------------------------------------------------------------------------------------------


def found(args: Mapping[str, Any], values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], frozenset[str], str]:
    """What args say of experts: the settings, the tensors by which families are told apart, and the router's function.

    Raises:
        UnsupportedError: the router computes what no family here does.
    """
    if args.get("num_experts") is None:
        return {}, frozenset(), ""
    score = args.get("moe_router_score_function") or "softmax"
    balancing = args.get("moe_router_load_balancing_type")
    if score not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"{where}: moe_router_score_function = {short(score)} is not supported")
    for kind in balancing if isinstance(balancing, list) else [balancing]:
        if kind not in BALANCING:
            raise UnsupportedError(f"{where}: moe_router_load_balancing_type = {short(kind)} is not supported")
    settings: dict[str, Any] = {name: args.get(key) for name, key in ARGS.items()}
    settings["expert_ffn"] = settings["expert_ffn"] or values.get("ffn")
    single = settings["top_k"] == 1
    settings["router_normalized"] = not (single if score == "sigmoid" else args.get("moe_router_pre_softmax"))
    scale = settings["router_scale"]
    settings["router_scale"] = 1.0 if scale is None else real(scale, "router_scale", where)
    if not settings["router_top_groups"]:
        settings |= {"router_groups": 1, "router_top_groups": 1}
    elif not _ranks_by_two(settings["top_k"], settings["router_top_groups"]):
        raise UnsupportedError(
            f"{where}: moe_router_group_topk = {short(settings['router_top_groups'])} is not supported with "
            f"moe_router_topk = {short(settings['top_k'])}, only half of it"
        )
    settings["dense_layers"] = _dense(args.get("moe_layer_freq", 1), values.get("layers"), where)
    has = {
        "router": True,
        "router_bias": args.get("moe_router_enable_expert_bias"),
        "shared_up": settings["shared_ffn"] is not None,
        "shared_router": args.get("moe_shared_expert_gate"),
    }
    return settings, frozenset(name for name, there in has.items() if there), score


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


def _ranks_by_two(top_k: Any, groups: Any) -> bool:
    """Whether Megatron ranks groups as transformers does: by their two best experts."""
    return type(top_k) is int and type(groups) is int and groups > 0 and top_k // groups == 2


def _dense(frequency: Any, layers: Any, where: str) -> tuple[int, ...]:
    """The layers without experts (models/gpt/gpt_layer_specs.py `get_gpt_decoder_layer_specs`)."""
    match frequency:
        case int() if frequency > 0:
            return tuple(layer for layer in some_layers(layers) if layer % frequency)
        case list() if len(frequency) == layers and all(type(one) is int and one in (0, 1) for one in frequency):
            return tuple(layer for layer, one in enumerate(frequency) if not one)
    raise UnsupportedError(f"{where}: moe_layer_freq = {short(frequency)} says nothing about {short(layers)} layers")


def chosen(values: Mapping[str, Any], base: ModelSpec | None, where: str) -> dict[str, Any]:
    """The settings as their family has them: None where it leaves no choice.

    Without a dense layer `ffn` is the width of nothing, and Megatron may say anything: it is that of the config.

    Raises:
        UnsupportedError: it leaves no choice, and computes something else.
    """
    family, settings = values["family"], dict(values)
    keys = family_named(family).keys
    if keys.get("expert_ffn") in (None, keys.get("ffn")):  # one key for both, or one width
        settings["ffn"] = settings["expert_ffn"]
    elif base and not settings["dense_layers"]:
        settings["ffn"] = base.ffn
    for name, only in EXPERTS.items():
        if name in keys:
            continue
        if only is not None and settings[name] != only:
            said = short(settings[name])
            raise UnsupportedError(f"{where}: {name} = {said} is not supported for {family}, only {only}")
        settings[name] = None
    return settings


def arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of a model's experts; those of a model without any say so.

    Raises:
        RefusedError: Megatron has no such router.
    """
    if not spec.experts:
        return {"num_experts": None}
    family = family_named(spec.family)
    held = {name: only if getattr(spec, name) is None else getattr(spec, name) for name, only in EXPERTS.items()}
    sigmoid, normalized, grouped = family.router == "sigmoid", held["router_normalized"], held["router_groups"] > 1
    reasons = {
        "of a sigmoid's scores its weights always add up to 1": sigmoid and not normalized and spec.top_k != 1,
        "of a single expert it has no weight that is normalized": normalized and spec.top_k == 1,
        f"it ranks groups by {spec.top_k} // {held['router_top_groups']} of their experts, this model by 2": (
            grouped and not _ranks_by_two(spec.top_k, held["router_top_groups"])
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RefusedError(f"megatron-core cannot compute this {spec.family}: {reason}")
    sparse = spec.sparse_layers
    return {key: held[name] for name, key in ARGS.items()} | {
        "moe_ffn_hidden_size": spec.expert_ffn or spec.ffn,
        "moe_router_num_groups": held["router_groups"] if grouped else None,
        "moe_router_group_topk": held["router_top_groups"] if grouped else None,
        "moe_router_topk_scaling_factor": held["router_scale"] if held["router_scale"] != 1.0 else None,
        "moe_router_score_function": family.router,
        "moe_router_pre_softmax": not sigmoid and not normalized,
        "moe_router_enable_expert_bias": "router_bias" in family.facts.experts,
        "moe_shared_expert_gate": "shared_router" in family.facts.experts,
        "moe_layer_freq": [int(layer in sparse) for layer in range(spec.layers)] if spec.mixed else 1,
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


# --- ranks -----------------------------------------------------------------------------------------------------------
