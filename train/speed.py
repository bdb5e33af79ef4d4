"""How much a step computes, and how much of what the device could do that is.

Model FLOPs count what the model's mathematics needs, forward and backward; what activation checkpointing computes twice
does not count (Chowdhery et al., PaLM, appendix B). Documents attend to themselves only, so attention is counted from
their lengths, not from the row's.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from train.model import shape_of
from train.planning import PEAK
from train.rows import Flat


def peak_of(device: torch.device) -> float | None:
    """What a device could do, None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def multiplied(model: Any) -> float:
    """Parameters that every token is multiplied with: all but the input embedding, unless it is the head too.

    A frozen one counts two thirds, because nothing computes its gradient.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    held = [one for one in model.parameters() if one is head or one is not embedding]
    return sum(prod(shape_of(one)) * (1.0 if one.requires_grad else 2 / 3) for one in held)


def flops_of(flats: Sequence[Flat], config: Any, parameters: float) -> float:
    """Floating point operations of some rows, forward and backward.

    Args:
        flats: the rows.
        config: the model's configuration, of transformers.
        parameters: see `multiplied`. Each is a multiplication and an addition forward, twice that backward; so is
            each channel of a query, with its key and with its value, for half of the pairs of a document's tokens.
    """
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    tokens = sum(len(flat.input_ids) for flat in flats)
    pairs = sum(float(np.square(np.diff(flat.cu_seqlens).astype(float)).sum()) / 2 for flat in flats)
    return float(6.0 * parameters * tokens + 12.0 * layers * width * pairs)


def memory_of(device: torch.device) -> int:
    """The most bytes that this rank has had at a time: of the device, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
