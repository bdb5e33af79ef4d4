"""What the scripts beside it share: ranks that are forked once everything is imported, none of which waits for long."""

from __future__ import annotations

import copy
import faulthandler
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

TIMEOUT = timedelta(seconds=60)
LIMIT = 240.0


class World(NamedTuple):
    """What a rank knows: the weights to begin with, and its place."""

    model: nn.Module
    rank: int
    size: int

    def copy(self) -> nn.Module:
        """A model of one's own, tied where the original is tied."""
        return copy.deepcopy(self.model)


class Both(tuple[torch.optim.Optimizer, ...]):
    """Several optimizers of one model, which torch's state_dict functions take as they are."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all of them."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def step(self) -> None:
        """The step of each."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        """No gradients."""
        for optimizer in self:
            optimizer.zero_grad()


def quiet() -> None:
    """No warnings, no progress bars, no log lines below errors."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_model(model_dir: str | Path) -> nn.Module:
    """The model of a Hugging Face folder, in this process, before it forks."""
    torch.set_num_threads(1)
    quiet()
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")


def launch(size: int, rank_main: Callable[..., None], *about: Any) -> int:
    """Fork the ranks, each `rank_main(rank, size, store, *about)`; one that fails ends its sisters."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(rank_main, (size, f"{folder}/store", *about), size, start_method="fork")
        except ProcessExitedException as error:  # it has said why; an exception of a rank is raised here as it is
            print(error, file=sys.stderr)
            return 1
    return 0


def join(rank: int, size: int, store: str) -> None:
    """Meet the other ranks. Nothing waits longer than a minute, and the whole not longer than LIMIT."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.fsync = lambda fd: None  # torch syncs every file; a test's need not outlive a power cut
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", f"file://{store}", timeout=TIMEOUT, world_size=size, rank=rank)


def fork(size: int, rank_main: Callable[[int], int]) -> int:
    """Fork the ranks; 1 when one of them fails. In a rank it gives what that says."""
    children = []
    for rank in range(size):
        children.append(os.fork())
        if not children[-1]:
            return rank_main(rank)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return int(any(codes))


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """One line per tensor that is missing, unexpected or not the same bit for bit."""
    lines = [f"{name} is missing" for name in theirs.keys() - ours.keys()]
    lines += [f"{name} is unexpected" for name in ours.keys() - theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].detach().contiguous(), theirs[name].detach().contiguous()
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{name} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
            lines.append(f"{name} differs in {int((a != b).sum())} of {a.numel()} elements")
    return sorted(lines)
