"""Checkpoints of a training: what its engine writes, in the background where it can, complete or absent.

    SAVE/latest                      name of the newest complete one
    SAVE/global_step1500/            fsdp: .metadata and *.distcp, model.*, optim.*; deepspeed: *_states.pt
        .progress                    steps done, and what the order of rows depends on
        adapter_config.json          if adapters are all that is trained and all that is in it: of which model they are
        config.json, tokenizer, …    whatever `convert fsdp2hf` or `zero2hf` needs, so that it asks for nothing

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

from converters.durable import sync_folder, write_file
from formats.errors import RefusedError, SourceError
from train.distributed import World
from train.engines import Engine

LATEST, NOTE, PREFIX = "latest", ".progress", "global_step"
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
        engine: whose checkpoints it has, see `engines.ENGINES`.
    """

    step: int
    offset: int
    size: int
    seed: int
    rows: str
    tokens: int
    engine: str = "fsdp"

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


class Saver:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self, save: Path, source: Path, keep: int | None, world: World) -> None:
        self.save, self.source, self.keep, self.world = save, source, keep, world
        self.running: tuple[Progress, Future[Any] | None] | None = None

    @property
    def ready(self) -> bool:
        """Whether this rank has written its part, or nothing is being written."""
        return self.running is None or self.running[1] is None or self.running[1].done()

    def start(self, engine: Engine, progress: Progress) -> None:
        """Begin to write what an engine holds; training may go on."""
        self.finish()
        staging = self.save / (progress.name + ".partial")
        if self.world.first:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.world.wait()
        self.running = progress, engine.write(staging)

    def finish(self) -> None:
        """Wait until all ranks have written, and give the folder its name. Every rank has to come here."""
        if self.running is None:
            return
        progress, held = self.running
        if held is not None:
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
        self._forget(place, progress)

    def _forget(self, latest: Path, progress: Progress) -> None:
        """Delete the oldest of this trainer's checkpoints that are too many: no link, nobody else's, not the start."""
        if self.keep is None:
            return
        ours = [path for path in self.save.glob(f"{PREFIX}*") if (path / NOTE).is_file() and not path.is_symlink()]
        ours.sort(key=lambda path: int(path.name.removeprefix(PREFIX)))
        for path in ours[: -self.keep]:
            if path not in (latest, self.save / f"{PREFIX}{progress.offset}"):
                shutil.rmtree(path)
