"""Checkpoints of a training: torch DCP, written in the background, complete or absent.

    SAVE/latest                      name of the newest complete one
    SAVE/global_step1500/            .metadata and *.distcp: model.*, optim.*
        progress                     steps done, and what the order of rows depends on
        config.json, tokenizer, …    whatever `convert fsdp2hf` needs, so that it asks for nothing

Weights are float32 and have their Hugging Face names. A folder gets its name when all ranks have written their part,
and `latest` is changed after that.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from converters.durable import sync_folder, write_file
from formats.errors import RefusedError, SourceError
from train.distributed import World
from train.model import weights

LATEST, NOTE, PREFIX = "latest", "progress", "global_step"
BESIDE = (".json", ".jinja", ".model", ".txt")
"""Small files of a model's folder that go into each checkpoint."""


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        step: steps that this run has done.
        offset: global step that it began at.
        size: rows of a step.
        seed: of the order of rows.
        rows: digest of the rows.
        tokens: labels trained so far.
    """

    step: int
    offset: int
    size: int
    seed: int
    rows: str
    tokens: int

    @property
    def name(self) -> str:
        """Name of its folder: the global step, as the users of GPT-NeoX count."""
        return f"{PREFIX}{self.offset + self.step}"


def newest(save: Path) -> Path | None:
    """The checkpoint of this trainer that `latest` names, None if there is none.

    Raises:
        SourceError: `latest` names one that is not there.
    """
    if not (save / LATEST).is_file():
        return None
    path = save / (save / LATEST).read_text().strip()
    if not path.is_dir():
        raise SourceError(f"{save / LATEST} names {path.name}, which is not there", f"ls {save}")
    return path if (path / NOTE).is_file() else None


def read_progress(path: Path) -> Progress:
    """How far a checkpoint is.

    Raises:
        SourceError: the note is damaged.
    """
    try:
        return Progress(**json.loads((path / NOTE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(f"{path / NOTE} does not tell how far the training was: {error}") from None


def check_same(held: Progress, now: Progress, path: Path) -> None:
    """Refuse to go on with anything that changes which rows come next.

    Raises:
        RefusedError: something changed.
    """
    names = {"offset": "steps.iteration_offset", "size": "batch.size", "seed": "seed", "rows": "the rows of data.train"}
    changed = [name for name in names if getattr(held, name) != getattr(now, name)]
    if changed:
        told = "; ".join(f"{names[name]}: {getattr(held, name)}, now {getattr(now, name)}" for name in changed)
        raise RefusedError(
            f"{path} is of another run ({told})",
            "a new run begins with init finetune, in another save.path or with another steps.iteration_offset",
        )


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved and loaded: weights and, of those that are trained, moments and steps."""
    held = weights(model)
    moments = {name: optimizer.state[tensor] for name, tensor in held.items() if tensor in optimizer.state}
    return {"model": held, "optim": moments}


def empty_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that it would make at its first step, so that a checkpoint can be loaded into it."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            step = torch.zeros((), dtype=torch.float32, device=tensor.device if group.get("fused") else "cpu")
            zeros = [torch.zeros_like(tensor) for _ in range(2)]
            optimizer.state[tensor] = {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer, world: World) -> Progress:
    """Load weights and moments, saved on any number of ranks."""
    empty_moments(optimizer)
    dcp_load(_tensors(model, optimizer), checkpoint_id=str(path), process_group=world.saving)
    return read_progress(path)


class Saver:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self, save: Path, source: Path, keep: int | None, world: World) -> None:
        self.save, self.source, self.keep, self.world = save, source, keep, world
        self.running: tuple[Progress, Future[Any]] | None = None

    @property
    def ready(self) -> bool:
        """Whether this rank has written its part, or nothing is being written."""
        return self.running is None or self.running[1].done()

    def start(self, model: Any, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Copy what is to be saved, and write it while training goes on."""
        self.finish()
        staging = self.save / (progress.name + ".partial")
        if self.world.first:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.world.wait()
        held: Any = async_save(_tensors(model, optimizer), checkpoint_id=str(staging), process_group=self.world.saving)
        self.running = progress, held

    def finish(self) -> None:
        """Wait until all ranks have written, and give the folder its name. Every rank has to come here."""
        if self.running is None:
            return
        progress, held = self.running
        held.result()
        self.running = None
        self.world.wait()
        if self.world.first:
            self._publish(progress)
        self.world.wait()

    def _publish(self, progress: Progress) -> None:
        staging, place = self.save / (progress.name + ".partial"), self.save / progress.name
        for path in sorted(self.source.iterdir()):
            if path.suffix in BESIDE and path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, staging / path.name)
        write_file(staging / NOTE, (json.dumps(asdict(progress), indent=1) + "\n").encode())
        sync_folder(staging)
        if place.exists():
            shutil.rmtree(place)
        staging.rename(place)
        write_file(self.save / LATEST, place.name.encode())
        sync_folder(self.save)
        self._forget(place)

    def _forget(self, latest: Path) -> None:
        """Delete the oldest of this trainer's checkpoints that are too many; never a link, never anybody else's."""
        if self.keep is None:
            return
        ours = [path for path in self.save.glob(f"{PREFIX}*") if (path / NOTE).is_file() and not path.is_symlink()]
        ours.sort(key=lambda path: int(path.name.removeprefix(PREFIX)))
        for path in ours[: -self.keep]:
            if path != latest:
                shutil.rmtree(path)
