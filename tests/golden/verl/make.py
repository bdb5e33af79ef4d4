"""Real verl saves a training: `python make.py MODEL_DIR OUT_DIR {fsdp1|fsdp2} RANKS`.

tests/golden and verl have to be on the path. verl's own functions shard the model, and its FSDPCheckpointManager writes
OUT_DIR/checkpoint after three steps of AdamW; states.safetensors, losses.json and groups.json are those of `begin` in
fsdp_optim_world.py. What verl imports and none of this needs (ray, tensordict, …) is replaced by stand-ins.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from fsdp_optim_world import groups_of, kept, train
from fsdp_world import launch, mesh
from ranks import World
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel

ABSENT = ("codetiming", "hydra", "omegaconf", "pylatexenc", "ray", "tensordict", "torchdata", "wandb")


class StandIn:
    """A class or function of a package that is not there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class Module(types.ModuleType):
    """A package that is not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return "9.9.9" if name == "__version__" else type(name, (StandIn,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """What finds the packages that are not there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """A stand-in, if it is one of them."""
        absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> Any:
        """An empty package."""
        return Module(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing."""
        module.__path__ = []


sys.meta_path.append(Finder())
from verl.utils import fsdp_utils
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

fsdp_utils.get_device_id = lambda: "cpu"


def fsdp1(model: Any, ranks: int) -> Any:
    """As verl's engine has it by default."""
    options = {"use_orig_params": False, "device_mesh": mesh(fsdp=ranks), "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=fsdp_utils.get_fsdp_wrap_policy(model), **options)


def fsdp2(model: Any, ranks: int) -> Any:
    """The same with `strategy: fsdp2`."""
    state, over = model.state_dict(), mesh(fsdp=ranks)
    fsdp_utils.apply_fsdp2(model, {"mesh": over}, {})
    fsdp_utils.fsdp2_load_full_state_dict(model, state, over)
    return model


def make(world: World, out: Path, kind: str) -> None:
    """Train, save, and go on."""
    model = {"fsdp1": fsdp1, "fsdp2": fsdp2}[kind](world.copy(), world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    list(train(model, optimizer, range(3)))
    groups = groups_of(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    FSDPCheckpointManager(model, optimizer, scheduler).save_checkpoint(str(out / "checkpoint"), global_step=3)
    states = kept(model, optimizer)
    losses = list(train(model, optimizer, range(3, 6)))
    if world.rank == 0:
        save_file(states, out / "states.safetensors")
        (out / "losses.json").write_text(json.dumps(losses))
        (out / "groups.json").write_text(groups)


if __name__ == "__main__":
    hf, folder, how, size = sys.argv[1:]
    sys.exit(launch(int(size), Path(hf), functools.partial(make, out=Path(folder), kind=how)))
