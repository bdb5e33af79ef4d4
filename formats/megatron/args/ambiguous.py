"""Decide which model a run of Megatron-LM computed if its args ask for something that its version ignored.

Args record the settings that a run was given, not the settings that it computed with; and a modified source tree, which
may heed more of them, leaves the same args. Where the two readings differ, the user has to choose. Args that no parser
made were written by a converter, and nobody trained with them: every save of Megatron writes what its own parser made.
Megatron-Bridge and NeMo save no args, but the fields of a class (`run_config.py`), which train likewise; what a release
of Megatron-LM fails to pass to megatron-core, they pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.layers import own_attention
from formats.megatron.args.rope import NO_SCALE
from formats.megatron.args.versions import FAILS, by_name, effective_args, ignored, version_of
from formats.megatron.pipeline import PATTERN
from formats.model.settings import rope_way
from formats.model.spec import ModelSpec

FUSED_TOKENS = 4096
"""Most keys of which Megatron's fused softmax computes the probabilities."""
INVARIANT = "batch_invariant_mode"
"""The option that replaces the RMSNorm of Transformer Engine."""
FUSED_ROPE = "fused_single_qkv_rope"
"""The option by which one kernel of Transformer Engine rotates queries and keys."""
TE_GELU = ("use_te_activation_func", "use_transformer_engine_op_fuser")
"""Options by which Transformer Engine computes the activation."""
Args = Mapping[str, Any]
Scaling = Mapping[str, Any] | None


def with_both_names(args: Args, settings: Mapping[str, Any], where: str) -> Args:
    """The args; arguments that have two names have under both the value that the version of the checkpoint reads.

    Raises:
        RefusedError: the values of the two names of the epsilon differ, and the version is not known.
    """
    version = version_of(args)
    if version:
        return by_name(args, version)
    epsilons = [args[name] for name in ("norm_epsilon", "layernorm_epsilon") if args.get(name) is not None]
    if len({*map(str, epsilons)}) > 1 and "norm_epsilon" not in settings:
        raise RefusedError(
            f"{where}: norm_epsilon = {short(epsilons[0])} counts up to Megatron-LM 0.15, layernorm_epsilon = "
            f"{short(epsilons[1])} since 0.16, and nothing in its args tells the version",
            f"--set norm_epsilon={epsilons[0]} or --set norm_epsilon={epsilons[1]}",
        )
    return args


def with_one_pattern(args: Args, where: str) -> Args:
    """Return the args with a pattern of layers that says nothing of pipeline stages, which `pipeline_of` reads.

    0.17 to 0.19 copy the pattern of the older name to the newer one. In 0.19 a `|` begins a stage or a chunk
    (models/hybrid/hybrid_layer_allocation.py).

    Raises:
        RefusedError: both names of the pattern are there with different patterns.
    """
    patterns = {name: args[name] for name in PATTERN.split("|") if args.get(name) is not None}
    if len({*map(str, patterns.values())}) > 1:
        said = " and ".join(f"{name} = {short(pattern)}" for name, pattern in patterns.items())
        raise RefusedError(f"{where}: {said} contradict each other")
    whole = {name: pattern.replace("|", "") for name, pattern in patterns.items() if isinstance(pattern, str)}
    return {**args, **whole}


def rope_scaling(args: Args, read: Callable[[Args], Scaling], base: ModelSpec | None, where: str) -> Scaling:
    """The rope scaling that a run was trained with.

    Args:
        args: the args of the checkpoint.
        read: returns the rope scaling that args specify.
        base: the spec of the config that travels with the checkpoint.
        where: what to call the file in an error.

    Raises:
        RefusedError: the version computed another rope scaling than its args specify, or one that args cannot specify.
    """
    version = version_of(args)
    if version is None:
        return read(args)
    rows = ignored(args, version)
    changed = any(row.computed is FAILS for row in rows)  # a stock tree would have failed
    if changed and args.get("yarn_original_max_position_embeddings") is not None:
        return read(args)
    written, ways = _reading(args, read), []
    if changed:
        ways += [rope_way(base.rope_scaling, "as in the config")] if base and base.rope_scaling else []
    else:
        computed = _reading(effective_args(args, version), read)
        if computed == written:
            return read(args)
        ways += [rope_way(computed[0], f"stock Megatron-LM {version}")] if computed else []
    ways += [rope_way(written[0], "a tree that was changed to heed them")] if written else []
    asked = ", ".join(f"{row.dest} = {short(args.get(row.dest))}" for row in rows)
    raise RefusedError(
        f"{where}: Megatron-LM {version} made these args, whose stock tree does not compute {asked}", " or ".join(ways)
    )


