"""Engines compute the steps of a training: one file an engine.

Rows, masks, order, loss, learning rate, checkpoint names and logs are the same with every engine.
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
    "fsdp": ("train.engines.fsdp", "FsdpEngine", "fsdp"),
    "transformers": ("train.engines.trainer", "TrainerEngine", "fsdp"),
    "deepspeed": ("train.engines.deepspeed", "DeepSpeedEngine", "deepspeed"),
}
"""Value of `engine`: module, class, and the engine whose checkpoint format the engine writes and reads."""


class Engine(Protocol):
    """A sharded model with its optimizer. All methods are collective: every rank calls them, in the same order.

    An engine that owns its loop (see `trainer.py`) has neither `backward` nor `step`, so it is not a `Stepping`.

    Attributes:
        model: the model, of transformers.
        trainee: a `model.Trainee`, or its wrapper: called with rows it returns the sum of their losses.
        kernels: kernels of the layers, torch or liger.
    """

    model: Any
    trainee: Any
    kernels: str

    def write(self, folder: Path) -> Future[Any] | None:
        """Write weights and optimizer states into an existing folder; a future if that happens in the background."""

    def read(self, folder: Path) -> None:
        """Read the weights and optimizer states that `write` wrote."""


class Stepping(Engine, Protocol):
    """An engine whose steps our own loop takes, not the loop of a library."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch; after the last one of a step gradients are averaged over ranks."""

    def step(self, rate: float) -> float:
        """Clip the gradients, and update the weights at a learning rate. Returns the norm before clipping."""


def open_engine(config: Config, model_config: Any, world: World, backend: str) -> Engine:
    """Build the model and its optimizer, with the weights of `model.path`.

    Args:
        config: the settings.
        model_config: the model's configuration, of transformers.
        world: the ranks.
        backend: a key of `attention.BACKENDS`.
    """
    module, name, _ = ENGINES[config.engine]
    engine: Engine = getattr(import_module(module), name)(config, model_config, world, backend)
    return engine
