"""What computes the steps of a training: one file an engine.

Rows, masks, order, loss, learning rate, checkpoints' names and logs are the same whatever computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from train.distributed import World
from train.settings.config import Config

ENGINES: Mapping[str, tuple[str, str, str]] = {
    "fsdp": ("train.engines.fsdp", "Sharded", "fsdp"),
    "transformers": ("train.engines.trainer", "Driven", "fsdp"),
    "deepspeed": ("train.engines.deepspeed", "Zero", "deepspeed"),
}
"""What `engine` can be: its module and class, and the engine whose checkpoints it writes and reads."""


class Engine(Protocol):
    """A sharded model with its optimizer. Every rank calls everything, in the same order.

    One that owns its loop (see `trainer.py`) has neither `backward` nor `step`: it is no `Stepping`.

    Attributes:
        model: of transformers.
        trainee: a `model.Trainee`, or what wraps it: called with rows it gives the sum of their losses.
        kernels: torch or liger.
    """

    model: Any
    trainee: Any
    kernels: str

    def write(self, folder: Path) -> Future[Any] | None:
        """Write weights and optimizer states into a folder that is there; a future if that goes on meanwhile."""

    def read(self, folder: Path) -> None:
        """Read what `write` wrote."""


class Stepping(Engine, Protocol):
    """An engine whose steps our loop takes."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch. Gradients are averaged over ranks behind the last one of a step."""

    def step(self, rate: float) -> float:
        """Clip, and step with a learning rate. The gradient's norm before clipping."""


def open_engine(config: Config, made: Any, world: World, backend: str) -> Engine:
    """Make the model and its optimizer, filled from `model.path`.

    Args:
        config: the settings.
        made: the model's configuration, of transformers.
        world: the ranks.
        backend: a key of `attention.BACKENDS`.
    """
    module, name, _ = ENGINES[config.engine]
    engine: Engine = getattr(import_module(module), name)(config, made, world, backend)
    return engine
