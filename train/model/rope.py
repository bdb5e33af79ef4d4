"""Rotary frequencies that depend on the length of a document: in a packed row each document gets its own.

transformers takes the frequencies of the longest document for the whole row (5.23.0 modeling_rope_utils.py
`dynamic_rope_update`). LongRoPE has one set of frequencies up to a length and another beyond it, dynamic scaling a set
for each longer length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from formats.huggingface.rope import ORIGINAL

OF_LENGTH = ("longrope", "dynamic")
"""Types of rotary positions (`rope_type`) whose frequencies depend on the length."""


def turned_alike(config: Any) -> dict[str, float]:
    """The length up to which all documents have the same frequencies, by type of rotary positions; often empty.

    Args:
        config: the model's configuration, of transformers.
    """
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {
        str(part["rope_type"]): float(
            part[ORIGINAL] if part["rope_type"] == "longrope" else config.max_position_embeddings
        )
        for part in parts
        if part.get("rope_type") in OF_LENGTH
    }


def is_turned_apart(config: Any) -> bool:
    """Whether `turn_apart` gives each document its own frequencies; it does not where kinds of layers have theirs."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type") in OF_LENGTH


def turn_apart(model: Any) -> None:
    """Give each document of a row the frequencies that transformers would give it in a row of its own."""
    if not is_turned_apart(model.config):
        return
    (limit,) = turned_alike(model.config).values()
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.forward = _apart(module, module.forward, limit)


def _apart(module: Any, forward: Callable[..., tuple[torch.Tensor, ...]], limit: float) -> Callable[..., Any]:
    def turned(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (positions,) = position_ids
        begins = torch.cat([positions.new_ones(1, dtype=torch.bool), positions.diff() != 1])
        document = begins.cumsum(0) - 1
        lengths = torch.bincount(document)[document]
        lengths[lengths <= limit] = 0  # one set of frequencies for all of these
        parts: list[torch.Tensor] = []
        for length in (sizes := sorted(set(lengths.tolist()))):
            module.inv_freq = module.original_inv_freq.clone()  # dynamic scaling keeps those of the longest so far
            module.max_seq_len_cached = module.original_max_seq_len
            chosen = lengths == length
            values = forward(x, position_ids[:, chosen])
            if len(sizes) == 1:
                return values
            parts = parts or [value.new_empty(*value.shape[:1], len(positions), *value.shape[2:]) for value in values]
            for whole, value in zip(parts, values, strict=True):
                whole[:, chosen] = value
        return tuple(parts)

    return turned
