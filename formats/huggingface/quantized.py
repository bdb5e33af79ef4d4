"""Quantized weights of Hugging Face folders, read as BF16: MXFP4 of GPT-OSS, FP8 of DeepSeek and of Mistral.

Weights that llm-compressor quantized are read by `compressed_tensors.py`.

Facts: transformers 5.23.0, integrations/mxfp4.py (`experts.down_proj_blocks` is [expert, row, group, 16], two elements
of a row a byte, the lower half first; its `_scales` have one byte for 32 elements; the parameter is the transpose) and
integrations/finegrained_fp8.py (`X_scale_inv` has one factor for each block of `weight_block_size` elements of X, the
last ones of a row or column may be smaller, or one factor where that is null; `X.activation_scale` is for activations);
the values of an element and of a scale: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from formats.disk.safetensors import FLOATS, Fragment, Scales
from formats.errors import SourceError, UnsupportedError, short
from formats.huggingface import compressed_tensors
from formats.huggingface.scales import KEEP, require_floats, require_grid, scales_of

GROUP = 32
"""Elements of MXFP4 that share a scale."""
INVERSE = "_scale_inv"
"""The end of the key of FP8 scales, after the key of the weight."""
ACTIVATIONS = ".activation_scale"
SCHEMES = ("dynamic", "static")
BLOCK = "weight_block_size"
OF_FP8: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "fmt": ("e4m3, or without it", lambda value: value in ("e4m3", "absent")),
    "activation_scheme": ("dynamic or static", lambda value: value in (*SCHEMES, "absent")),
    BLOCK: ("two whole numbers from 1 on, or null", lambda value: value is None or _is_block(value)),
}
"""Key of a `quantization_config` of FP8: what it may be, in words, and whether a value is that; `absent` without it."""
OF_FILES = ("fp8", "mxfp4", compressed_tensors.METHOD, "gptq", "awq", "modelopt")
"""Values of `quant_method` that only describe how files store weights: a model with floating point weights has none of
them. Other methods may describe what the model computes (bitnet)."""


KEYS = ("quantization_config", "compression_config")
"""The keys of a config for its quantization."""
TEXT = "text_config"


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantization method that a config names; None if it names none, or one that is not read here."""
    try:
        return require_method(config, "")
    except UnsupportedError:
        return None


def require_method(config: Mapping[str, Any], where: str) -> str | None:
    """The quantization method that a config names; None if it names none.

    Raises:
        UnsupportedError: the method is not read here; the message begins with `where`.
    """
    match config.get("quantization_config"):
        case None:
            return None
        case {"quant_method": "mxfp4"}:
            return "MXFP4"
        case {"quant_method": "fp8", **fields}:
            for key, (known, is_known) in OF_FP8.items():
                value = fields.get(key, "absent")
                if not is_known(value):
                    raise UnsupportedError(
                        f"{where}: models with a quantization_config are not supported whose {key} is {short(value)}, "
                        f"only {known}",
                        KEEP,
                    )
            return "FP8"
        case {"quant_method": compressed_tensors.METHOD, **quantization}:
            try:
                return compressed_tensors.scheme_of(quantization).stored.method
            except UnsupportedError as error:
                raise UnsupportedError(f"{where}: {error}", error.hint) from None
    known = f"only MXFP4, FP8 with {INVERSE} and {compressed_tensors.METHOD}"
    raise UnsupportedError(f"{where}: models with a quantization_config are not supported, {known}", KEEP)


