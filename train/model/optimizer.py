"""AdamW with weight decay on matrices only: not on vectors (norms and biases), and not on biases of several experts."""

from __future__ import annotations

import torch
from torch import nn

from train.model.trainee import shape_of
from train.settings.config import Optim


def groups(trainee: nn.Module, decay: float) -> list[dict[str, object]]:
    """Parameter groups: matrices with weight decay, everything else without. Empty groups are left out.

    GPT-OSS has the biases of its experts as tensors of two dimensions: `gate_up_proj_bias` and `down_proj_bias`.
    """
    trainable = {name: tensor for name, tensor in trainee.named_parameters() if tensor.requires_grad}
    decayed = {name for name, tensor in trainable.items() if len(shape_of(tensor)) > 1 and not name.endswith("bias")}
    parts: list[dict[str, object]] = [
        {"params": [tensor for name, tensor in trainable.items() if name in decayed], "weight_decay": decay},
        {"params": [tensor for name, tensor in trainable.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return [part for part in parts if part["params"]]


def adamw(trainee: nn.Module, optim: Optim, *, fused: bool) -> torch.optim.AdamW:
    """AdamW over all trainable parameters of a model."""
    parameter_groups = groups(trainee, optim.weight_decay)
    return torch.optim.AdamW(parameter_groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)
