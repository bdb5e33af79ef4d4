"""Kernels of layers: torch's own, or liger's for norms, gated MLPs and rotary positions.

Liger's fused loss is not used: it takes the head's weights without calling the head, so it bypasses the hooks that
gather them (FSDP) and adapters (LoRA). `trainee.summed_loss` keeps no more than a chunk of logits either.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from formats.errors import UnsupportedError


def resolve(requested: str, config: Any, device: torch.device, compiled: bool = False) -> str:
    """The kernels to use, torch or liger.

    Args:
        requested: torch, liger, or auto: liger where it runs and supports the model, unless layers are compiled.
        config: the model's configuration, of transformers.
        device: where the model runs.
        compiled: whether layers are compiled: torch.compile fuses torch's own operations into kernels.

    Raises:
        UnsupportedError: liger does not run here, or does not support the model.
    """
    if requested == "torch" or (requested == "auto" and (compiled or device.type != "cuda")):
        return "torch"
    if device.type != "cuda":
        raise UnsupportedError(f"the kernels of liger do not run on {device.type}", "--model.kernels auto")
    if find_spec("liger_kernel") is None:
        if requested == "auto":
            return "torch"
        raise UnsupportedError("liger_kernel is not installed", "pip install 'vitruvian[liger]'")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0
    if config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN and not partial:  # liger's rotary kernel rotates whole heads
        return "liger"
    if requested == "auto":
        return "torch"
    model = f"{config.model_type} with partial rotary positions" if partial else config.model_type
    raise UnsupportedError(f"liger has no kernels for {model}", "--model.kernels auto")


def replace(model: Any) -> None:
    """Patch a model with liger's kernels, by the call that transformers makes (5.23.0 integrations/liger.py).

    The defaults of liger 0.8.5 specify which kernels a model gets: some get no rotary kernel. The Python module of the
    model is patched for the whole process: later models of the same type have these kernels too.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
