"""Codecs of the arguments for Megatron's scaled rotary embeddings: llama3, linear and YaRN.

Facts: megatron-core 0.16.1, models/common/embeddings/rotary_pos_embedding.py and yarn_rotary_pos_embedding.py;
megatron/training/argument_utils.py `_apply_yarn_config_from_args` at d98e8a64, where YaRN has arguments (at 0.16.1 only
programs around it set its configuration). transformers 5.23.0, modeling_rope_utils.py `_compute_yarn_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.model.codec import Codec, Context, Spelled
from formats.model.values import positive_float

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of llama3 rope scaling that are fixed in megatron-core."""

YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Megatron's argument by parameter of transformers' YaRN."""
YARN_FIELDS = {name: f"yarn_{key.removeprefix('yarn_')}" for name, key in YARN.items()}
"""The field of Megatron-Bridge's classes by parameter of transformers' YaRN: megatron-core's GPTModel reads these."""
LATENT = {name: key.removeprefix("yarn_") for name, key in YARN.items() if name != "truncate"}
"""`YARN` for multi-latent attention, which always truncates (transformer/multi_latent_attention.py)."""
OR_NONE = ("beta_fast", "beta_slow")
"""Parameters of which transformers treats 0 as absent."""
DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""The defaults of YaRN parameters in both Megatron and transformers."""
NO_SCALE = {"mscale": 1.0, "mscale_all_dim": 0.0}
"""With these Megatron scales by 0.1 ln(factor) + 1; transformers does so if either parameter is missing or 0."""

ASSUMED = {"original_max_position_embeddings": 4096, **DEFAULTS, **NO_SCALE}
"""The defaults of YaRN parameters in Megatron."""

INERT = {"linear": ("original_max_position_embeddings", "finetuned"), "llama3": ("finetuned",)}
"""Parameters that transformers 5.23.0 accepts and does not read, by kind of scaling."""

NONE = {"use_rope_scaling": False, "rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None}
"""The arguments of a model without rope scaling."""
DIRECT_KEYS = " ".join((*NONE, "position_embedding_type", *YARN.values()))
LATENT_KEYS = " ".join(("rope_type", *LATENT.values()))


def plain(scaling: Mapping[str, Any], positions: int | None) -> dict[str, Any]:
    """A rope scaling without parameters that have no effect, and with Megatron's numbers if they compute the same.

    llama3 uses only the ratios of its three lengths: the same multiple of Megatron's three computes the same. Without
    an original length, transformers takes the number of positions (`standardize_rope_params`).
    """
    kind = str(scaling.get("rope_type"))
    params = {name: value for name, value in scaling.items() if value is not None and name not in INERT.get(kind, ())}
    if kind == "llama3" and positions is not None:
        params.setdefault("original_max_position_embeddings", positions)
    if kind == "llama3" and params.keys() == {"rope_type", "factor", *LLAMA3_SCALING}:
        numbers = [params[name] for name in ("factor", *LLAMA3_SCALING)]
        if all(type(number) in (int, float) and number > 0 for number in numbers):
            times = params["low_freq_factor"] / LLAMA3_SCALING["low_freq_factor"]
            if all(math.isclose(params[name], value * times) for name, value in LLAMA3_SCALING.items()):
                params |= LLAMA3_SCALING
    return params


def _meant(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of YaRN, without those that have no effect: `finetuned`, and the attention_factor of its paper."""
    params = {name: value for name, value in scaling.items() if value is not None and name != "finetuned"}
    match params:
        case {"factor": int() | float() as factor, "attention_factor": float() as scale}:
            usual = factor > 1 and not all(params.get(name) for name in NO_SCALE)
            if usual and math.isclose(scale, 0.1 * math.log(factor) + 1):
                del params["attention_factor"]
    return params


def yarn(scaling: Mapping[str, Any], names: Mapping[str, str], positions: int | None) -> dict[str, Any] | None:
    """The arguments of a rope scaling; None if it is not YaRN with parameters that Megatron has.

    Args:
        scaling: the rope scaling of a config.
        names: the argument by parameter, `YARN` or `LATENT`.
        positions: the original length if the scaling has none (transformers 5.23.0, `standardize_rope_params`).
    """
    params = {"original_max_position_embeddings": positions, **_meant(scaling)}
    params = {name: value for name, value in params.items() if value or name not in OR_NONE}
    if params.pop("rope_type") != "yarn" or not params.keys() <= YARN.keys():
        return None
    scale = all(params.get(name) for name in NO_SCALE)
    params = {**DEFAULTS, **params, **({} if scale else NO_SCALE)}
    numbers = [params.get(name) for name in YARN if name != "truncate"]
    known = all(type(number) in (int, float) for number in numbers) and params["factor"] > 1
    known = known and type(params["original_max_position_embeddings"]) is int and type(params["truncate"]) is bool
    written = "truncate" in names or params["truncate"]
    return {key: params[name] for name, key in names.items()} if known and written else None


