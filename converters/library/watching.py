"""Convert each complete checkpoint of a training once, while it runs.

    OUT/.watch      the log (`watch_log`)
    OUT/NAME        the model, complete or absent

Any number of watchers can work at the same time, and be killed: another one resumes a begun conversion, since the lock
of a claim ends with its process. A model is renamed to its place in one step, and counts from its line in the log on.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from converters.assets.replaceable import reason_to_keep
from converters.common.atomic import handling_signals
from converters.common.manifest import read_manifest, total
from converters.library.conversion import plan
from converters.library.exporting import Export, ExportError, export_one
from converters.library.options import Planning
from converters.library.watch_log import LOG, Record, Watch, appending, claimed, last, note, records
from converters.move.journal import JOURNAL
from formats.checkpoint import MANIFEST
from formats.detect import commits
from formats.errors import Interrupted, OptionNeededError, OutputError, SourceError, UsageError, some
from formats.registry import MODEL

ENDED = ("converted", "failed", "gone", "removed", "left")
"""States of a checkpoint that is not to be converted, as long as its files are the same."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of an OUT without room; there may be room at the next look."""
CONVERTED_AGAIN = {7, 8, Interrupted.exit_code}
"""Exit codes of failures that may pass: no room, no network, a signal. A killed process is retried too."""


# --- what is to be done ----------------------------------------------------------------------------------------------


def due(watch: Watch, latest: Mapping[str, Record]) -> list[commits.Saved]:
    """The complete checkpoints that are to be converted, the oldest first, which the training deletes first.

    Conversions that were begun are among them, to be ended, even where the checkpoint is gone or its model is not kept.

    Raises:
        SourceError: the run cannot be read.
    """
    try:
        saved = commits.complete(watch.run)
    except OSError as error:
        raise SourceError(f"{watch.run}: {error.strerror}") from None
    retained = watch.kept(checkpoint.step for checkpoint in saved)
    begun = {name: record for name, record in latest.items() if record["state"] not in ENDED}
    wanted = [
        checkpoint
        for checkpoint in saved
        if watch.push or checkpoint.step in retained or checkpoint.folder.name in begun
    ]  # others would be deleted at once
    gone = {name: record for name, record in begun.items() if not (watch.run / name).exists()}
    wanted += (commits.Saved(record["step"], watch.run / name) for name, record in gone.items())
    return [checkpoint for checkpoint in wanted if _is_due(watch, checkpoint, latest.get(checkpoint.folder.name))]


def _is_due(watch: Watch, saved: commits.Saved, record: Record | None) -> bool:
    if record is None or record["state"] not in ENDED or record["state"] == "gone":
        return True
    if (watch.out / saved.folder.name).exists():  # a model is never replaced
        return False
    return commits.mark(saved.folder) not in ("", record["mark"])


def is_stale(watch: Watch, name: str, latest: Mapping[str, Record]) -> bool:
    """Whether a model is of an earlier save of its checkpoint, as far as sizes and times of files tell."""
    record = latest.get(name)
    if record is None or record["state"] not in ("converted", "left") or not (watch.out / name).exists():
        return False
    return commits.mark(watch.run / name) not in ("", record["mark"])


def stale_text(watch: Watch, name: str) -> str:
    """What is said of such a model: a model is never replaced."""
    return f"saved again since it was converted; move {watch.out / name} away to convert it again"


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
    _note_stale(watch)
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
        with appending(watch) as (history, append):
            if any(record.get("left_out") == name and record["error"] == text for record in history):
                continue
            append({"state": "left out", "left_out": name, "error": text})
        watch.tell(Export(watch.run / name, watch.out / name, error=text, exit_code=SourceError.exit_code))


