"""Real trainings with FSDP1, FSDP2 and tensor parallelism: what they leave after three steps, and how they go on.

    python fsdp_optim_world.py JOBS.json

Each job has a folder `hf`, a number of `ranks`, and either `saves`, {folder: key of FORMS}, or `loads`, a folder. The
first trains three steps, saves, and trains three more: their losses and what Adam keeps of each parameter go to
`losses.json` and `states.safetensors` in `out`. The second loads into a model and an optimizer that know nothing, and
has to find the same states, bit for bit, and the same losses.

Every rank computes the whole batch, so that a training is the same on any number of them.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from fsdp_world import (
    AppState,
    accelerator,
    dump_verl,
    fsdp1_model,
    fsdp2_model,
    launch,
    mesh,
    plugin,
    tp_model,
    whole,
)
from lion import Lion
from ranks import Both, World, differences
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

NEAR = 1e-6
MUON_NEAR = 1e-4
"""torch's Muon multiplies in bfloat16: on another number of ranks the sums are others."""
MODELS: dict[str, Callable[[World], nn.Module]] = {
    "fsdp2": fsdp2_model,
    "tp": tp_model,
    "fsdp1": fsdp1_model,
    "fsdp1-mesh": lambda world: fsdp1_model(world, device_mesh=mesh(fsdp=world.size)),
    "muon": fsdp2_model,
    "lion": fsdp2_model,
    "verl": fsdp2_model,
}


def begun(world: World, name: str) -> tuple[nn.Module, Any]:
    """A model, and AdamW or Lion with two groups; or Muon for the matrices of its layers, and AdamW for all else.

    verl's AdamW has one.
    """
    model = MODELS[name](world)
    if name == "verl":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    if name == "muon":
        matrices = {key: param for key, param in model.named_parameters() if param.ndim == 2 and ".layers." in key}
        rest = [param for key, param in model.named_parameters() if key not in matrices]
        muon = torch.optim.Muon(matrices.values(), lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        return model, Both((muon, torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), eps=1e-7)))
    parts = [[param for key, param in model.named_parameters() if ("norm" in key) == norm] for norm in (False, True)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
    if name == "lion":
        return model, Lion(groups, lr=0.002, betas=(0.9, 0.95))
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-7)


def train(model: nn.Module, optimizer: Any, numbers: range) -> Iterator[float]:
    """The loss of each step."""
    for number in numbers:
        ids = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of each parameter, whole; of FSDP1's own tensors on the first rank alone."""
    states = get_optimizer_state_dict(model, optimizer)["state"]
    return {f"{key} {name}": gathered(tensor) for key, about in states.items() for name, tensor in about.items()}


def gathered(value: Any) -> torch.Tensor:
    """A copy of a whole tensor. FSDP1's full_optim_state_dict is no help: on a CPU it mixes the two moments up."""
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size(), dtype=value.dtype)
        value.gather(0, None if dist.get_rank() else out)
        return out
    return whole(value).detach().clone().contiguous()


# --- forms -----------------------------------------------------------------------------------------------------------


def plain(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """torch's get_state_dict."""
    state_dicts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optim"), state_dicts, strict=True)), checkpoint_id=folder)


def app(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Both in an AppState, as in torch's tutorial."""
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)


def flattened(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As torchtitan has it, beside a model without a container."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer_state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    train_state = {"train_state": {"step": torch.tensor(3), "state": {"loss": torch.tensor([2.0])}}}
    dcp.save(get_model_state_dict(model) | optimizer_state | train_state, checkpoint_id=folder)


def accelerated(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: Any) -> None:
    """accelerate's own functions."""
    version = 1 if isinstance(model, FullyShardedDataParallel) else 2
    us = accelerator(world, is_fsdp2=version == 2)
    settings = plugin(options.pop("kind", "SHARDED_STATE_DICT"), version)
    if version == 1:  # on a CPU, what it offloads crashes
        settings.state_dict_config.offload_to_cpu = settings.optim_state_dict_config.offload_to_cpu = False
    save_fsdp_model(settings, us, model, str(folder), **options)
    save_fsdp_optimizer(settings, us, optimizer, model, str(folder), **options)


def dumped(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As verl's FSDPCheckpointManager has it."""
    folder.mkdir(parents=True, exist_ok=True)
    dump_verl(world, folder, 2, model=model.state_dict(), optim=optimizer.state_dict())


FORMS: dict[str, Callable[..., None]] = {
    "plain": plain,
    "app": app,
    "flattened": flattened,
    "accelerate": accelerated,
    "accelerate-full": functools.partial(accelerated, kind="FULL_STATE_DICT"),
    "accelerate-dumps": functools.partial(accelerated, use_dcp=False),
    "verl": dumped,
}


# --- jobs ------------------------------------------------------------------------------------------------------------


def begin(world: World, job: dict[str, Any]) -> None:
    """Train, save, and go on."""
    model, optimizer = begun(world, job["model"])
    list(train(model, optimizer, range(3)))
    for folder, form in job["saves"].items():
        FORMS[form](world, model, optimizer, Path(folder))
        dist.barrier()
    states = kept(model, optimizer)
    losses = list(train(model, optimizer, range(3, 6)))
    if world.rank == 0:
        save_file(states, Path(job["out"]) / "states.safetensors")
        (Path(job["out"]) / "losses.json").write_text(json.dumps(losses))
        (Path(job["out"]) / "groups.json").write_text(groups_of(optimizer))


def groups_of(optimizer: Any) -> str:
    """What the parameter groups say."""
    about = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return json.dumps(about, sort_keys=True)


def go_on(world: World, job: dict[str, Any]) -> None:
    """Load and train; all ranks end with status 1 when anything differs."""
    model, optimizer = begun(world, job["model"])
    checkpoint = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    states = (tensor for about in checkpoint["optim"]["state"].values() for tensor in about.values())
    for tensor in (*checkpoint["model"].values(), *states):
        tensor.detach().fill_(float("nan"))
    for group in (*checkpoint["optim"]["param_groups"], *optimizer.param_groups):
        group["lr"] = group["weight_decay"] = 0.5
    dcp.load(checkpoint, checkpoint_id=job["loads"])
    set_state_dict(model, optimizer, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optim"])
    lines = differences(kept(model, optimizer), load_file(Path(job["out"]) / "states.safetensors"))
    groups = groups_of(optimizer)
    lines += [] if groups == (Path(job["out"]) / "groups.json").read_text() else [f"groups {groups}"]
    expected = json.loads((Path(job["out"]) / "losses.json").read_text())
    losses = list(train(model, optimizer, range(3, 6)))
    far = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
    near = MUON_NEAR if job["model"] == "muon" and world.size != job["begun"] else NEAR
    lines += [] if far <= near else [f"losses {losses}, expected {expected}"]
    if world.rank == 0:
        print(*lines or [f"goes on, largest relative loss difference {far:g}"], sep="\n", flush=True)
    dist.barrier()
    if lines:
        sys.exit(1)


def main() -> None:
    """Do every job, and count those that failed."""
    failed = 0
    for job in json.loads(Path(sys.argv[1]).read_text()):
        done = functools.partial(begin if "saves" in job else go_on, job=job)
        failed += launch(job["ranks"], Path(job["hf"]), done)
    sys.exit(failed)


if __name__ == "__main__":
    main()
