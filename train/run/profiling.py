"""Profiling of a few steps with torch's profiler, or with its FLOP counter."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from train.distributed import World
from train.run.log import Say
from train.settings.config import Config

FOLDER = "profiler"
"""Name of the folder in the save folder for traces, one file per rank; Perfetto shows them."""


class Profiler:
    """Profiles `profile.steps` steps of a job, after its first `profile.after` steps."""

    def __init__(self, config: Config, world: World, say: Say) -> None:
        self.settings, self.world, self.say, self.folder = config.profile, world, say, config.save.path / FOLDER
        self.stack, self.done, self.profiler = ExitStack(), 0, None

    def __enter__(self) -> Profiler:
        self._turn()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def step(self) -> None:
        """Count a step, and start or end the profile where it is due. Called after each step."""
        self.done += 1
        self._turn()

    def _turn(self) -> None:
        if self.settings.kind is None:
            return
        if self.done == self.settings.after:
            self.profiler = self.stack.enter_context(_opened(self.settings.kind))
        elif self.done == self.settings.after + self.settings.steps:
            self.stack.close()
            lines = self._counted() if self.settings.kind == "flops" else self._traced()
            if self.world.first:
                self.say(lines)

    def _counted(self) -> str:
        profiler: Any = self.profiler
        (total,) = self.world.sums(float(profiler.get_total_flops()))
        return f"flops      {total:.6g} in {self.settings.steps} steps of all ranks, as torch counts them"

    def _traced(self) -> str:
        profiler: Any = self.profiler
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{self.world.rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        sort = "self_cuda_time_total" if self.world.device.type == "cuda" else "self_cpu_time_total"
        return f"{profiler.key_averages().table(sort_by=sort, row_limit=10)}\nprofile    {path}"


def _opened(kind: str) -> Any:
    if kind == "flops":
        from torch.utils.flop_counter import FlopCounterMode

        return FlopCounterMode(display=False)
    return torch.profiler.profile(profile_memory=True)
