"""DeepSpeed's ZeRO, stages 1 to 3. Checkpoints are DeepSpeed's, with Hugging Face names: `convert zero2hf` reads them.

Stages 1 and 2 keep the whole model on each rank, in the compute dtype; stage 3 keeps a shard of every parameter. In all
stages FP32 master weights are sharded, and filled from the files without rounding. Gradients are accumulated and
reduced in float32: in stage 1 after the last micro-batch of a step, in stages 2 and 3 after each micro-batch.
Facts: deepspeed 0.19.8.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from formats.deepspeed.universal import is_universal
from formats.errors import SourceError, UnsupportedError, UsageError
from train.distributed import World
from train.engines.errors import reason
from train.model import lora
from train.model.optimizer import adamw
from train.model.parts import layers
from train.model.trainee import DTYPES, Trainee, fill_buffers, freeze, make, pieces, save_memory, shape_of
from train.settings.batching import batch_sizes
from train.settings.config import Config

OURS: Mapping[str, str] = {
    "train_batch_size": "batch.size",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optim.clip",
    "optimizer": "optim",
    "scheduler": "schedule",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "data_types": "model.dtype",
    "communication_data_type": "model.dtype",
    "activation_checkpointing": "model.activation_checkpointing",
    "checkpoint": "save",
    "zero_optimization.stage": "parallel.zero_stage",
}
"""Setting of DeepSpeed that may not be in `parallel.deepspeed`: our setting that replaces it."""
UNIVERSAL = ".universal"
"""Name of the folder in `save.path` for the universal checkpoint, through which a checkpoint of another number of ranks
or ZeRO stage is read."""


class DeepSpeedEngine:
    """A model whose moments, gradients and weights are sharded over all ranks, as the ZeRO stage specifies."""

    kernels = "torch"

    def __init__(self, config: Config, model_config: Any, world: World, backend: str) -> None:
        self.world, self.settings = world, settings(config, world.ranks)
        packed = [name for name, value in self.settings["zero_optimization"].items() if value and "_quantized_" in name]
        if packed and world.device.type == "cpu":
            raise UnsupportedError(f"DeepSpeed has no {packed[0]} on CPUs", "remove it there; GPUs support it")
        deepspeed = _deepspeed(world)
        _require_known(self.settings)
        self.model = make(model_config, backend)
        self.adapters = config.lora is not None
        if config.lora is not None:
            lora.insert(self.model, config.lora, config.model.path)
        freeze(self.model, config.model.freeze)
        for tensor in self.model.parameters():  # buffers keep their dtype
            tensor.data = tensor.data.to(DTYPES[config.model.dtype])
        save_memory(layers(self.model), config.model, world.device)
        if config.parallel.zero_stage == 3:
            deepspeed.zero.Init(module=_Unmade(self.model, world.device), config_dict_or_path=self.settings)
        else:
            self.model.to_empty(device=world.device)
        self.model.tie_weights()
        fill_buffers(self.model, world.device)
        self.model.forward = Trainee(
            self.model, backend
        ).forward  # a wrapper module would put its name into the checkpoints' keys
        optimizer = adamw(self.model, config.optim, fused=world.device.type == "cuda")
        self.trainee: Any = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self.settings)[0]
        with torch.no_grad():
            begins = lora.begins(self.model, config.lora, config.model.path, config.seed)
            _fill(chain(pieces(self.model, config.model.path), begins))
        self._refresh()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """See `Engine`."""
        self.trainee.set_gradient_accumulation_boundary(last)
        self.trainee.backward(loss, scale_wrt_gas=False)

    def step(self, rate: float) -> float:
        """See `Engine`. DeepSpeed skips the step if the norm is NaN or infinite."""
        for group in self.trainee.optimizer.param_groups:
            group["lr"] = rate
        self.trainee.step()
        return float(self.trainee.get_global_grad_norm())

    def write(self, folder: Path) -> None:
        """See `Engine`. Blocks until everything is written."""
        tag = str(folder.parent), folder.name
        self.trainee.save_checkpoint(*tag, save_latest=False, exclude_frozen_parameters=self.adapters)
        self._write_adapters(folder)
        for path in folder.glob("*" if self.world.first else f"*zero_pp_rank_{self.world.rank}_*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _write_adapters(self, folder: Path) -> None:
        """Write the FP32 master weights of adapters in peft's format, which `export` reads."""
        from deepspeed.utils import safe_get_full_fp32_param
        from safetensors.torch import save_file

        whole = {name: safe_get_full_fp32_param(tensor) for name, tensor in lora.adapters(self.model).items()}
        if whole and self.world.first:
            lora.write_note(folder, self.model)
            save_file({name: tensor.cpu().contiguous() for name, tensor in whole.items()}, folder / lora.WEIGHTS,
                      {"format": "pt"})  # fmt: skip

    def read(self, folder: Path) -> None:
        """See `Engine`. Bit-exact; a checkpoint of another number of ranks or stage is read through a universal one."""
        lora.check_same(folder, self.model)
        universal = self.world.from_first(lambda: is_universal(folder))
        other = universal or self.world.from_first(lambda: self._other(folder))
        converted = other and not universal
        run = self.world.from_first(lambda: _universal(folder)) if converted else folder.parent
        optimizer = self.trainee.optimizer
        ours = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        self.trainee.load_universal_checkpoint = lambda: other  # DeepSpeed calls it only when it loads
        try:
            loaded, _ = self.trainee.load_checkpoint(str(run), folder.name, load_module_strict=not self.adapters)
        except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
            raise SourceError(f"DeepSpeed cannot read {folder}: {reason(error)}", f"convert verify {folder}") from error
        if loaded is None:
            raise SourceError(f"DeepSpeed finds nothing to load in {folder}")
        for group, values in zip(optimizer.param_groups, ours, strict=True):
            group.update(values)  # DeepSpeed loads betas, decay and clip from the checkpoint; ours apply
        for tensor, state in self.trainee.basic_optimizer.state.items():
            # stage 3 gives all groups one step tensor on the CPU; a fused AdamW needs its own on the GPU
            state["step"] = state["step"].to(tensor.device, copy=True)
        optimizer.clip_grad = self.settings["gradient_clipping"]
        self._refresh()
        self.world.wait()
        if converted and self.world.first:
            shutil.rmtree(run)

    def _refresh(self) -> None:
        """Refresh the secondary weight copies of ZeRO++'s hpZ, which still have the previous weights."""
        if self.settings["zero_optimization"].get("zero_hpz_partition_size", 1) > 1:
            import deepspeed

            for tensor in self.model.parameters():
                with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                    pass

    def _other(self, folder: Path) -> bool:
        """Whether a checkpoint has another number of ranks, ZeRO settings or compute dtype than this engine."""
        from formats.deepspeed import folders as deepspeed
        from formats.torch_files.archive import read_torch

        files = sorted(path for path in folder.iterdir() if deepspeed.is_model(path.name))
        if not files:
            raise SourceError(f"{folder} has no model states of DeepSpeed", f"ls {folder}")
        states = read_torch(files[0]).value
        same = all(states["ds_config"].get(name) == self.settings[name] for name in ("zero_optimization", "bf16"))
        return states["dp_world_size"] != self.world.ranks or not same


