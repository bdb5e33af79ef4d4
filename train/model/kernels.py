"""Kernels of layers: torch's own, or liger's for norms, gated MLPs and rotary positions.

Liger's fused loss is not taken: it wants the weights of the head and does not call it, past what gathers them (FSDP)
and what adds to them (LoRA). `model.summed_loss` holds no more logits than a chunk either.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from formats.errors import UnsupportedError


def resolve(wanted: str, config: Any, device: torch.device) -> str:
    """The kernels to use, torch or liger.

    Args:
        wanted: either, or auto: liger where it runs and knows the model.
        config: the model's configuration, of transformers.
        device: where the model runs.

    Raises:
        UnsupportedError: liger does not run here, or does not know the model.
    """
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if device.type != "cuda":
        raise UnsupportedError(f"the kernels of liger do not run on {device.type}", "--model.kernels auto")
    if find_spec("liger_kernel") is None:
        if wanted == "auto":
            return "torch"
        raise UnsupportedError("liger_kernel is not installed", "pip install '.[liger]'")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0
    if config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN and not partial:  # its rotary kernel turns whole heads
        return "liger"
    if wanted == "auto":
        return "torch"
    told = f"{config.model_type} with partial rotary positions" if partial else config.model_type
    raise UnsupportedError(f"liger has no kernels for {told}", "--model.kernels auto")


def replace(model: Any) -> None:
    """Let a model compute with liger's kernels, by the call that transformers makes (5.23.0 integrations/liger.py).

    Which of them are right for a model, liger 0.8.5 says by its defaults: some have no rotary kernel. It is made for a
    process with one model: others of its type that are made later have these kernels too.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
