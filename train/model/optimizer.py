"""AdamW with weight decay on matrices only: not on vectors (norms and biases)."""

from __future__ import annotations

import torch
from torch import nn

from train.model.trainee import shape_of
from train.settings.config import Optim


def groups(trainee: nn.Module, decay: float) -> list[dict[str, object]]:
    """Parameter groups: matrices with weight decay, everything else without. Empty groups are left out."""
    trainable = [tensor for tensor in trainee.parameters() if tensor.requires_grad]
    parts: list[dict[str, object]] = [
        {"params": [tensor for tensor in trainable if len(shape_of(tensor)) > 1], "weight_decay": decay},
        {"params": [tensor for tensor in trainable if len(shape_of(tensor)) <= 1], "weight_decay": 0.0},
    ]
    return [part for part in parts if part["params"]]


def adamw(trainee: nn.Module, optim: Optim, *, fused: bool) -> torch.optim.AdamW:
    """AdamW over all trainable parameters of a model."""
    parameter_groups = groups(trainee, optim.weight_decay)
    return torch.optim.AdamW(parameter_groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)