def _is_block(value: Any) -> bool:
    """Whether a value is the size of a block, two positive integers."""
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def without_quantization(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config without the keys for a quantization of files, also in its `text_config`, and the names of these keys.

    `compression_config` is what the first versions of compressed-tensors wrote, which vLLM and SGLang still read.
    """
    methods = {key: config[key].get("quant_method") for key in KEYS if isinstance(config.get(key), Mapping)}
    removed = [key for key, method in methods.items() if method in OF_FILES or key != KEYS[0]]
    rest = {key: value for key, value in config.items() if key not in removed}
    if isinstance(config.get(TEXT), Mapping):
        rest[TEXT], inner = without_quantization(config[TEXT])
        removed += [f"{TEXT}.{key}" for key in inner]
    return rest, removed


def dequantized(fragments: Mapping[str, Fragment], config: Mapping[str, Any]) -> tuple[dict[str, Fragment], str]:
    """The tensors of a model, with one BF16 tensor for each pair of quantized elements and scales.

    Args:
        fragments: the tensors of the files, by key.
        config: the config.json beside the files.

    Returns:
        The tensors, and a note on their quantization, empty if they are not quantized.

    Raises:
        SourceError: scales are missing, their shape does not fit their elements, or the config does not explain them.
        UnsupportedError: the blocks are of another kind, or the config names a quantization that is not read here.
    """
    config = _quantized_config(config)
    method, exact = method_of(config), "times their scales, rounded once"
    quantization = config.get("quantization_config") or {}
    match method and quantization["quant_method"]:
        case "mxfp4":
            weights, exact = _mxfp4(fragments), "which holds them exactly"
        case "fp8":
            weights = _fp8(fragments, quantization[BLOCK])
        case compressed_tensors.METHOD:
            weights = compressed_tensors.dequantized(fragments, compressed_tensors.scheme_of(quantization))
        case _:
            _require_no_scales(fragments, config)
            return dict(fragments), ""
    types = [fragment.dtype for fragment in weights.values() if fragment.scales is not None]
    unread = sum(
        key.endswith((ACTIVATIONS, *compressed_tensors.ACTIVATIONS)) for key in fragments.keys() - weights.keys()
    )
    without = f", without {unread} scales of activations" if unread else ""
    read = f"{len(types)} tensors of {method} are read as {' and '.join(sorted({*types}))}"
    note = f"{read}, {exact}{without}; --verbatim carries them as they are"
    return weights, note if types else f"config.json says that weights are {method}, and none of the files' is"


def _quantized_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, or its text_config if only that is quantized (transformers 5.23.0, `get_hf_quantizer`)."""
    text = config.get(TEXT)
    if config.get("quantization_config") is None and isinstance(text, Mapping) and "quantization_config" in text:
        return text
    return config


def _require_no_scales(fragments: Mapping[str, Fragment], config: Mapping[str, Any]) -> None:
    """Refuse tensors with scales where the config names no quantization that is read here.

    Raises:
        SourceError: a tensor has scales.
        UnsupportedError: a tensor has scales, or no floating point type, and the config names another quantization.
    """
    odd = next((fragment for fragment in fragments.values() if fragment.dtype not in FLOATS), None)
    if odd is not None:
        require_method(config, f"{odd.path.parent / 'config.json'}")
    pairs = ((INVERSE, ""), ("_scales", "_blocks"), (".weight_scale", ".weight"), (".weight_scale", ".weight_packed"))
    for suffix, elements in pairs:
        for key in fragments:
            if key.endswith(suffix) and key.removesuffix(suffix) + elements in fragments:
                require_method(config, f"{fragments[key].path.parent / 'config.json'}")
                reason = f"{fragments[key].path} holds {key}, and config.json beside it no quantization_config"
                raise SourceError(reason, "take config.json from where the files come from")


def _mxfp4(fragments: Mapping[str, Fragment]) -> dict[str, Fragment]:
    weights = {}
    for key, blocks in fragments.items():
        name, suffix = key[:-7], key[-7:]
        if suffix == "_scales" and f"{name}_blocks" in fragments:
            continue
        if suffix != "_blocks":
            weights[key] = blocks
            continue
        if name in fragments:
            raise SourceError(f"{blocks.path} holds {key}, and {name} is there too")
        scales = scales_of(fragments, f"{name}_scales", blocks, key)
        if blocks.dtype != "U8" or blocks.shape[3:] != (GROUP // 2,):
            raise SourceError(f"{blocks.path}: {key} is {blocks.dtype}{list(blocks.shape)}, not MXFP4")
        require_grid(scales, f"{name}_scales", "U8", blocks.shape[:3])
        experts, rows, groups = blocks.shape[:3]
        wide = groups * GROUP
        factors = Scales("MXFP4", scales, (1, GROUP), 1, experts * rows * wide, f"{name}_scales")
        weights[name] = Fragment(
            blocks.path, blocks.offset, "BF16", (experts, wide, rows), (rows * wide, 1, wide),
            scales=factors, member=blocks.member,
        )  # fmt: skip
    return weights


def _fp8(fragments: Mapping[str, Fragment], block: Sequence[int] | None) -> dict[str, Fragment]:
    weights = {}
    for key, fragment in fragments.items():
        name = key.removesuffix(INVERSE)
        if key.endswith(ACTIVATIONS) and f"{key.removesuffix(ACTIVATIONS)}.weight{INVERSE}" in fragments:
            continue
        if key.endswith(INVERSE) and name in fragments:
            if fragments[name].dtype != "F8_E4M3":
                raise UnsupportedError(f"{fragment.path} holds {key} for {fragments[name].dtype}, not F8_E4M3", KEEP)
            continue
        if fragment.dtype != "F8_E4M3":
            weights[key] = fragment
            continue
        if len(fragment.shape) < 2:
            raise UnsupportedError(f"{fragment.path}: {key} is FP8{list(fragment.shape)}, which has no blocks", KEEP)
        scales = scales_of(fragments, f"{key}{INVERSE}", fragment, key)
        *stack, rows, columns = fragment.shape
        high, wide = block or (max(rows, 1), max(columns, 1))
        single = not block and prod(scales.shape) == prod(stack)
        grid = scales.shape if single else (*stack, -(-rows // high), -(-columns // wide))
        require_floats(scales, f"{key}{INVERSE}")
        require_grid(scales, f"{key}{INVERSE}", scales.dtype, grid)
        least = (min(high, max(rows, 1)), min(wide, max(columns, 1)))
        weights[key] = fragment._replace(
            dtype="BF16", scales=Scales("FP8", scales, least, rows, columns, f"{key}{INVERSE}")
        )
    return weights
