"""The folders in which Megatron saves: that of a run, and in it one for each saved iteration."""

from __future__ import annotations

import re
from pathlib import Path

from formats.errors import SourceError, short

TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS, CONTEXT = "weights", "context"
"""In a checkpoint of NeMo 2: the folder of the weights (Megatron-LM's iteration folder), and that of the settings."""


def locate(path: Path) -> tuple[Path, Path]:
    """The run folder and the folder of one iteration, given either of the two.

    Raises:
        SourceError: the tracker names no iteration, or an iteration that does not exist.
    """
    nemo = path.parent if path.name == WEIGHTS else path
    if (nemo / WEIGHTS).is_dir() and (nemo / CONTEXT).is_dir():
        run, iteration = nemo, nemo / WEIGHTS
    elif any(path.glob("mp_rank_*")) or not (path / TRACKER).is_file():
        run, iteration = (path.parent if (path.parent / TRACKER).is_file() else path), path
    else:
        with (path / TRACKER).open("rb") as file:
            word = file.read(100).decode(errors="replace").strip()
        if word != "release" and not re.fullmatch(r"[0-9]{1,18}", word):
            raise SourceError(f"{path / TRACKER} says {short(word)}, which is neither an iteration nor `release`")
        run, iteration = path, path / name_of(None if word == "release" else int(word))
        if not iteration.is_dir():
            raise SourceError(
                f"{path / TRACKER} names {iteration.name}, which does not exist",
                f"present: {', '.join(sorted(p.name for p in path.iterdir() if p.is_dir())) or 'nothing'}",
            )
    return run, iteration


def name_of(iteration: int | None) -> str:
    """The name of the folder of an iteration; None for a release."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def iteration_named(folder: Path) -> int | None:
    """The iteration that the name of a folder says; None for a release, and for a folder of another name."""
    named = re.fullmatch(r"iter_([0-9]{1,18})", folder.name)
    return int(named[1]) if named else None


def parts(path: Path) -> list[Path]:
    """The folder of the iteration that is read (`Format.folders`); `path` where the tracker names none that exists."""
    try:
        return [locate(path)[1]]
    except SourceError:
        return [path]
