"""Determines which checkpoints of a training are complete, by the file that its trainer writes last.

A trainer makes the folder first, then the files of all ranks, and then one small file: in the folder, or beside all
folders, where the file names the newest checkpoint. A checkpoint is complete when that file shows it; completeness is
never guessed from sizes.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from formats.deepspeed.folders import LATEST
from formats.fsdp.checkpoint import INSIDE
from formats.megatron.folders import TRACKER


class Sign(NamedTuple):
    """The file that a trainer writes last.

    Attributes:
        folder: matches the names of the trainer's checkpoints; the first group is the step.
        tracker: file of the run with the step or the name of the newest complete checkpoint; checkpoints before that
            are complete. Empty where the sign is in each checkpoint.
        within: files in a checkpoint, any of which is its sign.
    """

    folder: re.Pattern[str]
    tracker: str = ""
    within: tuple[str, ...] = ()


WEIGHTS = (".safetensors", ".bin", ".distcp")
"""Suffixes of files that no trainer writes after its sign."""
SKEW = 10.0
"""Number of seconds by which the clocks of nodes may differ."""
GLOBAL_STEP = re.compile(r"global_step(\d+)")
SIGNS = (
    # megatron/training/checkpointing.py `save_checkpoint` (0.16.1): after a barrier, or when an asynchronous save is
    # finalized; torch_dist, fsdp_dtensor and Megatron-Bridge too
    Sign(re.compile(r"iter_(\d+)"), tracker=TRACKER),
    # deepspeed/runtime/engine.py `save_checkpoint` (0.19.8): `latest` after the commit; GPT-NeoX, Megatron-DeepSpeed
    Sign(GLOBAL_STEP, tracker=LATEST),
    # `train run`: train/run/checkpoint.py
    Sign(GLOBAL_STEP, within=(".progress",)),
    # transformers/trainer.py `_save_checkpoint` (5.23.0): after model, optimizer and random states; axolotl, TRL
    Sign(re.compile(r"checkpoint-(\d+)"), within=("trainer_state.json",)),
    # nanotron, trainer.py `save_checkpoint` (2411b022): by each rank, after a barrier and after latest.txt
    Sign(re.compile(r"(\d+)"), within=("model_config.json",)),
    # MaxText, orbax-checkpoint atomicity.py (0.12.8): the folder is renamed into its place when all of it is written
    Sign(re.compile(r"(\d+)"), within=("_CHECKPOINT_METADATA",)),
    # verl/trainer/ppo/ray_trainer.py `_save_checkpoint` (0.4 to 0.6)
    Sign(re.compile(r"global_step_(\d+)"), tracker=TRACKER),
    # torch/distributed/checkpoint/filesystem.py `finish` (2.13.0): renamed into its place when all ranks have written;
    # torchtitan, accelerate, OLMo-core; not checkpoint-N, whose model the Trainer may write twice
    Sign(
        re.compile(r"(?:(?:step|epoch)[-_]?|checkpoint_)(\d+)"),
        within=tuple(f"{inside}/.metadata".lstrip("/") for inside in INSIDE),
    ),
)
"""The signs of trainers. A folder is a complete checkpoint if one of the signs shows it."""


class Saved(NamedTuple):
    """A complete checkpoint of a run."""

    step: int
    folder: Path


def folders(run: Path) -> list[str]:
    """The folders of a run that are named as checkpoints, complete or not."""
    names = sorted(entry.name for entry in os.scandir(run) if entry.is_dir(follow_symlinks=False))
    return [name for name in names if any(sign.folder.fullmatch(name) for sign in SIGNS)]


def complete(run: Path) -> list[Saved]:
    """The complete checkpoints of a run, oldest first. Symbolic links belong to others, and are left out.

    Raises:
        OSError: the run cannot be read.
    """
    saves = set()
    for sign in SIGNS:
        newest = _tracked(run, sign)
        for name in folders(run):
            named = sign.folder.fullmatch(name)
            if named and (int(named[1]) <= newest or any(_is_signed(run / name, last) for last in sign.within)):
                saves.add(Saved(int(named[1]), run / name))
    return sorted(saves)


def _is_signed(folder: Path, last: str) -> bool:
    """Whether a checkpoint has its sign, and no weights that a save which started again wrote after the sign."""
    return (folder / last).is_file() and after_sign(folder, last) is None


def after_sign(folder: Path, last: str) -> Path | None:
    """A file of weights that is newer than the sign of its checkpoint, None if there is none."""
    signed = _written(folder / last) + SKEW
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(WEIGHTS))
    return next((path for path in files if _written(path) > signed), None)


def _written(path: Path) -> float:
    """Time when a file was written, in seconds; 0 if the file no longer exists."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def overwritten(run: Path) -> dict[str, str]:
    """The names of checkpoints with a sign that is older than their weights, and a message about each."""
    reasons = {}
    for name in folders(run):
        signs = [last for sign in SIGNS if sign.folder.fullmatch(name) for last in sign.within]
        for last in (last for last in signs if (run / name / last).is_file()):
            if newer := after_sign(run / name, last):
                reasons[name] = (
                    f"{newer.relative_to(run)} was written after {last}: a save that is not complete, or a copy "
                    f"without the times of its files; if it is complete, touch {run / name / last}"
                )
    return reasons


def _tracked(run: Path, sign: Sign) -> int:
    """The step of the newest complete checkpoint that a tracker names; -1 if it names none, or there is no tracker."""
    try:
        word = (run / sign.tracker).read_bytes()[:1000].decode(errors="replace").strip() if sign.tracker else ""
    except FileNotFoundError:
        return -1
    named = sign.folder.fullmatch(word) or re.fullmatch(r"(\d{1,18})", word)
    return int(named[1]) if named else -1


def mark(folder: Path) -> str:
    """A digest that changes when a checkpoint is saved again: of sizes and times of its files; empty without files."""
    lines = []
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                stat = Path(place, name).stat()
            except FileNotFoundError:
                continue
            lines.append(f"{Path(place, name).relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}")
    return blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest() if lines else ""
