"""The codecs of norms, biases, and MLPs: with a gate, without one, and with the clamped one of GPT-OSS.

Facts: megatron-core 0.16.1, fusions/fused_bias_gelu.py (the approximation with tanh), activations.py `squared_relu`,
fusions/fused_layer_norm.py (`zero_centered_gamma`), transformer/transformer_config.py (the fusions that it refuses),
transformer/mlp.py (`glu`: the clamp and the offset), fusions/fused_bias_geglu.py `quick_gelu`;
megatron/training/arguments.py and checkpointing.py at d98e8a64 for the names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.fields import equal
from formats.megatron.args.versions import version_of
from formats.model.codec import Codec, Context, Maker, Spelled, scalar
from formats.model.spec import real

GELU = {"gelu_pytorch_tanh": True, "gelu_new": True, "gelu": False}
"""Activation: `bias_gelu_fusion`, whose kernel is the approximation with tanh, and adds a bias.

The first two are one function. `openai_gelu` is a third name of it, which training on megatron-core does not heed
(megatron/training/arguments.py `core_transformer_config_from_args`).
"""
SQUARED = "relu2"
"""The activation that is `squared_relu`."""
FUSION = "bias_gelu_fusion"
ALPHA = 1.702
"""The gain of Megatron's quick GELU."""
EVERYWHERE = ("mlp_bias", "output_bias", "qkv_bias")
"""The biases of `add_bias_linear`, which is every linear layer's; those of `add_qkv_bias` are the last."""


def choice(*spellings: tuple[Any, Any]) -> Maker:
    """A codec of an argument that may have some values: (argument, setting), the first where it is absent."""

    def of(key: str) -> Codec:
        def read(_: Any, context: Context) -> Any:
            spelled = context.file.get(key, spellings[0][0])
            for known, value in spellings:
                if equal(spelled, known):
                    return value
            only = f"{key} = {short(spelled)} is not supported, only {spellings[0][0]!r}"
            raise UnsupportedError(f"{context.where}: {only}")

        def write(value: Any, _: Context) -> Any:
            return next((spelled for spelled, known in spellings if known == value), spellings[0][0])

        return scalar(key, read, write)

    return of


def _require_agreement(given: Mapping[str, bool], opposite: Collection[str], context: Context) -> None:
    """Switches mean the same, those that are `opposite` by being off.

    Raises:
        UnsupportedError: they do not.
    """
    if len({value is not (key in opposite) for key, value in given.items()}) > 1:
        words = " and ".join(f"{key} = {value}" for key, value in given.items())
        raise UnsupportedError(f"{context.where}: {words} contradict each other")


def linear_biases(*allowed: bool) -> Maker:
    """The biases of linear layers: all of them if `add_bias_linear`, one of `allowed`, by default the first."""

    def of(every: str, none: str, qkv: str) -> Codec:
        def read(_: Spelled, context: Context) -> tuple[str, ...]:
            given = {every: context.file.get(every, allowed[0]), none: context.file.get(none, not allowed[0])}
            for key, value in given.items():
                if not any(equal(value, flag is (key == every)) for flag in allowed):
                    only = allowed[0] is (key == every)
                    raise UnsupportedError(f"{context.where}: {key} = {short(value)} is not supported, only {only}")
            _require_agreement({key: value for key, value in given.items() if key in context.file}, {none}, context)
            biased = given[every] if every in context.file or none not in context.file else not given[none]
            return EVERYWHERE if biased else EVERYWHERE[-1:] if context.file.get(qkv) else ()

        def write(biases: tuple[str, ...], context: Context) -> Spelled:
            if biases not in ((), EVERYWHERE[-1:], EVERYWHERE):
                raise RefusedError(
                    "megatron-core has biases on query, key and value alone (--add-qkv-bias) or on every linear layer, "
                    f"and this {context.values['family']} has {' and '.join(biases)} alone"
                )
            return {every: biases == EVERYWHERE, none: biases != EVERYWHERE}

        return Codec(read, write)

    return of


def activation(squared: str, fusion: str) -> Codec:
    """The activation of an MLP without a gate: of two that are the same, `gelu_new` came with learned positions."""

    def read(spelled: Spelled, context: Context) -> str:
        if choice((False, False), (True, True))(squared).read(spelled, context):
            return SQUARED
        fused = context.file.get(fusion, True) if context.values["linear_biases"] == EVERYWHERE else False
        names = [name for name, kernel in GELU.items() if kernel is fused]
        if not names:
            raise UnsupportedError(f"{context.where}: {fusion} = {short(fused)} is neither true nor false")
        return "gelu_new" if context.values["learned"] and "gelu_new" in names else names[0]

    def write(value: str, context: Context) -> Spelled:
        biased, fused = context.values["linear_biases"] == EVERYWHERE, GELU.get(value, False)
        if value not in (*GELU, SQUARED) or (fused and not biased):
            known = [*(name for name, kernel in GELU.items() if biased or not kernel), SQUARED]
            without = "" if biased else " without biases"
            raise RefusedError(f"Megatron has no activation {value}{without}, only {' and '.join(known)}")
        return {squared: value == SQUARED, fusion: fused}

    return Codec(read, write)


def centred(*keys: str) -> Codec:
    """Norms whose weights are stored less one. Older trees heed the one of its arguments, newer ones the other."""

    def read(spelled: Spelled, context: Context) -> bool:
        given = {key: choice((False, False), (True, True))(key).read(spelled, context) for key in keys}
        _require_agreement({key: value for key, value in given.items() if key in context.file}, (), context)
        return any(given.values())

    return Codec(read, lambda value, _: dict.fromkeys(keys, bool(value)))


# --- the clamped MLP of GPT-OSS --------------------------------------------------------------------------------------


def gain() -> Codec:
    """The gain of its activation, which no argument says."""

    def write(value: float, context: Context) -> Spelled:
        if value != ALPHA:
            _refuse(context, f"the gain of its activation is {ALPHA}, this model's {short(value)}")
        return {}

    return Codec(lambda *_: ALPHA, write)


def clamp(key: str) -> Codec:
    """Where gate and up are clamped."""

    def write(limit: Any, context: Context) -> float:
        if type(limit) not in (int, float) or not limit > 0:
            _refuse(context, f"its clamp is a number, this model's {short(limit)}")
        return float(limit)

    return scalar(key, lambda spelled, context: real(spelled, key, context.where), write)


def _refuse(context: Context, why: str) -> None:
    raise RefusedError(f"megatron-core cannot compute this {context.values['family']}: {why}")


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
