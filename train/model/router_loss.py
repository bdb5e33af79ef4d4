"""The auxiliary losses of the router of a mixture of experts, where the model's config asks for them.

`output_router_logits` in a config.json adds `router_aux_loss_coef` times the load balancing loss of a forward pass to
the loss of the labels (transformers 5.23.0 models/mixtral/modeling_mixtral.py, `MixtralForCausalLM.forward`), and
`router_z_loss_coef` adds the z-loss: the mean over tokens and layers of the square of the router's logsumexp
(models/switch_transformers/modeling_switch_transformers.py, `router_z_loss_func`). This loss is not a sum over tokens,
so it would depend on the micro-batch. Here the loss is computed for each row, weighted by the row's trained labels: it
is the same with any micro-batch and on any ranks, and equals that of transformers where a batch is one row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from formats.errors import UnsupportedError
from train.data.rows import IGNORED, Flat

SETTINGS = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
Balance = Callable[[Sequence[torch.Tensor], Flat], torch.Tensor]
"""From the router's logits of each layer, [n, experts], to the loss of the rows, times their trained labels."""


def router_loss(model: Any) -> Balance | None:
    """The router's loss that a model's config asks for; None if it asks for none.

    Raises:
        UnsupportedError: the model's class has no such loss.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    balance = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    settings: list[Any] = [getattr(model, name, None) for name in SETTINGS]
    if balance is None or None in settings:
        raise UnsupportedError(
            f"its config.json says output_router_logits, and {type(model).__name__} has no loss of the router",
            "set it to false",
        )
    factor, experts, chosen = settings
    z_factor = float(getattr(model.config, "router_z_loss_coef", None) or 0.0)

    def loss_of(logits: Sequence[torch.Tensor], flat: Flat) -> torch.Tensor:
        total: torch.Tensor = logits[0].new_zeros((), dtype=torch.float32)
        for low, stop in pairwise(flat.rows or (0, len(flat.labels))):
            trained = int((flat.labels[low:stop] != IGNORED).sum())
            if trained:
                parts = tuple(layer[low:stop] for layer in logits)
                total = total + trained * float(factor) * balance(parts, experts, chosen)
                if z_factor:
                    total = total + trained * z_factor * torch.stack(parts).float().logsumexp(-1).square().mean()
        return total

    return loss_of
