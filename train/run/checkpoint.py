"""Checkpoints of a training run. The engine writes them, in the background where it can; each is complete or absent.

    SAVE/latest                      name of the newest complete checkpoint
    SAVE/global_step1500/            fsdp: .metadata and *.distcp, model.*, optim.*; deepspeed: *_states.pt
        .progress                    steps done, and what the order of rows depends on
        .start                       digests of the weights that the run began with, see `identity.py`
        .files                       size and checksum of each file of this save: see `formats/torch_files/saves.py`
        adapter_config.json          with LoRA, where a checkpoint has adapters only: which base model they belong to
        config.json, tokenizer, …    whatever `convert fsdp2hf` or `zero2hf` needs, so that they need no flags

Weights are float32 under their Hugging Face names. A folder gets its final name when all ranks have written their part;
`latest` is changed after that.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from converters.common.atomic import sync_path, write_file
from converters.prove.archive_crc import archives, check
from formats.detect.rivals import shards, weights
from formats.errors import OutputError, RefusedError, SourceError, short, some
from formats.torch_files import saves
from train.distributed import World
from train.engines import ENGINES, Engine
from train.engines.errors import reason
from train.settings.config import Save
from train.start.run_folder import BEST, LATEST, NOTE, PREFIX, is_ours
from train.start.start_moments import MOMENTS

PARTIAL = ".partial"
THREADS = 2
"""Number of threads, each checking one file of a checkpoint, on a rank."""


@dataclass(frozen=True)
class Progress:
    """How far a training run has come.

    Attributes:
        step: number of steps that this run has done.
        offset: global step that the run began at.
        size: rows per step.
        seed: random seed of the order of rows.
        rows: digest of the rows.
        tokens: number of labels trained so far.
        samples: number of rows that the settings ask for, over all epochs; the step that reaches the end is short.
        engine: engine whose checkpoint format is written, see `engines.ENGINES`.
        sidecars: digest of the sidecars of the rows, see `Rows.sidecars`; empty in a save of an older version.
        sets: digest of the validation sets, see `evaluate.compared`; empty without any, and in such a save.
    """

    step: int
    offset: int
    size: int
    seed: int
    rows: str
    tokens: int
    samples: int
    engine: str = "fsdp"
    sidecars: str = ""
    sets: str = ""

    @property
    def name(self) -> str:
        """Name of the checkpoint folder: the global step, as GPT-NeoX counts."""
        return f"{PREFIX}{self.offset + self.step}"


def newest(save: Path) -> Path | None:
    """The checkpoint of this trainer that `latest` names, None if there is none.

    Raises:
        SourceError: `latest` names a checkpoint that is not there, or names none although there are some.
    """
    name = (save / LATEST).read_text().strip() if (save / LATEST).is_file() else ""
    path = save / name
    if name and not path.is_dir():
        raise SourceError(f"{save / LATEST} names {path.name}, which is not there", f"ls {save}")
    if name and is_ours(path):
        return path
    checkpoints = ours(save)
    if checkpoints:
        raise SourceError(
            f"{save} has checkpoints, the last is {checkpoints[-1].name}, and {LATEST} names {name or 'none'}, "
            "which is none of this trainer's",
            f"echo {checkpoints[-1].name} > {quote(str(save / LATEST))}",
        )
    return None


def best_of(save: Path) -> Path | None:
    """The checkpoint that the file `best` names, which may have been deleted; None if there is no such file."""
    name = (save / BEST).read_text().strip() if (save / BEST).is_file() else ""
    return save / name if name else None


def ours(save: Path) -> list[Path]:
    """The complete checkpoints of this trainer in a folder, without symbolic links, oldest first."""
    paths = [path for path in save.glob(f"{PREFIX}*") if is_ours(path) and not path.is_symlink()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix(PREFIX)))


def require_places(save: Path, progress: Progress, total: int) -> None:
    """Check that no later checkpoint would replace a folder of another run, or put two models into one folder.

    Raises:
        OutputError: a checkpoint would do so.
    """
    weights_path = weights(save) or shards(save)
    if weights_path is not None and not progress.step:  # a run that already has checkpoints there may finish
        raise OutputError(
            f"save.path {save} holds the weights of a model, {weights_path.name}: with checkpoints in it, one folder "
            "would be two models",
            f"--save.path {save}-run",
        )
    for path in save.glob(f"{PREFIX}*"):
        number = re.fullmatch(rf"{PREFIX}(\d+)", path.name)
        planned = number and progress.step < int(number[1]) - progress.offset <= total
        if planned and (path.is_symlink() or not is_ours(path) or read_progress(path).offset != progress.offset):
            raise OutputError(
                f"{path} is not a checkpoint of this run, and this run would replace it",
                "take another save.path, or the steps.iteration_offset of the checkpoint to start from",
            )


def read_progress(path: Path) -> Progress:
    """The progress that a checkpoint's `.progress` records.

    Raises:
        SourceError: the file is missing or damaged.
    """
    try:
        record = json.loads((path / NOTE).read_bytes())
    except OSError as error:
        raise SourceError(f"{path / NOTE}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _unclear(path, "it is no JSON") from None
    if not isinstance(record, dict):
        raise _unclear(path, "it is no object")
    for name, info in Progress.__dataclass_fields__.items():
        value, kind = record.get(name, info.default), str if info.type == "str" else int
        if value is MISSING:
            raise _unclear(path, f"{name} is missing")
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise _unclear(path, f"{name} is {short(value)}")
    strange = sorted(record.keys() - Progress.__dataclass_fields__.keys())
    if strange:
        raise _unclear(path, f"{strange[0]} is not known to this version")
    progress = Progress(**record)
    if progress.engine not in {kind for _, _, kind in ENGINES.values()}:
        raise _unclear(path, f"engine is {short(progress.engine)}")
    if progress.name != path.resolve().name:
        raise _unclear(path, f"step {progress.step} after {progress.offset} is not {path.name}")
    return progress


def _unclear(path: Path, why: str) -> SourceError:
    """The error for a `.progress` file that is damaged or does not fit its folder."""
    return SourceError(
        f"{path / NOTE} does not tell how far the training was: {why}",
        f"take an earlier checkpoint: echo global_stepN > {quote(str(path.parent / LATEST))}",
    )


def check_same(saved: Progress, now: Progress, path: Path) -> None:
    """Refuse to resume with settings that change which rows come next.

    Raises:
        RefusedError: a setting that determines the order of rows changed.
    """
    names = {"offset": "steps.iteration_offset", "size": "batch.size", "seed": "seed", "rows": "the rows of data.train"}
    if saved.sidecars:
        names["sidecars"] = "what the sidecars (PREFIX.json) and role files of data.train say of what is trained"
    if saved.step * saved.size > saved.samples:
        names["samples"] = "rows of steps.epochs, the last step of which was short"
    changed = [name for name in names if getattr(saved, name) != getattr(now, name)]
    if changed:
        changes = "; ".join(f"{names[name]}: {getattr(saved, name)}, now {getattr(now, name)}" for name in changed)
        raise RefusedError(
            f"{path} is of another run ({changes})",
            "a new run begins with init finetune, in another save.path or with another steps.iteration_offset",
        )


def unrecorded(path: Path) -> str:
    """A note on a save of an older version, which does not record the sidecars of its rows; empty for any other."""
    if read_progress(path).sidecars:
        return ""
    return f"{path} does not record the sidecars (PREFIX.json) of data.train: those that are there are taken on trust"


def require_sound(folder: Path, world: World) -> None:
    """Compare the files of a checkpoint with the CRC-32 inside them, and with its record `.files`. Collective.

    Each file is read by one rank.

    Raises:
        SourceError: a file is not what was written; rank 0 raises it, the others exit with its exit code.
    """
    record = world.from_first(lambda: saves.recorded(folder)) or {}
    paths_to_check = world.from_first(lambda: {*archives(folder), *saves.files_of(record, folder)})
    paths = sorted(paths_to_check, key=lambda path: (-path.stat().st_size, path))
    loads = [0] * world.ranks
    mine = list[Path]()
    for path in paths:
        rank = loads.index(min(loads))
        loads[rank] += path.stat().st_size
        mine += [path] if rank == world.rank else []
    mixed = list[str]()
    try:
        damaged = check(mine, THREADS, lambda _: None).damaged
        mixed = [] if damaged else saves.differing(record, mine)
    except (OSError, SourceError) as error:
        damaged = (reason(error),)
    results = world.gathered((damaged, mixed))
    world.from_first(lambda: refuse_damaged(folder, [part for parts, _ in results for part in parts]))
    world.from_first(lambda: saves.refuse_mixed(folder, sorted(name for _, names in results for name in names)))


def refuse_damaged(folder: Path, damaged: Sequence[str]) -> None:
    """Raise SourceError if parts of a checkpoint are damaged, and name another checkpoint to resume from."""
    if not damaged:
        return
    others = [path.name for path in ours(folder.parent) if path.name != folder.name]
    instead = f", or resume from another: echo {others[-1]} > {quote(str(folder.parent / LATEST))}" if others else ""
    raise SourceError(
        f"{folder} is damaged: {len(damaged)} parts are not what was written: {some(damaged, 3)}",
        f"copy it again{instead}",
    )


class Saver:
    """Writes checkpoints in the background, one at a time.

    Beside weights and moments each checkpoint has the small files of the start, as they were when the model was built.
    """

    def __init__(self, settings: Save, beside: Mapping[str, bytes], world: World) -> None:
        self.save, self.keep, self.minutes = settings.path, settings.keep, settings.every_minutes
        self.beside, self.world, self.last = beside, world, time.monotonic()
        self.running: tuple[Progress, Future[Any] | None] | None = None

    @property
    def ready(self) -> bool:
        """Whether this rank has written its part, or nothing is being written."""
        return self.running is None or self.running[1] is None or self.running[1].done()

    @property
    def due(self) -> bool:
        """Whether `save.every_minutes` have passed on this rank's clock."""
        return self.minutes is not None and time.monotonic() - self.last > 60 * self.minutes

    def start(self, engine: Engine, progress: Progress) -> None:
        """Start to write the engine's state; training may continue while it is written."""
        self.finish()
        self.last = time.monotonic()
        staging = self.save / (progress.name + PARTIAL)
        self.world.from_first(lambda: self._clear(staging))
        self.running = progress, engine.write(staging)

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint, then give the folder its final name. Collective."""
        if self.running is None:
            return
        progress, writing = self.running
        if writing is not None:
            try:
                writing.result()
            except (OSError, RuntimeError, CheckpointException) as error:
                raise OutputError(
                    f"{self.save / progress.name} could not be written: {reason(error)}", "is the disk full? df"
                ) from error
        self.running = None
        self.world.wait()
        record = self._record(self.save / (progress.name + PARTIAL))
        self.world.from_first(lambda: self._publish(progress, record))

    def _record(self, staging: Path) -> dict[str, saves.Entry]:
        """Size and checksum of the files of all ranks, for `.files`. Each file is read by one rank. Collective.

        Raises:
            OutputError: a file cannot be read; rank 0 raises it, the others exit with its exit code.
        """
        paths = self.world.from_first(lambda: sorted(path for path in staging.iterdir() if saves.is_bound(path)))
        entries, failure = dict[str, saves.Entry](), ""
        try:
            entries = saves.entries_of(paths[self.world.rank :: self.world.ranks])
        except (OSError, SourceError) as error:
            failure = reason(error)
        results = self.world.gathered((entries, failure))
        failures = [why for _, why in results if why]

        def refuse() -> None:
            if failures:
                raise OutputError(f"{staging} cannot be read: {some(failures, 1)}", "is the disk full? df")

        self.world.from_first(refuse)
        return {name: entry for rank_entries, _ in results for name, entry in rank_entries.items()}

    def _clear(self, staging: Path) -> None:
        """Make an empty staging folder, after deleting the partial folders that killed jobs have left."""
        for path in self.save.glob(f"{PREFIX}*{PARTIAL}"):
            shutil.rmtree(path)
        staging.mkdir(parents=True)

    def _publish(self, progress: Progress, record: dict[str, saves.Entry]) -> None:
        staging, place = self.save / (progress.name + PARTIAL), self.save / progress.name
        for name, content in self.beside.items():
            write_file(staging / name, content)
        write_file(staging / NOTE, (json.dumps(asdict(progress), indent=1) + "\n").encode())
        small = [path for path in (staging / name for name in (NOTE, *self.beside)) if saves.is_bound(path)]
        write_file(staging / saves.RECORD, saves.packed(record | saves.entries_of(small)))
        sync_path(staging)
        if place.exists():
            _delete(place)
        staging.rename(place)
        write_file(self.save / LATEST, place.name.encode())
        sync_path(self.save)
        shutil.rmtree(self.save / MOMENTS, ignore_errors=True)
        self._forget(place, progress)

    def _forget(self, latest: Path, progress: Progress) -> None:
        """Delete the oldest checkpoints beyond `save.keep`, but no link, not the best, and none of another run."""
        if self.keep is None:
            return
        checkpoints = [path for path in ours(self.save) if _offset(path) == progress.offset]
        best = best_of(self.save)
        for path in checkpoints[: -self.keep]:
            if path not in (latest, best):
                _delete(path)


def _offset(path: Path) -> int | None:
    """The global step where a checkpoint's run began; None if its `.progress` is damaged, so that it is not deleted."""
    try:
        return read_progress(path).offset
    except SourceError:
        return None


def _delete(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half deleted folder is never taken for a checkpoint."""
    gone = path.with_name(f"{path.name}.old{PARTIAL}")
    path.rename(gone)
    shutil.rmtree(gone)
