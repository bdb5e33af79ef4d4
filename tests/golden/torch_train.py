"""Judge: does a training go on in FSDP2 or DeepSpeed where Megatron's stopped, and the other way round?

Two ranks on gloo hold the Hugging Face model, cut by `fully_shard` or by ZeRO, and AdamW with the groups, the rates,
the batches and the clipping of megatron_train.py: what remains between them is the order of some sums.

    python torch_train.py JOBS.json

JOBS.json is a list of trainings, done one after another in one start:

    {"hf": FOLDER, "resume": DCP_FOLDER, "step": 3, "losses": FILE, "save": DCP_FOLDER}
    {"hf": FOLDER, "resume": UNIVERSAL_FOLDER, "step": 3, "losses": FILE, "save": RUN, "stage": 2}

With "muon": true the matrices of the layers are trained with torch's Muon, as it comes but for `match_rms_adamw`;
"least" is the smallest rate, and "near" a larger TOLERANCE.
Each loads a checkpoint as `dcp.load` and `set_state_dict` do, or as DeepSpeed does with `load_universal`, saves it at
once, and trains on with the losses of FILE.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from ranks import Both, fork
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

RANKS, BATCH, STEPS, RATE = 2, 4, 3, 0.01
TOLERANCE = 1e-5
"""Largest relative difference of a loss: two frameworks compute it, in float32."""


def blank(folder: str) -> Any:
    """A model with weights of its own."""
    torch.manual_seed(dist.get_rank() + 17)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def adam(model: Any, *, muon: bool = False) -> Any:
    """An optimizer that never made a step, or with Muon two."""
    vectors = {name for name, param in model.named_parameters() if param.ndim == 1 or name.endswith(".bias")}
    inner = {name for name, param in model.named_parameters() if muon and param.ndim == 2 and ".layers." in name}
    named = [(name in vectors, param) for name, param in model.named_parameters() if name not in inner]
    groups: list[dict[str, Any]] = [{"params": [param for vector, param in named if not vector]}]
    groups.append({"params": [param for vector, param in named if vector], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.1)
    if not muon:
        return optimizer
    matrices = [param for name, param in model.named_parameters() if name in inner]
    return Both(
        (torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"), optimizer)
    )


def fsdp(job: dict[str, Any]) -> tuple[Any, Any, Callable[[torch.Tensor], None]]:
    """Model, optimizer and the end of a step of FSDP2, loaded and saved."""
    model, mesh = blank(job["hf"]), init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adam(model, muon=job.get("muon", False))
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states}
    dcp.load(state, checkpoint_id=job["resume"])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=job["save"])

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, optimizer, update


def zero(job: dict[str, Any]) -> tuple[Any, Any, Callable[[torch.Tensor], None]]:
    """The same of DeepSpeed."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # C++ to compile, for inference alone
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = blank(job["hf"])
    config = {
        "train_micro_batch_size_per_gpu": BATCH // RANKS, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": job["stage"]}, "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=adam(model), config=config)[0]
    path, _ = engine.load_checkpoint(job["resume"])
    assert path, "DeepSpeed found nothing to load"
    engine.save_checkpoint(job["save"])
    for state in engine.optimizer.optimizer.state.values():
        # stage 3 lets all groups share one, which each counts up (stage3.py:3681)
        state["step"] = state["step"].clone()

    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, engine.optimizer, update


def schedule(optimizer: Any, step: int, least: float) -> OptimizerParamScheduler:
    """The rates of megatron_train.py, from a step on, and down to the least."""
    for group in optimizer.param_groups:
        group["wd_mult"] = 1.0 if group["weight_decay"] else 0.0  # for Megatron's schedule
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=RATE, min_lr=least, lr_warmup_steps=2, lr_decay_steps=20,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip
    scheduler.step(increment=step)
    return scheduler


def loss_of(model: Any, vocabulary: int, number: int) -> torch.Tensor:
    """The loss on the batch of an iteration, of which each rank takes its share."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, vocabulary, (BATCH, 17), generator=generator)
    ids = ids[dist.get_rank() * BATCH // RANKS : (dist.get_rank() + 1) * BATCH // RANKS]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def do(job: dict[str, Any]) -> bool:
    """One training; whether its losses are those that were wanted."""
    model, optimizer, update = (zero if "stage" in job else fsdp)(job)
    rates = schedule(optimizer, job["step"], job.get("least", RATE / 10))
    vocabulary = AutoConfig.from_pretrained(job["hf"]).vocab_size
    losses = []
    for number in range(job["step"], job["step"] + STEPS):
        loss = loss_of(model, vocabulary, number)
        update(loss)
        rates.step(increment=1)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / RANKS)
    expected = json.loads(Path(job["losses"]).read_text())
    apart = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
    if dist.get_rank() == 0:
        print(job["resume"], *(f"{loss:.7f}" for loss in losses), flush=True)
        print(f"largest relative loss difference {apart:.3g}", flush=True)
    return apart < job.get("near", TOLERANCE)


def train_all(jobs: Path, rank: int) -> int:
    """All trainings, on one rank."""
    faulthandler.dump_traceback_later(200.0, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", f"file://{jobs}.meeting", timedelta(seconds=60), world_size=RANKS, rank=rank)
    right = [do(job) for job in json.loads(jobs.read_text())]
    dist.destroy_process_group()
    return 0 if all(right) else 1


def main() -> int:
    """Fork the ranks. Exit status 0 when all losses are right, 1 when not."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    return fork(RANKS, partial(train_all, Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
