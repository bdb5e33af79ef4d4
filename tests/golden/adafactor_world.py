"""Adafactor of torch and of transformers, under FSDP1, FSDP2 and tensor parallelism: what becomes of three steps.

    python adafactor_world.py MODEL_DIR OUT_DIR WORLD

A line of JSON for each: the name, the losses of the steps, and the error that ended it, or null. What torch's
`get_state_dict` gives of one without an error is saved to OUT_DIR/NAME.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fsdp_optim_world import train
from fsdp_world import fsdp1_model, fsdp2_model, launch, tp_model
from ranks import World
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers.optimization import Adafactor

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "torch": functools.partial(torch.optim.Adafactor, lr=0.01),
    "transformers": functools.partial(Adafactor, lr=0.01, relative_step=False),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}
MODELS: dict[str, Callable[[World], nn.Module]] = {"fsdp1": fsdp1_model, "fsdp2": fsdp2_model, "tp": tp_model}


def tried(world: World, out: Path, name: str) -> dict[str, Any]:
    """Three steps, and a checkpoint."""
    kind, sharded = name.split("-")
    model, losses = MODELS[sharded](world), list[float]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    try:
        losses += train(model, optimizer, range(3))
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    except (RuntimeError, AssertionError) as error:
        return {"name": name, "losses": losses, "error": str(error)}
    dcp.save(states, checkpoint_id=out / name)
    return {"name": name, "losses": losses, "error": None}


def every(world: World, out: Path) -> None:
    """Each optimizer on each kind of shards."""
    for name in (f"{kind}-{sharded}" for kind in OPTIMIZERS for sharded in MODELS):
        record = tried(world, out, name)
        if world.rank == 0:
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    hf, folder, size = sys.argv[1:]
    sys.exit(launch(int(size), Path(hf), functools.partial(every, out=Path(folder))))