def _note_stale(watch: Watch) -> None:
    """Report once for each save that the model is of an earlier one."""
    latest = last(records(watch))
    for folder in [folder for _, folder in commits.complete(watch.run) if is_stale(watch, folder.name, latest)]:
        with appending(watch) as (history, append):
            fact = {"state": "saved again", "saved_again": folder.name, "mark": commits.mark(folder)}
            told = any(fact.items() <= record.items() for record in history)
            if told or not is_stale(watch, folder.name, last(history)):  # another watch was faster
                continue
            append(fact)
        error = stale_text(watch, folder.name)
        watch.tell(Export(folder, watch.out / folder.name, error=error, exit_code=OutputError.exit_code))


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
    with claimed(watch, name) as claim:
        record = last(records(watch)).get(name)
        mark = commits.mark(folder)
        if claim is None or not _is_due(watch, saved, record):
            return None
        if not mark and not out.exists():
            _delete_unfinished(watch, out)
            if record is not None:
                note(watch, name, "gone", step=saved.step, mark=record["mark"])
            return None
        began = record if record is not None and record["state"] in ("began", "again") else None
        facts: dict[str, Any] = {"step": saved.step, "mark": mark}
        if out.exists() and began is None:
            log = watch.place / LOG
            error = f"{out} exists, and {log} has no line of it: move it away, and {name} is converted anew"
            export = Export(folder, out, error=error, exit_code=OutputError.exit_code)
            note(watch, name, "failed", **facts | {"mark": ""}, error=error, exit_code=export.exit_code)
            return export
        digest = None
        if out.exists():  # the process was killed before it could record the model
            remembered = read_manifest(out)
            digest = total(remembered[1]) if remembered else ""
            assert began is not None
            facts["mark"] = began["mark"]
        else:
            if began is None or began["mark"] != mark:
                _delete_unfinished(watch, out)
            note(watch, name, "began", **facts)
        if digest is not None and watch.push is None:
            export = Export(folder, out, digest)
        else:
            export = export_one(
                folder, out, watch.options, push=watch.push, digest=digest, descriptors=(claim,), started=stop.started
            )
        state = _state(export, record)
        if state == "gone":
            _delete_unfinished(watch, out)
        outcome = {key: value for key, value in export.outcome.items() if value}
        note(watch, name, state, **facts, **outcome)
        return None if state == "gone" else export


def _delete_unfinished(watch: Watch, out: Path) -> None:
    """Delete the folder of an unfinished conversion (`Request.staging`), which a folder without its journal is not."""
    staging = out.with_name(out.name + ".partial")
    if (staging / JOURNAL).is_file():
        _delete(watch, staging)


def _delete(watch: Watch, folder: Path) -> None:
    """Delete a folder of the models: it is renamed out of its place in one step, then its files are deleted."""
    old = watch.place / f"{folder.name}.old"
    shutil.rmtree(old, ignore_errors=True)  # of a process that was killed
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


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
    """Delete the models that are not kept.

    One in which the user has put files or checkpoints of their own is left where it is, whatever becomes of these.
    """
    for old in watch.place.glob("*.old"):  # of a process that was killed
        shutil.rmtree(old, ignore_errors=True)
    for name in _not_kept(watch):
        with claimed(watch, name) as claim:
            record = _not_kept(watch).get(name)
            if claim is None or record is None:
                continue
            model = watch.out / name
            reason = reason_to_keep(model) or _rewritten(model)
            if not reason:
                _delete(watch, model)
            note(watch, name, "left" if reason else "removed", step=record["step"], mark=record["mark"])
            watch.tell_removed(model, reason)


def _not_kept(watch: Watch) -> dict[str, Record]:
    """All but the newest of the models that are in their places, and whose digests are those in the log.

    What the user has moved away is not counted, and what they have put in its place neither counted nor deleted.
    """
    if watch.keep is None:
        return {}
    written = {
        name: record
        for name, record in last(records(watch)).items()
        if record["state"] == "converted" and _digest(watch.out / name) == record.get("digest", "")
    }
    kept = watch.kept(record["step"] for record in written.values())
    return {name: record for name, record in written.items() if record["step"] not in kept}


def _rewritten(model: Path) -> str:
    """Which weights of a model are newer than its manifest, which is written after them, as a predicate; or empty."""
    written = (model / MANIFEST).stat().st_mtime_ns
    weights = (path for path in sorted(model.iterdir()) if MODEL.fullmatch(path.name))
    newer = [path.name for path in weights if path.lstat().st_mtime_ns > written]  # of a link, its own
    return f"has weights that are newer than its {MANIFEST}: {some(newer, 4)}" if newer else ""


def _digest(model: Path) -> str | None:
    """The digest in a model's manifest, None without one that can be read."""
    with suppress(SourceError):
        remembered = read_manifest(model)
        return remembered and total(remembered[1])
    return None


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
