"""Lion as its paper has it (arXiv 2302.06675, program 1), with the state and the settings of lion-pytorch 0.2.5."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """One moment of a parameter, and no count of its steps."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The sign of a mean of gradient and moment, times the rate."""
        assert closure is None
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = moment.mul(first).add_(param.grad, alpha=1 - first).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                moment.mul_(second).add_(param.grad, alpha=1 - second)
