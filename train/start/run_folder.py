"""A run folder: its settings, its checkpoints, and its logs.

    SAVE/config.yml            settings, see `write_config`
    SAVE/global_step1500/      checkpoints, see `checkpoint.py`
    SAVE/latest                name of the newest checkpoint
    SAVE/log.jsonl             a line for each step
    SAVE/best                  name of the best checkpoint, with evaluate.best
    SAVE/evaluations.jsonl     a line for each evaluation
    SAVE/generations.jsonl     a line for each answer to evaluate.prompts

These files are read without torch.
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
from train.settings.config import Config, flat
from train.settings.config_file import load_config

CONFIG, LOG, EVALUATIONS, GENERATIONS = "config.yml", "log.jsonl", "evaluations.jsonl", "generations.jsonl"
LATEST, BEST, NOTE, PREFIX = "latest", "best", ".progress", "global_step"
"""Files that name the newest and the best checkpoint; progress file in a checkpoint; prefix of checkpoint names."""
OF_A_JOB = (
    "save.path", "init", "export", "chat_template", "steps.exit_", "log.", "profile.", "parallel.timeout_minutes",
)  # fmt: skip
"""Settings, or prefixes of their names, that do not affect how the model is trained."""


def open_run(path: Path, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """The settings of a run.

    Args:
        path: a file of settings, or a run folder with such a file; a run folder may have been moved.
        overrides: options that override settings, as for `load_config`.

    Returns:
        What `load_config` returns.

    Raises:
        SourceError: the folder has no settings.
        UsageError: a setting is wrong.
    """
    if not path.is_dir():
        return load_config(path, overrides)
    if not (path / CONFIG).is_file():
        raise SourceError(f"{path} has no {CONFIG}: it is not a run folder", "name the file that it was started with")
    moved = ["--save.path", str(path.absolute())] if (path / LOG).is_file() else []
    return load_config(path / CONFIG, [*moved, *overrides])


def started(path: Path) -> Path:
    """The checkpoint that `latest` names in a run folder of this trainer; the path itself for any other folder.

    Raises:
        RefusedError: the folder also has a Hugging Face model.
    """
    require_one(path, is_ours)
    name = (path / LATEST).read_text().strip() if (path / LATEST).is_file() else ""
    return path / name if name and is_ours(path / name) else path


def is_ours(path: Path) -> bool:
    """Whether a folder is a complete checkpoint of this trainer."""
    return re.fullmatch(rf"{PREFIX}\d+", path.name) is not None and (path / NOTE).is_file()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a log, empty if there is no log. An incomplete last line is ignored: the training may be running.

    Raises:
        SourceError: a complete line is damaged.
    """
    if not path.is_file():
        return []
    records = []
    *lines, rest = path.read_text().split("\n")
    del rest  # empty, or an incomplete line
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["global_step"] += 0
        except (ValueError, TypeError, KeyError):
            raise SourceError(f"line {number} of {path} is not a record of a step") from None
        records.append(record)
    return records


def write_config(config: Config, folder: Path) -> None:
    """Write the settings of a run to `FOLDER/config.yml`, with absolute paths."""
    tree = config.model_dump(mode="python", exclude_none=True)
    write_file(folder / CONFIG, yaml.safe_dump(_plain(tree), sort_keys=False, allow_unicode=True).encode())


def changes(config: Config, done: bool) -> str:
    """A note of the settings that differ from those of the run's last job; empty if none does.

    Args:
        config: the settings now.
        done: whether the run is finished, so that the changes have no effect.
    """
    path = config.save.path / CONFIG
    try:
        before = load_config(path)[0] if path.is_file() else config
    except UsageError:  # another version wrote it
        return ""
    then, now = ({name: _plain(value) for name, value in flat(config).items()} for config in (before, config))
    names = [name for name in {**then, **now} if not name.startswith(OF_A_JOB) and then.get(name) != now.get(name)]
    differences = "; ".join(f"{name}: {then.get(name)}, now {now.get(name)}" for name in names)
    if not differences:
        return ""
    return (
        f"settings that the run was not trained with have no effect: {differences}"
        if done
        else f"changed settings: {differences}"
    )


def _plain(value: Any) -> Any:
    """A value made of YAML's types: paths become strings, tuples lists."""
    match value:
        case Path():
            return str(value.absolute())
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


RECORD = ".start"
