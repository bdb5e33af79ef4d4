"""The arguments of GPT-OSS, the only family whose attention has sinks, and those of windows in some layers.

Facts: megatron-core 0.16.1, transformer/dot_product_attention.py (sinks), transformer/utils.py
`is_layer_window_attention`, transformer/mlp.py (`glu`: the clamp and the offset), fusions/fused_bias_geglu.py
`quick_gelu`; megatron/training/arguments.py at d98e8a64 for their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.versions import version_of
from formats.megatron.args.windows import windows_per_layer
from formats.model.spec import ModelSpec, real

ONLY: Mapping[str, tuple[Any, ...]] = {
    "swiglu": (False,),
    "normalization": ("RMSNorm",),
    "add_bias_linear": (True,),
    "disable_bias_linear": (False,),
    "quick_geglu": (True,),
    "glu_linear_offset": (1.0,),
    "softmax_type": ("learnable",),
    "bias_gelu_fusion": (True, False),
}
"""What sets it apart; the first value is also what an absent argument means. `clamped` judges the fusion."""
READ = ("activation_func_clamp_value",)
"""The arguments that are settings."""
FUSION = "bias_gelu_fusion"
ALPHA = 1.702
"""That of Megatron's quick GELU."""
SLIDING, FULL = "sliding_attention", "full_attention"


def here(args: Mapping[str, Any]) -> bool:
    """Whether args are those of a GPT-OSS."""
    return args.get("softmax_type") == "learnable"


def found(args: Mapping[str, Any], layers: Any, base: ModelSpec | None, where: str) -> Mapping[str, Any]:
    """The config keys of `own`, as the config spells them where it means the same.

    Raises:
        SourceError: the clamp is missing.
        UnsupportedError: args say nothing of the windows of all layers.
    """
    limit = real(args.get("activation_func_clamp_value"), "activation_func_clamp_value", where)
    kinds = [SLIDING if one else FULL for one in windows_per_layer(args, layers, where)]
    own = {"layer_types": kinds, "swiglu_alpha": ALPHA, "swiglu_limit": limit}
    same = base and base.own.keys() == own.keys() and {**base.own, "layer_types": _kinds(base)} == own
    return base.own if base and same else own


def clamped(args: Mapping[str, Any], accept: Collection[str], where: str) -> list[str]:
    """Refuse a run whose experts clamped before they added their bias, which no Hugging Face model does.

    Those are runs of experts one by one with the fusion (0.15 to 0.19: transformer/mlp.py leaves the bias to
    fusions/fused_bias_geglu.py `weighted_bias_quick_geglu_impl`, which clamps first). Grouped experts have added it by
    then (transformer/moe/experts.py, `skip_bias_add=False`). Args that no parser made are those of a converter, and
    nobody has trained with them.

    Args:
        args: those of a checkpoint.
        accept: arguments that the user names, to be taken as if they were at a known value.
        where: what to call its file in an error.

    Returns:
        What the user should know, if it was accepted.

    Raises:
        UnsupportedError: the run clamped before the bias, and this was not accepted.
    """
    if version_of(args) is None or args.get("moe_grouped_gemm") or not args.get(FUSION, True):
        return []
    if FUSION in accept:
        return [f"{FUSION} = True is taken as False: the run clamped before it added the biases of its experts"]
    raise UnsupportedError(
        f"{where}: {FUSION} = True with moe_grouped_gemm = {short(args.get('moe_grouped_gemm'))} clamps before the "
        "biases of experts are added, and transformers clamps after it",
        f"--accept {FUSION} converts the weights as if it were False; the two differ only where a value is clamped",
    )


def _kinds(spec: ModelSpec) -> Any:
    """The kind of each layer's attention: sliding and full in turn where the config does not say."""
    return spec.own["layer_types"] or [FULL if layer % 2 else SLIDING for layer in range(spec.layers)]


def arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of a GPT-OSS.

    Raises:
        RefusedError: Megatron cannot compute it.
    """
    kinds, limit = _kinds(spec), spec.own["swiglu_limit"]
    known = isinstance(kinds, list) and len(kinds) == spec.layers and all(one in (SLIDING, FULL) for one in kinds)
    reasons = {
        f"the gain of its activation is {ALPHA}, this model's {short(spec.own['swiglu_alpha'])}": (
            spec.own["swiglu_alpha"] != ALPHA
        ),
        f"its clamp is a number, this model's {short(limit)}": type(limit) not in (int, float) or not limit > 0,
        f"of {spec.layers} layers each is {SLIDING} or {FULL}, this model's are {short(kinds)}": not known,
        f"layers are {SLIDING}, and no sliding_window is set": known and SLIDING in kinds and not spec.sliding_window,
    }
    for reason, holds in reasons.items():
        if holds:
            raise RefusedError(f"megatron-core cannot compute this {spec.family}: {reason}")
    return {name: allowed[0] for name, allowed in ONLY.items()} | {
        "window_attn_skip_freq": [int(one == SLIDING) for one in kinds],
        "activation_func_clamp_value": float(limit),
    }