class _Unmade(nn.Module):
    """A model on the meta device whose modules get memory one at a time, while its parameters are iterated over."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.parts = tuple(model.modules())
        self.device = device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters. `zero.Init` partitions each one, and frees all but its shard, before it asks for the next."""
        for part in self.parts if recurse else ():
            part.to_empty(device=self.device, recurse=False)
            yield from part.parameters(recurse=False)


def settings(config: Config, ranks: int) -> dict[str, Any]:
    """The settings for DeepSpeed: those of `parallel.deepspeed`, and the ones that follow from our settings.

    Raises:
        UsageError: `parallel.deepspeed` sets something that has a setting of its own in this trainer.
    """
    given, sizes = config.parallel.deepspeed, batch_sizes(config.batch, ranks)
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UsageError(f"parallel.deepspeed.zero_optimization is {zero!r}", "it has to be a mapping of settings")
    twice = [name for name in [*given, *(f"zero_optimization.{key}" for key in zero)] if name in OURS]
    if twice:
        equivalents = f"which {'are' if len(twice) > 1 else 'is'} {', '.join(OURS[name] for name in twice)} here"
        raise UsageError(f"parallel.deepspeed sets {', '.join(twice)}, {equivalents}", "remove it there")
    return {
        "steps_per_print": None,
        "zero_force_ds_cpu_optimizer": False,  # offloaded states are stepped by torch's AdamW, which runs on CPU too
        **given,
        "zero_optimization": {**zero, "stage": config.parallel.zero_stage},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        "gradient_clipping": config.optim.clip,
        "bf16": {"enabled": config.model.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def _deepspeed(world: World) -> Any:
    """The DeepSpeed library, initialised on our process group.

    Raises:
        UnsupportedError: DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    if world.device.index is not None:  # DeepSpeed reads LOCAL_RANK; a Slurm task may see only its own GPU
        os.environ["LOCAL_RANK"] = str(world.device.index)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # DeepSpeed's calls warn at each step
    try:
        import deepspeed
    except ImportError as error:
        raise UnsupportedError(
            f"the engine deepspeed lacks a library: {error}", "pip install 'vitruvian[train]'"
        ) from None
    if world.device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # needs a C++ compiler, and only inference uses it
        )
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _require_known(given: Mapping[str, Any]) -> None:
    """Refuse ZeRO settings that DeepSpeed does not know, or ignores because they are outside `zero_optimization`.

    Raises:
        UsageError: there is such a setting.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    section = "parallel.deepspeed.zero_optimization"
    astray = sorted(given.keys() & {info.alias or name for name, info in DeepSpeedZeroConfig.model_fields.items()})
    if astray:
        raise UsageError(f"parallel.deepspeed sets {', '.join(astray)}", f"put it into {section}")
    try:
        DeepSpeedZeroConfig(**given["zero_optimization"])
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, (section, *fault["loc"])))
        raise UsageError(f"{place} is {fault['input']!r}: {fault['msg']}") from None


