"""A run's folder: its settings, its checkpoints, and its logs.

    SAVE/config.yml            settings, see `write_config`
    SAVE/global_step1500/      checkpoints, see `checkpoint.py`
    SAVE/latest                name of the newest one
    SAVE/log.jsonl             a line for each step
    SAVE/evaluations.jsonl     a line for each evaluation

No torch is needed to read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from converters.common.atomic import write_file
from formats.detect.rivals import require_one
from formats.errors import SourceError, UsageError
from train.settings.config import Config, flat, load_config

CONFIG, LOG, EVALUATIONS = "config.yml", "log.jsonl", "evaluations.jsonl"
LATEST, NOTE, PREFIX = "latest", ".progress", "global_step"
"""Name of the newest checkpoint; in each checkpoint, how far it is; what names begin with."""
OF_A_JOB = (
    "save.path", "init", "export", "chat_template", "steps.exit_", "log.", "profile.", "parallel.timeout_minutes",
)  # fmt: skip
"""Settings, or what their names begin with, that say nothing about how a model is trained."""


def open_run(path: Path, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """The settings of a run.

    Args:
        path: a file of settings; or the folder of one, or of checkpoints, which may have been moved.
        overrides: as `load_config` takes them.

    Returns:
        What `load_config` does.

    Raises:
        SourceError: the folder has no settings.
        UsageError: a setting is wrong.
    """
    if not path.is_dir():
        return load_config(path, overrides)
    if not (path / CONFIG).is_file():
        raise SourceError(f"{path} has no {CONFIG}: it is no run's folder", "name the file that it was started with")
    moved = ["--save.path", str(path.absolute())] if (path / LOG).is_file() else []
    return load_config(path / CONFIG, [*moved, *overrides])


def started(path: Path) -> Path:
    """The checkpoint that `latest` in the folder of a run of this trainer names; the path itself if it is none.

    Raises:
        RefusedError: the folder holds a model of Hugging Face too.
    """
    require_one(path, is_ours)
    name = (path / LATEST).read_text().strip() if (path / LATEST).is_file() else ""
    return path / name if name and is_ours(path / name) else path


def is_ours(path: Path) -> bool:
    """Whether a folder is a complete checkpoint of this trainer."""
    return re.fullmatch(rf"{PREFIX}\d+", path.name) is not None and (path / NOTE).is_file()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, none where there is no log. The last one may be half written: the training may be running.

    Raises:
        SourceError: another line is damaged.
    """
    if not path.is_file():
        return []
    found = []
    *lines, rest = path.read_text().split("\n")
    del rest  # empty, or a line without its end
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["global_step"] += 0
        except (ValueError, TypeError, KeyError):
            raise SourceError(f"line {number} of {path} is no record of a step") from None
        found.append(record)
    return found


def write_config(config: Config, folder: Path) -> None:
    """Write down what a run is trained with, `FOLDER/config.yml`; paths no longer depend on where one stands."""
    tree = config.model_dump(mode="python", exclude_none=True)
    write_file(folder / CONFIG, yaml.safe_dump(_plain(tree), sort_keys=False, allow_unicode=True).encode())


def changes(config: Config, done: bool) -> str:
    """Which settings of a run are not those that its last job wrote down, in a line; empty if none are.

    Args:
        config: the settings now.
        done: the run is at its end, so that they change nothing.
    """
    path = config.save.path / CONFIG
    try:
        before = load_config(path)[0] if path.is_file() else config
    except UsageError:  # another version wrote it
        return ""
    then, now = ({name: _plain(value) for name, value in flat(one).items()} for one in (before, config))
    names = [name for name in {**then, **now} if not name.startswith(OF_A_JOB) and then.get(name) != now.get(name)]
    told = "; ".join(f"{name}: {then.get(name)}, now {now.get(name)}" for name in names)
    if not told:
        return ""
    return f"settings that the run was not trained with have no effect: {told}" if done else f"changed settings: {told}"


def _plain(value: Any) -> Any:
    """A value as YAML knows it."""
    match value:
        case Path():
            return str(value.absolute())
        case dict():
            return {name: _plain(held) for name, held in value.items()}
        case list() | tuple():
            return [_plain(held) for held in value]
        case _:
            return value


RECORD = ".start"
