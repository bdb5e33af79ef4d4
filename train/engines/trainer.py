"""The Trainer of transformers: its loop and accelerate's sharding, with our rows, loss, learning rate and checkpoints.

What the Trainer does: accumulation, clipping, the optimizer's steps, the scheduler's, callbacks. What accelerate does:
dealing micro-batches to ranks, FSDP2 on GPUs, and DDP on CPUs, where it does not shard (accelerate 1.15.0 state.py
takes an `fsdp_plugin` on accelerators only). Everything else is ours, and so are the checkpoints: another engine, or
another number of ranks, goes on with them. Nothing of a Trainer's own has to be saved: rows, rates and seeds are
functions of the step, so a job trains the steps that are left, with a data set that begins where they do.
"""

from __future__ import annotations

from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from formats.errors import UnsupportedError
from train.distributed import World
from train.engines.fsdp import read, write
from train.model.optimizer import adamw
from train.model.parts import layers
from train.model.trainee import Trainee, fill, fill_buffers, make, recompute
from train.settings.config import Config

SHARDED = ("cuda",)
"""Devices that accelerate shards a model on."""


class Driven:
    """A model with its optimizer, which the Trainer shards before its first step and fills then."""

    kernels = "torch"

    def __init__(self, config: Config, made: Any, world: World, backend: str) -> None:
        if find_spec("accelerate") is None:
            raise UnsupportedError("the engine transformers needs accelerate", "pip install '.[train]'")
        self.world, self.source = world, config.model.path
        self.start: Path | None = None
        self.model = make(made, backend)
        self.kinds = sorted({type(layer).__name__ for layer in layers(self.model)})
        if config.model.activation_checkpointing:
            recompute(layers(self.model))
        self.trainee: Any = Trainee(self.model, backend)
        self.trainee.to_empty(device="cpu")  # accelerate tells tensors apart by address; untouched, they take no memory
        self.model.tie_weights()
        fill_buffers(self.model, torch.device("cpu"))
        rateless = config.optim.model_copy(update={"lr": 1.0})  # the scheduler's factor is the rate
        self.optimizer: torch.optim.Optimizer = adamw(self.trainee, rateless, fused=world.device.type == "cuda")

    def write(self, folder: Path) -> Future[Any]:
        """See `Engine`."""
        return write(self.model, self.optimizer, folder, self.world)

    def read(self, folder: Path) -> None:
        """See `Engine`: as soon as the model is sharded."""
        self.start = folder

    def fill(self) -> None:
        """Fill a model that is sharded, each rank its own pieces."""
        if self.start is not None:
            read(self.model, self.optimizer, self.start, self.world)
            return
        with torch.no_grad():
            fill(self.model, self.source)
