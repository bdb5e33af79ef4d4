"""The log of a watch, which all watches of a training share.

OUT/.watch/log.jsonl          a line for each event of a checkpoint; the last line of a name counts
OUT/.watch/NAME.claim         locked by the process that works on a checkpoint, and deleted afterwards
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converters.common.atomic import lock, write_all
from converters.library.exporting import Export
from formats.errors import OutputError, UsageError

PLACE, LOG = ".watch", "log.jsonl"
BEGIN = b'{"time": '
"""The beginning of each line of the log."""

OF_A_NODE = ("threads", "memory")
"""The options that may differ between watches that share their work: they change no byte."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Watch:
    """The training that is watched, and how its checkpoints are converted.

    Attributes:
        run: the folder of the training.
        out: the folder of the models.
        options: the options of `vitruvian.convert`.
        push: ORG/NAME to which each model is pushed, into a branch of its name.
        keep: how many of the newest models are kept; None for all.
        keep_every: models of steps that this divides are kept too.
        idle: seconds without a new checkpoint after which the watch is over.
        tell: called with the result of each checkpoint.
        tell_removed: called with each model that is not kept, and the reason for which it stays where it is; it is
            deleted if there is none.
    """

    run: Path
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    push: str | None = None
    keep: int | None = None
    keep_every: int | None = None
    idle: float = float("inf")
    tell: Callable[[Export], object] = lambda _: None
    tell_removed: Callable[[Path, str], object] = lambda *_: None

    @property
    def place(self) -> Path:
        """The folder of the log."""
        return self.out / PLACE

    def kept(self, steps: Iterable[int]) -> set[int]:
        """The steps whose models are kept."""
        ordered = sorted(steps)
        if self.keep is None:
            return {*ordered}
        return {*ordered[max(0, len(ordered) - self.keep) :]} | {
            step for step in ordered if self.keep_every and step % self.keep_every == 0
        }


def begin(watch: Watch, *, anew: bool = True) -> None:
    """Create the log, or check that an existing one is of the same watch.

    Args:
        watch: the watch.
        anew: whether the time without a new checkpoint starts now.

    Raises:
        UsageError: the log is of another training, or of other options; or --keep might delete the config's folder.
        OutputError: the file system has no locks.
    """
    config = watch.options.get("config")
    if watch.keep is not None and config is not None and watch.out.resolve() in Path(config).resolve().parents:
        raise UsageError(
            f"--keep deletes folders of {watch.out}, and --config {config} is in it", "choose another --out"
        )
    watch.place.mkdir(parents=True, exist_ok=True)
    with appending(watch) as (history, append):
        if not last(history) and not _is_same(watch, history):
            os.truncate(watch.place / LOG, 0)  # that of a command that was wrong
            history.clear()
        _require_same(watch, history)
        if anew or not history:
            append({"state": "watch", **_asked(watch)})


def _asked(watch: Watch) -> Record:
    """The facts that two watches have to agree on to share their work."""
    options = {name: value for name, value in watch.options.items() if name not in OF_A_NODE}
    options = json.loads(json.dumps(options, default=str))
    return {"run": str(watch.run), "push": watch.push, "options": options}


def _is_same(watch: Watch, history: Sequence[Record]) -> bool:
    return all(history[0].get(name) == value for name, value in _asked(watch).items()) if history else True


def _require_same(watch: Watch, history: Sequence[Record]) -> None:
    if not _is_same(watch, history):
        before = json.dumps({name: history[0].get(name) for name in _asked(watch)})
        hint = "choose another folder for --out, or give the same options"
        raise UsageError(f"{watch.out} is of another watch: {before}", hint)


@contextmanager
def appending(watch: Watch) -> Iterator[tuple[list[Record], Callable[[Record], None]]]:
    """The records of the log, and the function that adds one, with the log locked. An incomplete last line is cut off.

    Raises:
        OutputError: a line is no record, or the end of the file is not the beginning of one.
    """
    handle = os.open(watch.place / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if not lock(handle, watch.place / LOG, wait=True):
            raise OutputError(f"{watch.out} lies on a file system without locks, which a watch needs")
        content = os.pread(handle, os.fstat(handle).st_size, 0)
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if (rest := content[len(whole) :])[: len(BEGIN)] != BEGIN[: len(rest)]:
            raise _damaged(watch, len(lines) + 1)
        os.ftruncate(handle, len(whole))

        def append(record: Record) -> None:
            write_all(handle, (json.dumps({"time": int(1000 * time.time()) / 1000, **record}) + "\n").encode())
            os.fsync(handle)

        yield [_record(watch, number, line) for number, line in enumerate(lines, 1)], append
    finally:
        os.close(handle)


def _record(watch: Watch, number: int, line: bytes) -> Record:
    """The record in a line of the log.

    Raises:
        OutputError: the line is no record: a file system may leave zeros, or old bytes, after a node has died.
    """
    try:
        record = json.loads(line.decode())
    except ValueError:
        record = None
    needed = {"time", "state", *(("step", "mark") if isinstance(record, dict) and "checkpoint" in record else ())}
    if not isinstance(record, dict) or not needed <= record.keys():
        raise _damaged(watch, number)
    return record


def _damaged(watch: Watch, number: int) -> OutputError:
    hint = "remove it; a model that no line tells of is left alone until it is moved away"
    return OutputError(f"line {number} of {watch.place / LOG} is damaged", hint)


def records(watch: Watch) -> list[Record]:
    """The records of the log; none before the log exists."""
    if not (watch.place / LOG).is_file():
        return []
    with appending(watch) as (history, _):
        return history


def last(history: Iterable[Record]) -> dict[str, Record]:
    """The last record of each checkpoint in the log, by its name."""
    return {record["checkpoint"]: record for record in history if "checkpoint" in record}


def note(watch: Watch, name: str, state: str, **facts: Any) -> None:
    """Add a record of a checkpoint to the log."""
    with appending(watch) as (history, append):
        _require_same(watch, history)
        append({"checkpoint": name, "state": state, **facts})


@contextmanager
def claimed(watch: Watch, name: str) -> Iterator[int | None]:
    """A context that claims a checkpoint for this process: the handle of the lock, or None if another one has it."""
    path = watch.place / f"{name}.claim"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(handle, path)
            mine = os.path.samestat(os.fstat(handle), path.stat())
        except (OutputError, FileNotFoundError):  # another process has it, or had it and is done
            mine = False
        yield handle if mine else None
        if mine:
            path.unlink()
    finally:
        os.close(handle)
