"""Model FLOPs of a step, the peak FLOP/s of a device, and peak memory, for MFU and the log.

Model FLOPs are those of the model's forward and backward; recomputation by activation checkpointing does not count
(Chowdhery et al., PaLM, appendix B). Documents attend only to themselves, so attention is counted from their lengths,
not from the row's.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from train.data.rows import Flat
from train.model.trainee import shape_of
from train.run.estimate import PEAK

EXPERTS = re.compile(r"\.experts\.\w+$")
"""Matches the names of parameters that have all experts of a layer."""


def peak_of(device: torch.device) -> float | None:
    """Peak FLOP/s of a device, None if it is not in `PEAK`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def multiplied(model: Any) -> float:
    """Number of parameters that a token is multiplied with: all but the input embedding, unless the head is tied.

    A frozen parameter counts two thirds, because its gradient is not computed. Experts, which transformers 5 keeps as
    tensors [experts, …] of a module `experts`, count as many times as a token is routed to (`num_experts_per_tok`).
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    for name, tensor in model.named_parameters():
        if tensor is head or tensor is not embedding:
            shape = shape_of(tensor)
            active = model.config.num_experts_per_tok / shape[0] if EXPERTS.search(name) else 1.0
            total += prod(shape) * active * (1.0 if tensor.requires_grad else 2 / 3)
    return total


def flops_of(flats: Sequence[Flat], config: Any, parameters: float) -> float:
    """Model FLOPs of some rows, forward and backward.

    Args:
        flats: the rows.
        config: the model's configuration, of transformers.
        parameters: from `multiplied`. Each costs a multiplication and an addition forward, twice that backward; so does
            each channel of a query, with its key and with its value, for half of the pairs of a document's tokens
            (causal mask). With MLA, keys are wider than values.
    """
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    width = heads * (head + getattr(config, "v_head_dim", head)) / 2
    tokens = sum(len(flat.input_ids) for flat in flats)
    pairs = sum(_pairs(flat) for flat in flats)
    return float(6.0 * parameters * tokens + 12.0 * layers * width * pairs)


def _pairs(flat: Flat) -> float:
    """Half of the query-key pairs of all documents; for a part of a row, those whose query is in the part."""
    queries = np.diff(flat.cu_seqlens).astype(float)
    keys = queries if flat.keys is None else np.diff(flat.keys.cu_seqlens).astype(float)
    return float((np.square(keys) - np.square(keys - queries)).sum()) / 2


def memory_of(device: torch.device) -> int:
    """Peak memory of this rank in bytes: of the GPU, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