def _fill(pieces: Iterable[tuple[Any, Any]]) -> None:
    """Read this rank's weights in the compute dtype, and its FP32 master weights.

    Args:
        pieces: each tensor of the model, and the slice that it is read from.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    for tensor, piece in pieces:
        if hasattr(tensor, "ds_id"):
            part = _part(piece, shape_of(tensor), tensor.ds_tensor.numel(), tensor.ds_zero_partition_rank)
            part = part.to(tensor.ds_tensor.device)
            tensor.ds_tensor.copy_(part)
            if tensor.requires_grad:  # a frozen tensor has no master weight
                safe_set_local_fp32_param(tensor, part)
        else:
            whole = piece[...].to(tensor.device)
            tensor.copy_(whole)
            safe_set_full_fp32_param(tensor, whole)


def _part(piece: Any, shape: Sequence[int], count: int, rank: int) -> torch.Tensor:
    """A rank's elements of a flattened tensor; only the rows that contain them are read.

    Args:
        piece: a slice of safetensors, or a tensor.
        shape: shape of the whole tensor.
        count: number of elements of each rank; the last rank is padded.
        rank: number of the rank.

    Returns:
        The elements, [count].
    """
    width = prod(shape[1:])
    low, high = (min(at, prod(shape)) for at in (count * rank, count * (rank + 1)))
    first = low // width
    elements = piece[first : -(-high // width)].flatten()[low - first * width : high - first * width]
    return nn.functional.pad(elements, (0, count - len(elements)))


def _universal(folder: Path) -> Path:
    """Convert a checkpoint as `convert zero2universal` does. Returns the folder that contains the new checkpoint."""
    from converters.convert import run
    from converters.plan.request import Request
    from converters.plan.universal import open_states, plan_universal
    from formats.checkpoint import Settings

    request = Request(folder.parent / UNIVERSAL, quiet=True, force=True)
    run(plan_universal(open_states(folder, Settings()), request), request, lambda _, __: None)
    return request.out
