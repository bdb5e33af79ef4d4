"""Changes to the `args` of a classic Megatron run, by torch: as another program would have written them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def shards(run: Path) -> list[Path]:
    """The files of a run."""
    return sorted(run.glob("*/mp_rank_*/model_optim_rng.pt"))


def with_args(run: Path, out: Path, *without: str, **args: Any) -> Path:
    """A copy of a run whose args have other values, and lack some."""
    import torch

    shutil.copytree(run, out)
    for path in shards(out):
        record = torch.load(path, weights_only=False)
        vars(record["args"]).update(args)
        for name in without:
            vars(record["args"]).pop(name, None)
        torch.save(record, path)
    return out
