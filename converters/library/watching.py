"""Convert each complete checkpoint of a training once, while it runs.

    OUT/.watch/log.jsonl          a line for each event of a checkpoint; the last line of a name counts
    OUT/.watch/NAME.claim         locked by the process that works on a checkpoint, and deleted afterwards
    OUT/NAME                      the model, complete or absent

Any number of watchers can work at the same time, and be killed: another one resumes a begun conversion, since the lock
of a claim ends with its process. A model is renamed to its place in one step, and counts from its line in the log on.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converters.common.atomic import handling_signals, lock, write_all
from converters.common.manifest import read_manifest, total
from converters.library.conversion import plan
from converters.library.exporting import Export, ExportError, export_one
from converters.library.options import Planning
from formats.detect import commits
from formats.errors import Interrupted, OptionNeededError, OutputError, SourceError, UsageError

PLACE, LOG = ".watch", "log.jsonl"
BEGIN = b'{"time": '
"""The beginning of each line of the log."""
ENDED = ("converted", "failed", "gone", "removed")
"""States of a checkpoint that is not to be converted, as long as its files are the same."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of an OUT without room; there may be room at the next look."""
CONVERTED_AGAIN = {7, 8, Interrupted.exit_code}
"""Exit codes of failures that may pass: no room, no network, a signal. A killed process is retried too."""

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
    """

    run: Path
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    push: str | None = None
    keep: int | None = None
    keep_every: int | None = None
    idle: float = float("inf")
    tell: Callable[[Export], object] = lambda _: None

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


# --- the log ---------------------------------------------------------------------------------------------------------


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
    with _appending(watch) as (history, append):
        if not last(history) and not _is_same(watch, history):
            os.truncate(watch.place / LOG, 0)  # that of a command that was wrong
            history.clear()
        _require_same(watch, history)
        if anew or not history:
            append({"state": "watch", **_asked(watch)})


def _asked(watch: Watch) -> Record:
    """The facts that two watches have to agree on to share their work."""
    options = json.loads(json.dumps(watch.options, default=str))
    return {"run": str(watch.run), "push": watch.push, "options": options}


def _is_same(watch: Watch, history: Sequence[Record]) -> bool:
    return all(history[0].get(name) == value for name, value in _asked(watch).items()) if history else True


def _require_same(watch: Watch, history: Sequence[Record]) -> None:
    if not _is_same(watch, history):
        before = json.dumps({name: history[0].get(name) for name in _asked(watch)})
        hint = "choose another folder for --out, or give the same options"
        raise UsageError(f"{watch.out} is of another watch: {before}", hint)


@contextmanager
def _appending(watch: Watch) -> Iterator[tuple[list[Record], Callable[[Record], None]]]:
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
    with _appending(watch) as (history, _):
        return history


def last(history: Iterable[Record]) -> dict[str, Record]:
    """The last record of each checkpoint in the log, by its name."""
    return {record["checkpoint"]: record for record in history if "checkpoint" in record}


def _note(watch: Watch, name: str, state: str, **facts: Any) -> None:
    """Add a record of a checkpoint to the log."""
    with _appending(watch) as (history, append):
        _require_same(watch, history)
        append({"checkpoint": name, "state": state, **facts})


@contextmanager
def _claimed(watch: Watch, name: str) -> Iterator[int | None]:
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


# --- what is to be done ----------------------------------------------------------------------------------------------


def due(watch: Watch, latest: Mapping[str, Record]) -> list[commits.Saved]:
    """The complete checkpoints that are to be converted, the oldest first, which the training deletes first.

    Conversions that were begun, and whose checkpoint is gone, are among them, to be ended.

    Raises:
        SourceError: the run cannot be read.
    """
    try:
        saved = commits.complete(watch.run)
    except OSError as error:
        raise SourceError(f"{watch.run}: {error.strerror}") from None
    retained = watch.kept(checkpoint.step for checkpoint in saved)
    wanted = (
        saved if watch.push else [checkpoint for checkpoint in saved if checkpoint.step in retained]
    )  # others would be deleted at once
    begun = [
        name for name, record in latest.items() if record["state"] not in ENDED and not (watch.run / name).exists()
    ]
    wanted = [*wanted, *(commits.Saved(latest[name]["step"], watch.run / name) for name in begun)]
    return [checkpoint for checkpoint in wanted if _is_due(watch, checkpoint, latest.get(checkpoint.folder.name))]


def _is_due(watch: Watch, saved: commits.Saved, record: Record | None) -> bool:
    if record is None or record["state"] not in ENDED or record["state"] == "gone":
        return True
    if (watch.out / saved.folder.name).exists():  # a model is never replaced
        return False
    return commits.mark(saved.folder) not in ("", record["mark"])


def is_over(watch: Watch, history: Iterable[Record]) -> bool:
    """Whether no new checkpoint came for `idle` seconds."""
    newest: float = max(record["time"] for record in history if record["state"] in ("watch", *ENDED))
    return time.time() - newest >= watch.idle


# --- doing it --------------------------------------------------------------------------------------------------------


class Stop:
    """The request of a signal: start no further checkpoint, and end the running conversion."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.running: subprocess.Popen[str] | None = None

    def ask(self, *_: object) -> None:
        """Answer a signal."""
        self.came.set()
        if self.running is not None:
            self.running.terminate()

    def started(self, process: subprocess.Popen[str]) -> None:
        """Remember the process of a conversion. Terminating one that has ended and was waited for has no effect."""
        self.running = process
        if self.came.is_set():
            process.terminate()

    def check(self, seconds: float = 0) -> None:
        """Wait for some seconds.

        Raises:
            Interrupted: a signal came.
        """
        until = time.monotonic() + seconds
        while not self.came.is_set() and (left := until - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
        if self.came.is_set():
            raise Interrupted("stopped by a signal", "run the same command again to resume")


@contextmanager
def stoppable() -> Iterator[Stop]:
    """A context in which a signal ends a watch between two steps of its work."""
    stop = Stop()
    with handling_signals(stop.ask):
        yield stop


def look(watch: Watch, stop: Stop) -> None:
    """Convert the checkpoints that are due, and delete the models that are not kept.

    Raises:
        Interrupted: a signal came; the next look resumes.
        UsageError, UnsupportedError, RefusedError: planning the first checkpoint fails, as that of all others would.
        SourceError: the run cannot be read.
        OutputError: the log cannot be written.
    """
    latest = last(records(watch))
    todo = due(watch, latest)
    if not latest and todo:
        with suppress(SourceError):  # an error of this checkpoint, which its conversion will report
            _check_options(watch, todo[0])
    _note_overwritten(watch)
    for saved in todo:
        stop.check()
        export = _convert(watch, saved, stop)
        stop.check()
        if export is None:
            continue
        watch.tell(export)
    _remove(watch)


def _note_overwritten(watch: Watch) -> None:
    """Report once that a checkpoint is left out since its weights are newer than its sign of completeness."""
    for name, text in commits.overwritten(watch.run).items():
        with _appending(watch) as (history, append):
            if any(record.get("left_out") == name and record["error"] == text for record in history):
                continue
            append({"state": "left out", "left_out": name, "error": text})
        watch.tell(Export(watch.run / name, watch.out / name, error=text, exit_code=SourceError.exit_code))


def _check_options(watch: Watch, saved: commits.Saved) -> None:
    """Plan the first conversion, to check the options.

    Raises:
        UsageError, UnsupportedError, RefusedError, SourceError: the conversion cannot be planned.
    """
    names = Planning.__optional_keys__
    try:
        plan(saved.folder, **{name: value for name, value in watch.options.items() if name in names})
    except OptionNeededError as error:
        raise UsageError(f"{saved.folder}: {error}", error.hint) from None


def _convert(watch: Watch, saved: commits.Saved, stop: Stop) -> Export | None:
    """Convert one checkpoint, unless another process does. A model that is complete is only pushed and recorded."""
    folder, name = saved.folder, saved.folder.name
    out = watch.out / name
    with _claimed(watch, name) as claim:
        record = last(records(watch)).get(name)
        mark = commits.mark(folder)
        if claim is None or not _is_due(watch, saved, record):
            return None
        if not mark and not out.exists():
            shutil.rmtree(_staging(out), ignore_errors=True)
            if record is not None:
                _note(watch, name, "gone", step=saved.step, mark=record["mark"])
            return None
        began = record if record is not None and record["state"] in ("began", "again") else None
        facts: dict[str, Any] = {"step": saved.step, "mark": mark}
        if out.exists() and began is None:
            log = watch.place / LOG
            error = f"{out} exists, and {log} has no line of it: move it away, and {name} is converted anew"
            export = Export(folder, out, error=error, exit_code=OutputError.exit_code)
            _note(watch, name, "failed", **facts | {"mark": ""}, error=error, exit_code=export.exit_code)
            return export
        digest = None
        if out.exists():  # the process was killed before it could record the model
            remembered = read_manifest(out)
            digest = total(remembered[1]) if remembered else ""
            assert began is not None
            facts["mark"] = began["mark"]
        else:
            if began is None or began["mark"] != mark:
                shutil.rmtree(_staging(out), ignore_errors=True)
            _note(watch, name, "began", **facts)
        if digest is not None and watch.push is None:
            export = Export(folder, out, digest)
        else:
            export = export_one(
                folder, out, watch.options, push=watch.push, digest=digest, descriptors=(claim,), started=stop.started
            )
        state = _state(export, record)
        if state == "gone":
            shutil.rmtree(_staging(out), ignore_errors=True)
        outcome = {key: getattr(export, key) for key in ("digest", "url", "error", "exit_code") if getattr(export, key)}
        _note(watch, name, state, **facts, **outcome)
        return None if state == "gone" else export


def _staging(out: Path) -> Path:
    """The folder of an unfinished conversion (`Request.staging`)."""
    return out.with_name(out.name + ".partial")


def _state(export: Export, before: Record | None) -> str:
    """The state that the log records after an attempt. A source that cannot be read may be half deleted: it is retried.

    A model that is complete and was not pushed is pushed at a later look, whatever the reason was.
    """
    if not export.error:
        return "converted"
    if export.out.exists():
        return "again"
    if not export.src.exists():
        return "gone"
    first = export.exit_code == SourceError.exit_code and (before is None or before.get("error") != export.error)
    return "again" if first or export.exit_code in CONVERTED_AGAIN or export.exit_code < 0 else "failed"


def _remove(watch: Watch) -> None:
    """Delete the models that are not kept: each is renamed out of its place in one step, then its files are deleted."""
    latest = last(records(watch))
    steps = {name: record["step"] for name, record in latest.items() if record["state"] == "converted"}
    for name in [name for name, step in steps.items() if step not in watch.kept(steps.values())]:
        with _claimed(watch, name) as claim:
            record = last(records(watch))[name]
            if claim is None or record["state"] != "converted":
                continue
            old = watch.place / f"{name}.old"
            if (watch.out / name).exists():
                shutil.rmtree(old, ignore_errors=True)
                (watch.out / name).rename(old)
            shutil.rmtree(old, ignore_errors=True)
            _note(watch, name, "removed", step=record["step"], mark=record["mark"])


def require_all(watch: Watch) -> None:
    """Raise an error if a complete checkpoint was not converted, unless the training deleted it before it was read.

    Raises:
        ExportError: some checkpoints were not converted.
    """
    failures = {name: record for name, record in last(records(watch)).items() if record.get("error")}
    states = [("failed", "again") if (watch.run / name).exists() else ("failed",) for name in failures]
    failed = [
        failure for failure, wanted in zip(failures.items(), states, strict=True) if failure[1]["state"] in wanted
    ]
    left_out = {name: {"error": text, "exit_code": SourceError.exit_code}
                for name, text in commits.overwritten(watch.run).items()}  # fmt: skip
    failed += left_out.items()
    if failed:
        name, record = failed[0]
        error = ExportError(f"{len(failed)} checkpoints were not converted: {name}: {record['error']}")
        error.exit_code = max(1, record["exit_code"])
        raise error
