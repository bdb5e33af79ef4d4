"""How much a step computes, and how much of what the device could do that is.

Model FLOPs count what the model's mathematics needs, forward and backward; what activation checkpointing computes twice
does not count (Chowdhery et al., PaLM, appendix B). Documents attend to themselves only, so attention is counted from
their lengths, not from the row's.
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
"""Names of parameters of all experts of a layer."""


def peak_of(device: torch.device) -> float | None:
    """What a device could do, None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def multiplied(model: Any) -> float:
    """Parameters that a token is multiplied with: all but the input embedding, unless it is the head too.

    A frozen one counts two thirds, because nothing computes its gradient. Of experts, which transformers 5 keeps as
    tensors [experts, …] of a module of that name, as many count as a token goes to.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    found = 0.0
    for name, one in model.named_parameters():
        if one is head or one is not embedding:
            shape = shape_of(one)
            active = model.config.num_experts_per_tok / shape[0] if EXPERTS.search(name) else 1.0
            found += prod(shape) * active * (1.0 if one.requires_grad else 2 / 3)
    return found


def flops_of(flats: Sequence[Flat], config: Any, parameters: float) -> float:
    """Floating point operations of some rows, forward and backward.

    Args:
        flats: the rows.
        config: the model's configuration, of transformers.
        parameters: see `multiplied`. Each is a multiplication and an addition forward, twice that backward; so is
            each channel of a query, with its key and with its value, for half of the pairs of a document's tokens.
            With latents keys are wider than values.
    """
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    width = heads * (head + getattr(config, "v_head_dim", head)) / 2
    tokens = sum(len(flat.input_ids) for flat in flats)
    pairs = sum(float(np.square(np.diff(flat.cu_seqlens).astype(float)).sum()) / 2 for flat in flats)
    return float(6.0 * parameters * tokens + 12.0 * layers * width * pairs)


def memory_of(device: torch.device) -> int:
    """The most bytes that this rank has had at a time: of the device, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
