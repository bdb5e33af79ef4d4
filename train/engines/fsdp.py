"""FSDP2 of torch, and HSDP with replicas. Checkpoints are torch DCP with Hugging Face names.

Trained parameters are float32. With LoRA, frozen parameters have the compute dtype: FSDP requires a uniform dtype only
of the trained ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from formats.errors import RefusedError, SourceError, some
from formats.torch_files import dcp
from train.distributed import World
from train.engines.errors import reason
from train.model import kernels, lora, tensor_parallel
from train.model.adam8bit import Adam8bit
from train.model.optimizer import adamw
from train.model.parts import layers
from train.model.quantized import packed, quantize
from train.model.trainee import (
    DTYPES,
    Trainee,
    compile_layers,
    fill,
    fill_buffers,
    freeze,
    make,
    place,
    save_memory,
    weights,
)
from train.settings.config import Config

Adam = torch.optim.Optimizer | Adam8bit


def sharded(config: Config, model_config: Any, world: World, backend: str) -> Any:
    """A sharded `Trainee` with uninitialised weights.

    Args:
        config: the settings.
        model_config: the model's configuration, of transformers.
        world: the ranks.
        backend: a key of `attention.BACKENDS`.
    """
    dtype = DTYPES[config.model.dtype]
    model = make(model_config, backend, dtype if config.lora else torch.float32, world.context)
    kernel = kernels.resolve(config.model.kernels, model_config, world.device, config.model.compile)
    if kernel == "liger":
        kernels.replace(model)
    if config.lora is not None:
        if config.lora.quantize != "none":
            quantize(model, world.device)
        lora.insert(model, config.lora, config.model.path)
    freeze(model, config.model.freeze)
    decoder_layers = layers(model)
    if world.tensor > 1:
        tensor_parallel.split(decoder_layers, model_config, world.mesh["tensor"])
    if config.model.compile:
        compile_layers(decoder_layers)
    save_memory(decoder_layers, config.model, world.device)
    trainee = Trainee(model, backend, kernel, world.sharing)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole = packed(model)
    pinned = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    offload = pinned if config.parallel.offload else OffloadPolicy()
    mesh = world.mesh if world.mesh.shape[0] > 1 else world.mesh["shard"]
    shared: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload, "ignored_params": whole}
    for layer in decoder_layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=config.parallel.reshard, **shared)
    around = world.every if world.tensor > 1 else mesh  # what is in no layer, each rank computes as a whole
    fully_shard(trainee, mesh=around, **shared)
    trainee.to_empty(device="cpu" if config.parallel.offload else world.device)
    for module in model.modules():  # FSDP offloads parameters to CPU memory, not buffers
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
    model.tie_weights()
    fill_buffers(model, world.device)
    return trainee


def read_weights(model: Any, folder: Path, world: World) -> None:
    """Fill a sharded model with the weights of a checkpoint of any number of ranks, without the moments."""
    _load({"model": weights(model)}, folder, world)


@torch.no_grad()
def fill_weights(model: Any, config: Config) -> None:
    """Fill a sharded model from `model.path`, and its adapters as they begin; each rank reads its own shards."""
    fill(model, config.model.path)
    for tensor, whole in lora.begins(model, config.lora, config.model.path, config.seed):
        place(tensor, whole)


class FsdpEngine:
    """A model whose weights, gradients and moments are sharded over the ranks of a replica."""

    def __init__(self, config: Config, model_config: Any, world: World, backend: str) -> None:
        self.clip, self.world, self.reshard = config.optim.clip, world, config.parallel.reshard
        self.trainee = sharded(config, model_config, world, backend)
        self.model = self.trainee.model
        self.kernels = self.trainee.kernels
        fill_weights(self.model, config)
        fused = world.device.type == "cuda" and not config.parallel.offload
        eight = config.optim.moments == "8bit"
        self.optimizer: Adam = (
            Adam8bit(self.trainee, config.optim) if eight else adamw(self.trainee, config.optim, fused=fused)
        )

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """See `Engine`. Gradients are reduce-scattered after each micro-batch, or each rank would keep all of them."""
        self.trainee.set_requires_all_reduce(last)
        if not self.reshard:
            self.trainee.set_reshard_after_backward(last)
            self.trainee.set_requires_gradient_sync(last or self.world.ranks > 1)
        loss.backward()  # type: ignore[no-untyped-call]
        if last and self.world.tensor > 1:
            tensor_parallel.sum_partial(layers(self.model), self.model.config, self.world.mesh["tensor"])

    def step(self, rate: float) -> float:
        """See `Engine`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = clip([tensor for tensor in self.trainee.parameters() if tensor.grad is not None], self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def write(self, folder: Path) -> Future[Any]:
        """See `Engine`."""
        if not isinstance(self.optimizer, Adam8bit):
            return write(self.model, self.optimizer, folder, self.world)
        self.optimizer.unpack()
        future = write(self.model, self.optimizer, folder, self.world)  # `write` has copied the moments by now
        self.optimizer.state = {}
        return future

    def read(self, folder: Path) -> None:
        """See `Engine`. The checkpoint may be of any number of ranks."""
        read(self.model, self.optimizer, folder, self.world)
        if isinstance(self.optimizer, Adam8bit):
            self.optimizer.pack()


def clip(tensors: Sequence[torch.Tensor], most: float) -> float:
    """Clip gradients to a maximum of the norm over all of them; 0 does not clip. Returns the norm before clipping.

    torch's own function clips tensors of one device mesh only.
    """
    by_mesh = defaultdict[Any, list[torch.Tensor]](list)
    for tensor in tensors:
        by_mesh[getattr(tensor, "device_mesh", None)].append(tensor)
    norms: list[Any] = [
        get_total_norm([tensor.grad for tensor in part if tensor.grad is not None]) for part in by_mesh.values()
    ]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = get_total_norm(whole)
    for part in by_mesh.values():
        clip_grads_with_norm_(part, most or float("inf"), norm)
    return float(norm)


def write(model: Any, optimizer: Adam, folder: Path, world: World) -> Future[Any]:
    """Write weights, moments and steps: the tensors are copied now, and written in the background.

    The writer is passed explicitly so that it takes the copies from the CPU: torch's default would synchronise with a
    GPU in its thread, whose current device is GPU 0 on every rank (torch 2.10 and 2.13
    distributed/checkpoint/filesystem.py).
    """
    if world.first:
        lora.write_note(folder, model)
    tensors = _tensors(model, optimizer)
    tensors["optim"]["param_groups"] = _groups(optimizer, tensors["model"])
    future: Any = async_save(tensors, storage_writer=FileSystemWriter(folder), process_group=world.saving)
    return future  # type: ignore[no-any-return]


def read(model: Any, optimizer: Adam, folder: Path, world: World) -> None:
    """Read what `write` wrote on any number of ranks; older checkpoints lack the prefix `optim.state.`."""
    lora.check_same(folder, model)
    _empty_moments(optimizer)
    tensors = _tensors(model, optimizer)
    saved: set[str] = world.from_first(lambda: {entry.name for entry in dcp.entries(folder)})
    prefix = "optim.state." if any(name.startswith("optim.state.") for name in saved) else "optim."
    trained = [name for name in tensors["optim"]["state"] if f"model.{name}" in saved]
    lacking = [name for name in trained if f"{prefix}{name}.exp_avg" not in saved]
    world.from_first(lambda: _require_moments(folder, lacking))
    if prefix == "optim.":
        tensors["optim"] = tensors["optim"]["state"]
    _load(tensors, folder, world)


def _require_moments(folder: Path, lacking: Sequence[str]) -> None:
    """Refuse to resume where tensors are trained now that have no moments, because they were frozen before."""
    if lacking:
        raise RefusedError(
            f"{folder} has no moments of {len(lacking)} tensors that are trained now: {some(lacking, 3)}",
            f"resume with the model.freeze that it was trained with; or a new run: --model.path {folder} --save.path …",
        )


def _load(tensors: dict[str, Any], folder: Path, world: World) -> None:
    """Fill tensors, after our own reader has checked the checkpoint: torch would unpickle its metadata unchecked.

    Raises:
        SourceError: a file is missing, truncated, damaged, or does not match the model.
    """
    world.from_first(lambda: deque(dcp.load(dcp.contents(folder)[0]), 0))
    try:
        load(tensors, checkpoint_id=str(folder), process_group=world.saving)
    except CheckpointException as error:
        raise SourceError(
            f"{folder} does not fill the model: {reason(error)}",
            f"is model.path what it was trained from? if so: convert verify {folder}",
        ) from error


def _tensors(model: Any, optimizer: Adam) -> dict[str, Any]:
    """The weights (with LoRA the adapters only), and the moments and steps of the trained ones.

    All tensors have the names that torch's `get_state_dict` gives them.
    """
    tensors_by_name, state = lora.adapters(model) or weights(model), optimizer.state
    return {
        "model": tensors_by_name,
        "optim": {"state": {name: state[tensor] for name, tensor in tensors_by_name.items() if tensor in state}},
    }


def _groups(optimizer: Adam, tensors_by_name: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The parameter groups of AdamW with parameter names. This trainer ignores them; other trainers require them."""
    names = {tensor: name for name, tensor in tensors_by_name.items()}
    return [{**group, "params": [names[tensor] for tensor in group["params"]]} for group in optimizer.param_groups]


def _empty_moments(optimizer: Adam) -> None:
    """Give AdamW the state that it would create at its first step, so that a checkpoint can be loaded into that."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            step = torch.zeros((), dtype=torch.float32, device=tensor.device if group.get("fused") else "cpu")
            zeros = [torch.zeros_like(tensor) for _ in range(2)]
            optimizer.state[tensor] = {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
