"""AdamW, whose weight decay leaves vectors (norms and biases) alone."""

from __future__ import annotations

import torch
from torch import nn

from train.model.trainee import shape_of
from train.settings.config import Optim


def groups(trainee: nn.Module, decay: float) -> list[dict[str, object]]:
    """Matrices with weight decay, and everything else without; none that is empty."""
    held = [tensor for tensor in trainee.parameters() if tensor.requires_grad]
    parts: list[dict[str, object]] = [
        {"params": [one for one in held if len(shape_of(one)) > 1], "weight_decay": decay},
        {"params": [one for one in held if len(shape_of(one)) <= 1], "weight_decay": 0.0},
    ]
    return [part for part in parts if part["params"]]


def adamw(trainee: nn.Module, optim: Optim, *, fused: bool) -> torch.optim.AdamW:
    """The optimizer of everything in a model that is trained."""
    held = groups(trainee, optim.weight_decay)
    return torch.optim.AdamW(held, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)
