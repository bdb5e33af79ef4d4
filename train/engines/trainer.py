"""The Trainer of transformers: its loop and accelerate's sharding, with our rows, loss, learning rate and checkpoints.

What the Trainer does: accumulation, clipping, the optimizer's steps, the scheduler's, callbacks. What accelerate does:
dealing micro-batches to ranks, FSDP2 on GPUs, and DDP on CPUs, where it does not shard (accelerate 1.15.0 state.py
takes an `fsdp_plugin` on accelerators only). Everything else is ours, and so are the checkpoints: another engine, or
another number of ranks, can resume from them. No state of the Trainer has to be saved: rows, learning rates and seeds
are functions of the step, so a job trains the remaining steps on a data set that starts at the next row.
"""

from __future__ import annotations

from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from formats.errors import UnsupportedError
from train.distributed import World
from train.engines.fsdp import fill_weights, read, write
from train.model import lora
from train.model.optimizer import adamw
from train.model.parts import layers
from train.model.trainee import DTYPES, Trainee, fill_buffers, freeze, make, save_memory
from train.settings.config import Config

SHARDED = ("cuda",)
"""Types of devices on which accelerate shards a model."""


class TrainerEngine:
    """A model with its optimizer. The Trainer shards the model before its first step, and then calls `fill`."""

    kernels = "torch"

    def __init__(self, config: Config, model_config: Any, world: World, backend: str) -> None:
        if find_spec("accelerate") is None:
            raise UnsupportedError("the engine transformers needs accelerate", "pip install 'vitruvian[train]'")
        self.world, self.config = world, config
        self.start: Path | None = None
        self.model = make(model_config, backend, DTYPES[config.model.dtype] if config.lora else torch.float32)
        if config.lora is not None:
            lora.insert(self.model, config.lora, config.model.path)
        freeze(self.model, config.model.freeze)
        self.kinds = sorted({type(layer).__name__ for layer in layers(self.model)})
        save_memory(layers(self.model), config.model, world.device)
        self.trainee: Any = Trainee(self.model, backend)
        self.trainee.to_empty(device="cpu")  # accelerate identifies tensors by address; untouched pages take no memory
        self.model.tie_weights()
        fill_buffers(self.model, torch.device("cpu"))
        rateless = config.optim.model_copy(update={"lr": 1.0})  # the scheduler's factor is the learning rate
        self.optimizer: torch.optim.Optimizer = adamw(self.trainee, rateless, fused=world.device.type == "cuda")

    def write(self, folder: Path) -> Future[Any]:
        """See `Engine`."""
        return write(self.model, self.optimizer, folder, self.world)

    def read(self, folder: Path) -> None:
        """See `Engine`. Only notes the folder: `fill` reads it when the model is sharded."""
        self.start = folder

    def fill(self) -> None:
        """Fill the sharded model from the checkpoint or from `model.path`; each rank reads its own shards."""
        if self.start is None or self.config.lora is not None:  # LoRA saves adapters only
            fill_weights(self.model, self.config)
        if self.start is not None:
            read(self.model, self.optimizer, self.start, self.world)