def read_yarn(args: Mapping[str, Any], names: Mapping[str, str], where: str) -> Mapping[str, Any]:
    """The parameters of YaRN in args; Megatron's defaults for None are in `_apply_yarn_config_from_args`.

    Raises:
        UnsupportedError: transformers has no such YaRN.
    """
    params: dict[str, Any] = {name: args.get(key) for name, key in names.items()}
    absent = [name for name in NO_SCALE if params[name] is None]
    params |= {name: value for name, value in ASSUMED.items() if params.get(name) is None}
    for name in ("factor", "beta_fast", "beta_slow"):
        params[name] = positive_float(params[name], names[name], where)
    scale = {name: params.pop(name) for name in NO_SCALE}
    if absent and scale != NO_SCALE:  # with one of them None Megatron scales by 0.1 ln(factor) + 1
        raise UnsupportedError(f"{where}: YaRN without {absent[0]} and with {_said(scale)} is not supported")
    params |= {} if scale == NO_SCALE else scale
    scaling = {"rope_type": "yarn", **params}
    if yarn(scaling, names, None) is None or not (scale == NO_SCALE or all(scale.values())):
        given = {**params, **scale}
        raise UnsupportedError(f"{where}: YaRN with {_said(given)} has no counterpart in transformers")
    return scaling


def _said(params: Mapping[str, Any]) -> str:
    """The parameters of a rope scaling in a message."""
    return ", ".join(f"{name} = {short(value)}" for name, value in params.items())


def direct(*_: str) -> Codec:
    """A codec of the rope scaling of attention without latents."""

    def read(_: Spelled, context: Context) -> Mapping[str, Any] | None:
        args, where = context.file, context.where
        kind, linear = args.get("position_embedding_type"), args.get("rotary_seq_len_interpolation_factor")
        fraction, llama3 = args.get("rotary_percent"), args.get("use_rope_scaling")
        if kind == "yarn" and fraction not in (None, 1.0):  # YaRN's class ignores it
            raise UnsupportedError(f"{where}: YaRN with rotary_percent = {short(fraction)} is not supported")
        if kind == "yarn":
            return read_yarn(args, YARN, where)
        if llama3 and linear is not None:  # since 0.19 both scale
            raise UnsupportedError(
                f"{where}: use_rope_scaling with rotary_seq_len_interpolation_factor is not supported"
            )
        if llama3:
            factor = positive_float(args.get("rope_scaling_factor", 8.0), "rope_scaling_factor", where)
            return {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}
        if linear is not None:
            return {
                "rope_type": "linear",
                "factor": positive_float(linear, "rotary_seq_len_interpolation_factor", where),
            }
        return None

    def write(value: Mapping[str, Any] | None, context: Context) -> Spelled:
        positions = context.values["max_positions"]
        scaling = plain(value or {}, positions)
        factor, yarn_args = scaling.get("factor"), yarn(scaling, YARN, positions) if scaling else None
        whole_heads = context.values["rotary_fraction"] in (None, 1.0)  # YaRN's class rotates all of a head
        number = type(factor) in (int, float)
        match scaling.pop("rope_type", None):
            case None:
                return NONE
            case "llama3" if number and scaling == {"factor": factor, **LLAMA3_SCALING}:
                return NONE | {"use_rope_scaling": True, "rope_scaling_factor": float(factor or 0)}
            case "linear" if number and scaling.keys() == {"factor"} and factor == int(factor or 0):
                return NONE | {"rotary_seq_len_interpolation_factor": int(factor or 0)}
            case "yarn" if yarn_args and whole_heads:
                return NONE | {"position_embedding_type": "yarn", **yarn_args}
            case "dynamic" if scaling.keys() <= {"factor"}:
                raise RefusedError(
                    "Megatron has no rope scaling dynamic",
                    f"--set rope_scaling=none computes the same up to {positions} tokens",
                )
            case kind:
                foreign = _meant(scaling).keys() - YARN.keys() if kind == "yarn" else ()
                raise RefusedError(
                    f"Megatron has no rope scaling {kind} with these settings: {', '.join(sorted(foreign) or scaling)}",
                    f"it knows llama3 with {LLAMA3_SCALING} or multiples of these three, linear with a whole factor, "
                    "and yarn of whole heads with a factor above 1 and no attention_factor but YaRN's own",
                )

    return Codec(read, write)


def latent(*_: str) -> Codec:
    """A codec of the rope scaling of multi-latent attention: YaRN, plain rope at factor 1 (MLATransformerConfig)."""

    def read(_: Spelled, context: Context) -> Mapping[str, Any] | None:
        args, where = context.file, context.where
        kind, scale = args.get("rope_type") or "yarn", args.get("mscale_all_dim")
        if kind == "yarn":
            return None if args.get("rotary_scaling_factor") == 1 else read_yarn(args, LATENT, where)
        if kind != "rope" or scale:  # scores are scaled by it even then
            raise UnsupportedError(
                f"{where}: rope_type = {short(kind)} with mscale_all_dim = {short(scale)} is not supported"
            )
        return None

    def write(value: Mapping[str, Any] | None, context: Context) -> Spelled:
        if not value:
            return {"rope_type": "rope", "rotary_scaling_factor": 1.0, **NO_SCALE}
        yarn_args = yarn(value, LATENT, context.values["max_positions"])
        if yarn_args is None or (value.get("mscale_all_dim") and not value.get("mscale")):
            raise RefusedError(
                f"megatron-core has no rope scaling with latents like this: {_said(value)}",
                "it knows YaRN with a factor above 1, original_max_position_embeddings, mscale and mscale_all_dim both "
                "or neither, and no truncate, or attention_factor but YaRN's own",
            )
        return {"rope_type": "yarn", **yarn_args}

    return Codec(read, write)


def write_base(theta: Any, _: Context) -> Any:
    """The rotary base, as an int if it is whole; 10000 if positions are learned, where Megatron ignores it."""
    return 10000 if theta is None else int(theta) if theta == int(theta) else theta
