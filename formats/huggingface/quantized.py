"""Quantized weights of Hugging Face folders, read as what they stand for: MXFP4 of GPT-OSS, FP8 of DeepSeek, Mistral.

Facts: transformers 5.23.0, integrations/mxfp4.py (`experts.down_proj_blocks` is [expert, row, group, 16], two elements
of a row a byte, the lower half first; its `_scales` have one byte for 32 elements; the parameter is the transpose) and
integrations/finegrained_fp8.py (`X_scale_inv` has one factor for each block of `weight_block_size` elements of X, the
last ones of a row or column may be smaller, or one factor where that is null; `X.activation_scale` is of no weight);
the values of an element and of a scale: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from formats.disk.safetensors import FLOATS, Fragment, Scales
from formats.errors import SourceError, UnsupportedError

GROUP = 32
"""Elements of MXFP4 that share a scale."""
INVERSE, FACTORS = "_scale_inv", ("F32", "BF16")
"""What follows the name of the scales of FP8, and their element types."""
ACTIVATIONS = ".activation_scale"
SCHEMES = ("dynamic", "static")
OF_FILES = ("fp8", "mxfp4")
"""Methods of files alone: a model in floats has none of it. Others may be of what it computes (bitnet)."""
KEEP = "--verbatim carries every tensor as it is, in Hugging Face"


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantization that a config names, if it is one that is known here."""
    match config.get("quantization_config"):
        case {"quant_method": "mxfp4"}:
            return "MXFP4"
        case {"quant_method": "fp8", "weight_block_size": None | [int(), int()] as block, **more}:
            known = min(block or [1]) > 0 and more.get("activation_scheme", "dynamic") in SCHEMES
            return "FP8" if known else None
    return None


def stale(config: Mapping[str, Any], dtypes: Iterable[str]) -> bool:
    """Whether a config says how files were quantized, and tensors of these element types are not."""
    match config.get("quantization_config"):
        case {"quant_method": str(method)}:
            return method in OF_FILES and set(dtypes) <= set(FLOATS)
    return False


def dequantized(found: Mapping[str, Fragment], config: Mapping[str, Any]) -> tuple[dict[str, Fragment], str]:
    """The tensors of a model out of those of a quantized one: BF16 for each pair of quantized elements and scales.

    Args:
        found: the tensors of the files, by key.
        config: the config.json beside them.

    Returns:
        The tensors, and a note on what they were.

    Raises:
        SourceError: scales are missing, of another shape than the elements that they belong to, or unexplained.
        UnsupportedError: its blocks are of another kind.
    """
    method = method_of(config)
    if method == "MXFP4":
        held, exact = _mxfp4(found), "which holds them exactly"
    elif method == "FP8":
        held, exact = (
            _fp8(found, config["quantization_config"]["weight_block_size"]),
            "times their scales, rounded once",
        )
    else:
        for suffix, elements in ((INVERSE, ""), ("_scales", "_blocks")):
            for key in found:
                if key.endswith(suffix) and key.removesuffix(suffix) + elements in found:
                    reason = f"{found[key].path} holds {key}, and config.json beside it no quantization_config"
                    raise SourceError(reason, "take config.json from where the files come from")
        return dict(found), ""
    count = sum(fragment.scales is not None for fragment in held.values())
    left = sum(key.endswith(ACTIVATIONS) for key in found.keys() - held.keys())
    without = f", without {left} scales of activations" if left else ""
    note = f"{count} tensors of {method} are read as BF16, {exact}{without}; --verbatim carries them as they are"
    return held, note if count else ""


def _mxfp4(found: Mapping[str, Fragment]) -> dict[str, Fragment]:
    held = {}
    for key, blocks in found.items():
        name, suffix = key[:-7], key[-7:]
        if suffix == "_scales" and f"{name}_blocks" in found:
            continue
        if suffix != "_blocks":
            held[key] = blocks
            continue
        scales = _scales(found, f"{name}_scales", blocks, key)
        if blocks.dtype != "U8" or blocks.shape[3:] != (GROUP // 2,):
            raise SourceError(f"{blocks.path}: {key} is {blocks.dtype}{list(blocks.shape)}, not MXFP4")
        _require(scales, f"{name}_scales", "U8", blocks.shape[:3])
        experts, rows, groups = blocks.shape[:3]
        wide = groups * GROUP
        factors = Scales("MXFP4", scales, (1, GROUP), 1, experts * rows * wide, f"{name}_scales")
        held[name] = Fragment(
            blocks.path, blocks.offset, "BF16", (experts, wide, rows), (rows * wide, 1, wide),
            scales=factors, member=blocks.member,
        )  # fmt: skip
    return held


def _fp8(found: Mapping[str, Fragment], block: Sequence[int] | None) -> dict[str, Fragment]:
    held = {}
    for key, fragment in found.items():
        name = key.removesuffix(INVERSE)
        if key.endswith(ACTIVATIONS) and f"{key.removesuffix(ACTIVATIONS)}.weight{INVERSE}" in found:
            continue
        if key.endswith(INVERSE) and name in found:
            if found[name].dtype != "F8_E4M3":
                raise UnsupportedError(f"{fragment.path} holds {key} for {found[name].dtype}, not F8_E4M3", KEEP)
            continue
        if fragment.dtype != "F8_E4M3":
            held[key] = fragment
            continue
        if len(fragment.shape) < 2:
            raise UnsupportedError(f"{fragment.path}: {key} is FP8{list(fragment.shape)}, which has no blocks", KEEP)
        scales = _scales(found, f"{key}{INVERSE}", fragment, key)
        *stack, rows, columns = fragment.shape
        high, wide = block or (max(rows, 1), max(columns, 1))
        one = not block and prod(scales.shape) == prod(stack)
        grid = scales.shape if one else (*stack, -(-rows // high), -(-columns // wide))
        if scales.dtype not in FACTORS:
            reason = f"{scales.path}: {key}{INVERSE} is {scales.dtype}, not {' or '.join(FACTORS)}"
            raise UnsupportedError(reason, KEEP)
        _require(scales, f"{key}{INVERSE}", scales.dtype, grid)
        least = (min(high, max(rows, 1)), min(wide, max(columns, 1)))
        held[key] = fragment._replace(
            dtype="BF16", scales=Scales("FP8", scales, least, rows, columns, f"{key}{INVERSE}")
        )
    return held


def _scales(found: Mapping[str, Fragment], name: str, of: Fragment, key: str) -> Fragment:
    if name not in found:
        raise SourceError(f"{of.path} holds {key}, and no file its {name}")
    for one, said in ((of, key), (found[name], name)):
        if not one.row_major:
            raise UnsupportedError(f"{one.path}: {said} is not stored row by row: strides {list(one.strides)}", KEEP)
    return found[name]


def _require(scales: Fragment, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if (scales.dtype, scales.shape) != (dtype, shape):
        raise SourceError(
            f"{scales.path}: {name} is {scales.dtype}{list(scales.shape)}, its elements imply {dtype}{list(shape)}"
        )