def require_window(args: Args, window: int | None, where: str) -> None:
    """Refuse a window that the fused softmax of megatron-core's own attention did not heed.

    `FusedScaleMaskSoftmax.is_kernel_available` (megatron-core 0.19.2, fusions/fused_softmax.py) minds no window: in
    half precision, up to 4,096 tokens, a query sees all tokens before it.

    Args:
        args: the args of the checkpoint.
        window: the window that they specify, in tokens; None without one.
        where: what to call the file in an error.

    Raises:
        RefusedError: they specify a window, and the softmax is fused.
    """
    length, given = args.get("seq_length"), short(args.get("window_size"))
    half = bool(args.get("bf16") or args.get("fp16"))
    fused, own = half and args.get("masked_softmax_fusion") is True, own_attention(args)
    if not fused or not own or window is None or type(length) is not int:
        return
    if max(16, window) < length <= FUSED_TOKENS:
        raise RefusedError(
            f"{where}: window_size = {given} with seq_length = {length}, and the fused softmax (masked_softmax_fusion) "
            f"of {own} keeps to no window up to {FUSED_TOKENS} tokens",
            f"--set sliding_window=none (the stock tree) or --set sliding_window={window} (a tree that heeds it)",
        )


def require_gelu(args: Args, activation: str | None, where: str) -> None:
    """Refuse an exact GELU where Transformer Engine computed the activation: it has the approximation with tanh alone.

    Facts: megatron-core 0.19.2, extensions/transformer_engine.py; Transformer Engine 2.9, common/util/math.h `gelu`.

    Args:
        args: the args of the checkpoint.
        activation: the activation that they specify.
        where: what to call the file in an error.

    Raises:
        RefusedError: they specify the exact GELU, and an option by which Transformer Engine computes it.
    """
    fused = [name for name in TE_GELU if args.get(name) is True]
    if fused and activation == "gelu" and args.get("transformer_impl") == "transformer_engine":
        raise RefusedError(
            f"{where}: {fused[0]} = True with bias_gelu_fusion = False: GELU is the exact one in these args, and the "
            "approximation with tanh in Transformer Engine, which computed it",
            "--set activation=gelu_pytorch_tanh (gelu_new for GPT-2) or --set activation=gelu",
        )


def require_centred(args: Args, values: Mapping[str, Any], accept: Collection[str], where: str) -> list[str]:
    """Refuse weights of RMSNorm around zero where a run left 1 out, in all norms that are no part of a linear layer.

    `BatchInvariantRMSNormFn.forward` (megatron-core 0.19.2, transformer/custom_layers/batch_invariant_kernels.py)
    multiplies by the weight as it is stored; the norms in TELayerNormColumnParallelLinear add 1. Megatron-LM alone puts
    it in the place of Transformer Engine's (training/initialize.py): to Megatron-Bridge and NeMo the option means less.

    Args:
        args: the args of the checkpoint.
        values: the settings that they specify.
        accept: arguments that the user names, to be treated as if they had a known value.
        where: what to call the file in an error.

    Returns:
        Notes for the user, if such a run was accepted.

    Raises:
        UnsupportedError: the run had such norms, and this was not accepted.
    """
    centred = values.get("centred") and not values["layer_norm"]
    if not centred or args.get(INVARIANT) is not True or version_of(args) is None:
        return []
    if INVARIANT in accept:
        return [f"{INVARIANT} = True is taken as False: stock Megatron adds no 1 to the weights of some norms then"]
    raise UnsupportedError(
        f"{where}: {INVARIANT} = True with apply_layernorm_1p = True: stock Megatron adds 1 to the weights of the "
        "norms in linear layers and of no others then, which no model of transformers does",
        f"--accept {INVARIANT} for a tree that adds it to all",
    )


def require_scale(args: Args, scaling: Scaling, where: str) -> None:
    """Refuse YaRN of which a kernel left out the scale of queries and keys, transformers' `attention_factor`.

    `SelfAttention.forward` (megatron-core 0.16 to 0.19, transformer/attention.py) passes the scale to
    `apply_rotary_pos_emb`, and not to `apply_fused_qkv_rotary_pos_emb`. Latents never get there.

    Args:
        args: the args of the checkpoint.
        scaling: the rope scaling that they specify.
        where: what to call the file in an error.

    Raises:
        RefusedError: they specify such a YaRN, and the option by which this kernel computes it.
    """
    known = scaling or {}
    scale = [known.get(name) for name in NO_SCALE]
    if args.get(FUSED_ROPE) is not True or known.get("rope_type") != "yarn" or args.get("multi_latent_attention"):
        return
    if None in scale or scale[0] != scale[1]:
        unscaled = {name: value for name, value in known.items() if name not in NO_SCALE} | {"attention_factor": 1.0}
        raise RefusedError(
            f"{where}: {FUSED_ROPE} = True with YaRN: this kernel leaves out its scale of queries and keys",
            f"{rope_way(unscaled, 'the stock tree')} or {rope_way(scaling, 'a tree that scales them')}",
        )


def _reading(args: Args, read: Callable[[Args], Scaling]) -> tuple[Scaling] | None:
    """The rope scaling that args specify, in a tuple; None if transformers has no name for it."""
    try:
        return (read(args),)
    except UnsupportedError:
        return None
