"""`train init`: makes a run folder with every setting explained, a link to the start, and a folder for checkpoints.

DIR/config.yml
DIR/start -> the checkpoint              or, if it is named global_stepN as in a run folder,
DIR/checkpoints/global_stepN -> it       beside the checkpoints to come, as GPT-NeoX users lay it out
DIR/checkpoints/latest
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from converters.common.atomic import write_file
from formats.detect.rivals import require_one
from formats.errors import OutputError, SourceError, UsageError
from train.data.packing.pack_plan import is_plan
from train.data.rows import open_rows
from train.data.tokens.indexed import idx_path, prefix_of
from train.settings.batching import make_order, one_pass
from train.settings.config import Config
from train.settings.config_file import load_config
from train.start.run_folder import LATEST, PREFIX

SEQ_LENGTH = 8192
"""Default number of tokens of a row; less if the model has fewer positions."""


class Start(NamedTuple):
    """The checkpoint that a run starts from.

    Attributes:
        path: path of the checkpoint in the settings.
        offset: global step of the checkpoint, 0 if its name has none.
        seq_length: number of tokens of a row.
    """

    path: Path
    offset: int
    seq_length: int


def init(
    folder: Path,
    start: Path,
    data: Sequence[Path],
    base: Path | None = None,
    gqa_layout: str = "auto",
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Make a run folder for a checkpoint.

    Args:
        folder: the folder to make, new or empty.
        start: checkpoint of any format.
        data: token files.
        base: Hugging Face folder with config and tokenizer, for a checkpoint that has none.
        gqa_layout: order of query, key and value in a GPT-NeoX checkpoint, see `Settings`.
        given: settings by dotted names, from a preset or from a file of another trainer.

    Returns:
        The path of the settings.

    Raises:
        OutputError: the folder is not empty.
        SourceError: the checkpoint or the data cannot be read.
    """
    from formats.checkpoint import Settings
    from formats.model.spec import ModelSpec
    from formats.registry import open_checkpoint

    _require_empty(folder)
    start = _tag(start)
    spec = open_checkpoint(start, Settings(config=base, gqa_layout=gqa_layout)).spec
    for prefix in data:
        if not is_plan(prefix) and not idx_path(prefix_of(prefix)).is_file():
            raise SourceError(f"{idx_path(prefix_of(prefix))} is not there", "train tokenize makes it")
    longest = spec.max_positions if isinstance(spec, ModelSpec) else None
    linked = _link(folder, start, min(SEQ_LENGTH, longest or SEQ_LENGTH))
    values: dict[str, Any] = {
        "model.path": linked.path, "data.train": list(data), "data.seq_length": linked.seq_length, "batch.size": 64,
        "batch.micro": 1, "optim.lr": 1e-5, "steps.epochs": 1, "steps.iteration_offset": linked.offset,
        "save.path": folder / "checkpoints",
    }  # fmt: skip
    own_values: dict[str, Any] = {"model.config": base} if base else {}
    own_values |= {
        name: value for name, value in given.items() if name not in ("model.path", "data.train", "save.path")
    }
    for other, instead in (("batch.accumulation", "batch.size"), ("steps.train_iters", "steps.epochs")):
        if other in own_values:
            values.pop(instead)
    return _write(folder, values | own_values | ({"model.gqa_layout": gqa_layout} if gqa_layout != "auto" else {}))


def init_after(folder: Path, before: Path, data: Sequence[Path]) -> Path:
    """Make the run folder of a phase that follows another phase, with its settings and its save folder.

    The warm-up is kept where the learning rate schedule restarts; `export` is not copied.

    Args:
        folder: the folder to make, new or empty.
        before: file with the settings of the previous phase.
        data: token files or plans of the new phase. If the previous phase sets `train_iters`, the new phase gets the
            steps of one pass.

    Returns:
        The path of the settings.

    Raises:
        OutputError: the folder is not empty.
        UsageError: the previous phase has no batch.size, so the number of its steps is unknown.
        SourceError: the data cannot be read.
    """
    _require_empty(folder)
    config, _ = load_config(before)
    if config.batch.size is None:
        raise UsageError(f"{before} has no batch.size, so the number of steps of a phase is unknown")
    total = config.steps.train_iters
    if total is None:
        rows = open_rows(config.data, config.data.train, config.seed)
        _, total = make_order(rows.ends, config.seed, config.data, config.steps, config.batch.size)
    values = dict(_set_values(config))
    values |= {"data.train": list(data), "steps.iteration_offset": config.steps.iteration_offset + total}
    if config.steps.train_iters is not None:
        values["steps.train_iters"] = one_pass(len(open_rows(config.data, data, config.seed)), config.batch.size)
    values |= {"init": "auto"}
    end, over = config.schedule.end, {"export"}
    if end is not None and end <= values["steps.iteration_offset"]:
        end, over = None, {"export", "schedule.start", "schedule.end"}
    if (
        config.schedule.style == "constant" or end is not None
    ):  # else the schedule restarts, far above where it ended, and needs its warm-up
        values["schedule.warmup"] = 0.0
    return _write(folder, {name: value for name, value in values.items() if name not in over})


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} has something in it", "name a new folder")


