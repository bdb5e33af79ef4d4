"""A model whose linear layers are quantized as they are read: FP8 with a scale for each block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.checkpoint import Checkpoint
from formats.disk.safetensors import FLOATS, Coded, Fragment, row_major
from formats.errors import RefusedError, UnsupportedError
from formats.families import family_named
from formats.huggingface import HUGGINGFACE
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE
from formats.model import untabled
from formats.model.spec import ModelSpec

BLOCK = (128, 128)
"""Rows and columns of a block: those that DeepSeek publishes, and that servers have kernels for."""
WHY = "its weights are quantized"
LINEAR = {
    "query", "key", "value", "query_gate", "output", "gate", "up", "down", "shared_gate", "shared_up", "shared_down",
    "latent_query", "query_down", "query_up", "latent_down", "latent_up",
    "expert_gate", "expert_up", "expert_down",
}  # fmt: skip
"""Weights of linear layers. Routers, gates of experts and recurrences stay as they are."""


def quantized(source: Checkpoint) -> tuple[Checkpoint, dict[str, Any]]:
    """A model whose linear layers are quantized as they are read, and the quantization_config that says so.

    A matrix that has not whole blocks stays as it is, as transformers leaves it (`Fp8Quantize`, 5.23.0).

    Raises:
        UnsupportedError: the source is not a Hugging Face folder of a family with a table, its linear layers are of a
            class that transformers does not replace, or its experts are fused.
        RefusedError: no linear layer has whole blocks.
    """
    if source.format != HUGGINGFACE.name:
        raise UnsupportedError(f"{source.root} is not a Hugging Face folder", "convert it first, then hf2hf --quantize")
    if not isinstance(source.spec, ModelSpec):
        raise UnsupportedError(f"{source.root} cannot be quantized: {source.spec.why}")
    family = family_named(source.spec.family)
    if family.linear:
        raise UnsupportedError(
            f"{source.root} cannot be quantized: the linear layers of {family.name} are {family.linear}, and "
            "transformers replaces nn.Linear alone: it would compute with FP8 without the scales",
            "leave --quantize out",
        )
    fragments: dict[str, Fragment] = {}
    unquantized = []
    for placed in source.tensors:
        linear = LINEAR.issuperset(placed.slot.rule.pattern.tensors) and len(placed.fragment.shape) > 1
        if linear and _has_blocks(placed):
            matrix = placed.fragment
            grid = (matrix.shape[0] // BLOCK[0], matrix.shape[1] // BLOCK[1])
            fragments[placed.key] = _coded(matrix, "F8_E4M3", matrix.shape, scales=False)
            fragments[f"{placed.key}_scale_inv"] = _coded(matrix, "F32", grid, scales=True)
        else:
            fragments[placed.key] = placed.fragment
            unquantized += [_module(placed)] if len(placed.fragment.shape) == 2 else []
    heads = [rule.spellings[0] for rule in family.tensors if rule.pattern.tensors == ("head",)]
    unquantized += [head.removesuffix(".weight") for head in heads if source.spec.tied]
    if len(fragments) == len(source.tensors):
        raise RefusedError(f"{source.root} has no linear layer of whole blocks of {BLOCK[0]} x {BLOCK[1]}")
    shapes = {key: fragment.shape for key, fragment in fragments.items()}
    spec = untabled.describe(dict(source.config or {}), shapes, {"tied": source.spec.tied}, WHY)
    tensors, _ = match(untabled.slots(spec), {ALONE: fragments}, (), source.root)
    config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
        "modules_to_not_convert": [*dict.fromkeys(unquantized)],
    }  # fmt: skip
    return replace(source, spec=spec, tensors=tuple(tensors), original=source), config


def _module(placed: Placed) -> str:
    """The name of the transformers module that computes with a matrix: one for all experts of a layer."""
    expert = placed.slot.expert
    return placed.key.removesuffix(".weight") if expert is None else placed.key.rpartition(f".{expert}.")[0]


def _has_blocks(placed: Placed) -> bool:
    """Whether a weight is a matrix of whole blocks.

    Raises:
        UnsupportedError: the weight is several matrices, or not in row-major floats.
    """
    fragment = placed.fragment
    if len(fragment.shape) != 2:
        raise UnsupportedError(f"{fragment.path}: {placed.key} is {list(fragment.shape)}, experts in one tensor")
    if fragment.dtype not in FLOATS or not fragment.row_major:
        raise UnsupportedError(f"{fragment.path}: {placed.key} is {fragment.dtype}, strides {list(fragment.strides)}")
    return not (fragment.shape[0] % BLOCK[0] or fragment.shape[1] % BLOCK[1])


def _coded(matrix: Fragment, dtype: str, shape: tuple[int, ...], *, scales: bool) -> Fragment:
    coded = Coded(matrix, BLOCK, scales)
    return Fragment(matrix.path, matrix.offset, dtype, shape, row_major(shape), coded=coded)


def with_config(text: bytes, quantization: Mapping[str, Any]) -> bytes:
    """The text of a config.json with a quantization_config."""
    return (json.dumps(json.loads(text) | {"quantization_config": dict(quantization)}, indent=2) + "\n").encode()
