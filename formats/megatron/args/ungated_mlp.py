"""The arguments of models whose MLP has no gate: their activation, their norms and their biases.

Facts: megatron-core 0.16.1, fusions/fused_bias_gelu.py (the approximation with tanh), activations.py `squared_relu`,
fusions/fused_layer_norm.py (`zero_centered_gamma`), transformer/transformer_config.py (the fusions that it refuses);
megatron/training/arguments.py and checkpointing.py at d98e8a64 for the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.families import family_named
from formats.families.family import Facts
from formats.model.spec import ModelSpec

ONLY: Mapping[str, tuple[Any, ...]] = {
    "swiglu": (False,),
    "normalization": ("LayerNorm", "RMSNorm"),
    "add_bias_linear": (True, False),
    "disable_bias_linear": (False, True),
    "openai_gelu": (False,),
    "squared_relu": (False, True),
    "apply_layernorm_1p": (False, True),
    "layernorm_zero_centered_gamma": (False, True),
}
"""What they may say; the first value is also what an absent argument means."""
BIASED = {"add_bias_linear": True, "disable_bias_linear": False}
CENTRED = {"apply_layernorm_1p": True, "layernorm_zero_centered_gamma": True}
"""Arguments that mean the same, and the value that means yes. Older trees heed one of them, newer ones the other."""

GELU = {"gelu_pytorch_tanh": True, "gelu_new": True, "gelu": False}
"""Activation: `bias_gelu_fusion`, whose kernel is the approximation with tanh, and adds a bias.

The first two are one function. `openai_gelu` is a third name of it, which training on megatron-core does not heed
(megatron/training/arguments.py `core_transformer_config_from_args`).
"""
SQUARED = "relu2"
"""The activation that is `squared_relu`."""


def here(args: Mapping[str, Any]) -> bool:
    """Whether args are those of a model without a gate; GPT-OSS has another one."""
    return args.get("swiglu") is False and not args.get("quick_geglu")


def found(args: Mapping[str, Any], where: str) -> Facts:
    """What args say of norms and biases.

    Raises:
        UnsupportedError: two of them contradict each other.
    """
    layer_norm = args.get("normalization", "LayerNorm") == "LayerNorm"
    biased, centred = _told(args, BIASED, where) is not False, _told(args, CENTRED, where) is True
    return Facts(plain=True, layer_norm=layer_norm, biased=biased, centred=centred)


def biased(args: Mapping[str, Any], where: str) -> bool:
    """Whether args of a model with a gate say that every linear layer has a bias. Raises as `found` does."""
    return _told(args, BIASED, where) is True


def _told(args: Mapping[str, Any], names: Mapping[str, bool], where: str) -> bool | None:
    """What arguments that mean the same say; None where there is none of them."""
    said = {name: args[name] is meant for name, meant in names.items() if name in args}
    if len({*said.values()}) > 1:
        words = " and ".join(f"{name} = {args[name]}" for name in said)
        raise UnsupportedError(f"{where}: {words} contradict each other")
    return next(iter(said.values()), None)


def activation(args: Mapping[str, Any], biased: bool, usual: str | None, where: str) -> str:
    """The activation that args say: of those that are one function, `usual`.

    Raises:
        UnsupportedError: they say nothing of it.
    """
    if args.get("squared_relu"):
        return SQUARED
    fused = args.get("bias_gelu_fusion", True) if biased else False  # as `validate_args` does
    names = [name for name, kernel in GELU.items() if kernel is fused]
    if not names:
        raise UnsupportedError(f"{where}: bias_gelu_fusion = {short(fused)} is neither true nor false")
    return usual if usual in names else names[0]


def arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of a model without a gate.

    Raises:
        RefusedError: Megatron has no such activation.
    """
    facts, fused = family_named(spec.family).facts, GELU.get(spec.activation or "", False)
    if spec.activation not in (*GELU, SQUARED) or (fused and not facts.biased):
        without = "" if facts.biased else " without biases"
        known = [*(name for name, kernel in GELU.items() if facts.biased or not kernel), SQUARED]
        raise RefusedError(f"Megatron has no activation {spec.activation}{without}, only {' and '.join(known)}")
    return {name: allowed[0] for name, allowed in ONLY.items()} | {
        "normalization": "LayerNorm" if facts.layer_norm else "RMSNorm",
        "add_bias_linear": facts.biased,
        "disable_bias_linear": not facts.biased,
        "squared_relu": spec.activation == SQUARED,
        "bias_gelu_fusion": fused,
        "apply_layernorm_1p": facts.centred,
        "layernorm_zero_centered_gamma": facts.centred,
    }