def _tag(start: Path) -> Path:
    """The checkpoint that `latest` in a folder names, so that its step is known; the path itself without `latest`.

    Raises:
        RefusedError: the folder also has a Hugging Face model.
    """
    require_one(start, Path.is_dir)
    name = (start / LATEST).read_text().strip() if (start / LATEST).is_file() else ""
    return start / name if name and Path(name).name == name and (start / name).is_dir() else start


def _link(folder: Path, start: Path, seq_length: int) -> Start:
    """Link the checkpoint into the run folder by a relative path, so that both can be moved together."""
    target = start.parent.resolve() / start.name if start.name else start.resolve()
    step = re.fullmatch(rf"_?{PREFIX}_?(\d+).*|iter_(\d+)", target.name)
    place = folder / "start"
    if step and target.name == f"{PREFIX}{step[1]}":
        place = folder / "checkpoints" / target.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent.resolve()))
    if place.parent.name == "checkpoints":
        write_file(place.parent / LATEST, place.name.encode())
    return Start(place, int(step[1] or step[2]) if step else 0, seq_length)


# --- the file --------------------------------------------------------------------------------------------------------


def _set_values(config: Config) -> Iterator[tuple[str, Any]]:
    """The settings that a file sets, by dotted names, with their values."""

    def walk(part: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
        for name in sorted(part.model_fields_set):
            value = getattr(part, name)
            if isinstance(value, BaseModel):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return walk(config, "")


def _write(folder: Path, values: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yml"
    write_file(path, "\n".join(text_of(values)).encode())
    load_config(path)
    return path


def text_of(values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a file of settings, each explained: values that are set, all others as comments with their defaults.

    Args:
        values: values of settings by dotted names.
    """
    yield "# Every setting can be given on the command line too: train run config.yml --optim.lr 1e-5"
    yield "# Commented-out settings have the default shown. Paths are relative to where the command is run.\n"
    plain = {name: info for name, info in Config.model_fields.items() if not _section(info)}
    yield from _lines(plain, "", "", values)
    for name, info in Config.model_fields.items():
        part = _section(info)
        if part:
            absent = info.default is None and not any(name_given.startswith(f"{name}.") for name_given in values)
            yield f"\n{'# ' if absent else ''}{name}:  # {(part.__doc__ or '').splitlines()[0]}"
            yield from _lines(part.model_fields, f"{name}.", "  ", values)
    yield ""


def _section(info: FieldInfo) -> type[BaseModel] | None:
    """The class of a setting that is a section, also an optional one; None for any other."""
    kinds = [info.annotation, *get_args(info.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type(BaseModel))), None)


def _lines(fields: Mapping[str, FieldInfo], prefix: str, indent: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name, info in fields.items():
        is_given = prefix + name in values
        value = values[prefix + name] if is_given else info.get_default(call_default_factory=True)
        shown = "" if value is PydanticUndefined else _flow(value)
        line = f"{indent}{'' if is_given else '# '}{name}: {shown}"
        comment = " ".join(filter(None, [info.description, _choices(info.annotation)]))
        yield f"{line:<50}  # {comment}" if comment else line


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    match value:
        case Path():
            return _flow(str(value))
        case list() | tuple():
            return "[" + ", ".join(_flow(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_flow(name)}: {_flow(item)}" for name, item in value.items()) + "}"
        case float():
            digits, sign, power = repr(value).partition("e")
            return digits + (".0" if sign and "." not in digits else "") + sign + power  # YAML 1.1 reads 1e-05 as text
        case _:
            return (
                str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")
            )


def _choices(kind: Any) -> str:
    """The values that a setting accepts as text, if its type lists them; else empty."""
    if get_origin(kind) is Literal:
        return "(" + " | ".join(map(str, get_args(kind))) + ")"
    if get_origin(kind) in (Union, UnionType, list):
        return next((choices for part in get_args(kind) if (choices := _choices(part))), "")
    return ""
