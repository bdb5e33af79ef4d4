"""What computes the steps of a training. An engine is one file; the loop knows only what is said here.

Rows, masks, order, loss, learning rate, checkpoints' names and logs are the same whatever computes.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from train.config import Config
from train.distributed import World


class Engine(Protocol):
    """A sharded model with its optimizer. Every rank calls everything, in the same order.

    Attributes:
        model: of transformers.
        trainee: a `model.Trainee`, or what wraps it: called with rows it gives the sum of their losses.
        kernels: torch or liger.
    """

    model: Any
    trainee: Any
    kernels: str

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch. Gradients are averaged over ranks behind the last one of a step."""

    def step(self, rate: float) -> float:
        """Clip, and step with a learning rate. The gradient's norm before clipping."""

    def write(self, folder: Path) -> Future[Any] | None:
        """Write weights and optimizer states into a folder that is there; a future if that goes on meanwhile."""

    def read(self, folder: Path) -> None:
        """Read what `write` wrote."""


def open_engine(config: Config, made: Any, world: World, backend: str) -> Engine:
    """Make the model and its optimizer, filled from `model.path`.

    Args:
        config: the settings.
        made: the model's configuration, of transformers.
        world: the ranks.
        backend: a key of `attention.BACKENDS`.
    """
    from train.engines.fsdp import Sharded

    return Sharded(config, made, world, backend)
