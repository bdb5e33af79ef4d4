"""Codecs of the arguments for biases, for activations, and for the clamped MLP of GPT-OSS.

Facts: megatron-core 0.16.1, fusions/fused_bias_gelu.py (the approximation with tanh), activations.py `squared_relu`,
transformer/transformer_config.py (the fusions that it refuses), transformer/mlp.py (`glu`: the clamp and the offset),
fusions/fused_bias_geglu.py `quick_gelu`; megatron/training/arguments.py at d98e8a64 for the names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.layout.table import BIASES
from formats.megatron.args.codecs import refusal
from formats.model.accepted import FUSION
from formats.model.codec import Codec, Context, Spelled, choice, fixed, single
from formats.model.values import positive_float

GELU = {"gelu_pytorch_tanh": True, "gelu_new": True, "gelu": False}
"""`bias_gelu_fusion` by activation; the fused kernel is the approximation with tanh, and adds a bias.

The first two activations are the same function. `openai_gelu` is a third name of it, which training on megatron-core
ignores (megatron/training/arguments.py `core_transformer_config_from_args`).
"""
SQUARED = "relu2"
"""transformers' name of the activation `squared_relu`."""
ALPHA = 1.702
"""The gain of Megatron's quick GELU."""


def _write_qkv_bias(value: bool, context: Context) -> bool:
    every, biases = context.values["every_bias"], [name for name in sorted(BIASES) if context.values[name]]
    if not every and biases not in ([], ["qkv_bias"]):
        raise RefusedError(
            "megatron-core has biases on query, key and value alone (--add-qkv-bias) or on every linear layer, "
            f"and this {context.values['family']} has {' and '.join(biases)} alone"
        )
    return value and (context.values["sinks"] or not every)


qkv_bias = single(lambda spelled, context: bool(spelled) or context.values["every_bias"], _write_qkv_bias)


def activation(squared: str, fusion: str) -> Codec:
    """A codec of the activation of an MLP without a gate; of two names for one it is `gelu_new` with learned positions.

    Args:
        squared: the argument for squared ReLU.
        fusion: the argument for the fused GELU kernel.
    """

    def read(spelled: Spelled, context: Context) -> str:
        if choice((False, False), (True, True))(squared).read(spelled, context):
            return SQUARED
        fused = context.file.get(fusion, True) if context.values["every_bias"] else False  # as `validate_args` does
        names = [name for name, kernel in GELU.items() if kernel is fused]
        if not names:
            raise UnsupportedError(f"{context.where}: {fusion} = {short(fused)} is neither true nor false")
        return "gelu_new" if context.values["learned"] and fused else names[0]

    def write(value: str, context: Context) -> Spelled:
        biased, fused = context.values["every_bias"], GELU.get(value, False)
        if value not in (*GELU, SQUARED) or (fused and not biased):
            known = [*(name for name, kernel in GELU.items() if biased or not kernel), SQUARED]
            without = "" if biased else " without biases"
            raise RefusedError(f"Megatron has no activation {value}{without}, only {' and '.join(known)}")
        return {squared: value == SQUARED, fusion: fused}

    return Codec(read, write)


serial = fixed(
    False,
    None,
    error=lambda _, context: refusal(
        context, "its attention and MLP read the same residual, those of Megatron follow one another"
    ),
)
gain = fixed(
    ALPHA,
    error=lambda value, context: refusal(
        context, f"the gain of its activation is {ALPHA}, this model's {short(value)}"
    ),
)


def _write_clamp(limit: Any, context: Context) -> float:
    if type(limit) not in (int, float) or not limit > 0:
        raise refusal(context, f"its clamp is a number, this model's {short(limit)}")
    return float(limit)


clamp = single(
    lambda spelled, context: positive_float(spelled, "activation_func_clamp_value", context.where), _write_clamp
)


def clamped(args: Mapping[str, Any], accept: Collection[str], where: str) -> list[str]:
    """Refuse a run whose experts clamped before they added their bias, which no Hugging Face model does.

    Such runs have experts that are not grouped, and the fusion (0.15 to 0.19: transformer/mlp.py leaves the bias to
    fusions/fused_bias_geglu.py `weighted_bias_quick_geglu_impl`, which clamps first). Grouped experts add the bias
    earlier (transformer/moe/experts.py, `skip_bias_add=False`).

    Args:
        args: the args of a training.
        accept: arguments that the user names, to be treated as if they had a known value.
        where: what to call the file of the args in an error.

    Returns:
        Notes for the user, if such a run was accepted.

    Raises:
        UnsupportedError: the run clamped before the bias, and this was not accepted.
    """
    if args.get("moe_grouped_gemm") or not args.get(FUSION, True):
        return []
    if FUSION in accept:
        return [f"{FUSION} = True is taken as False: the run clamped before it added the biases of its experts"]
    raise UnsupportedError(
        f"{where}: {FUSION} = True with moe_grouped_gemm = {short(args.get('moe_grouped_gemm'))} clamps before the "
        "biases of experts are added, and transformers clamps after it",
        f"--accept {FUSION} converts the weights as if it were False; the two differ only where a value is clamped",
    )
