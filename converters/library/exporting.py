"""Export each checkpoint while its training continues: a process for each, one after the other, from a bounded queue.

No export stops a training: a checkpoint that finds the queue full is skipped, and a failure is recorded and logged.
`Exporter.results` has the result of each; `close(strict=True)` raises if one failed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.common.hub_names import folder_of
from converters.hub.push_plan import check_names
from converters.library.options import Conversion, Place, absolute, checked, path_of
from converters.plan.request import current_folder
from formats.disk.threads import starting
from formats.errors import Interrupted, UsageError, VitruvianError

if TYPE_CHECKING:
    from typing_extensions import Unpack

PROGRAM = "vitruvian.export"
"""The module that exports one checkpoint in a process of its own."""
SECONDS = 1.0
"""Seconds after which an exporter that was not closed notices that the program has ended."""
LOG = logging.getLogger("vitruvian")


class ExportError(VitruvianError):
    """Exports failed, or were skipped."""


@dataclass(frozen=True)
class Export:
    """The result of one export.

    Attributes:
        src: the folder of the checkpoint.
        out: the Hugging Face folder.
        digest: the hash of the weights; empty if the checkpoint was not exported.
        url: the page of the model on the Hub, if it was pushed.
        error: why the checkpoint was not exported, in one sentence; empty if it was.
        exit_code: the exit code of the command, 0 if the checkpoint was exported.
        notes: further messages for the user.
    """

    src: Path
    out: Path
    digest: str = ""
    url: str = ""
    error: str = ""
    exit_code: int = 0
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> dict[str, Any]:
        """The attributes but the folders, as the log and `--json` have them."""
        return {name: value for name, value in vars(self).items() if name not in ("src", "out")}


def export_one(
    src: Path,
    out: Path,
    options: Mapping[str, Any],
    *,
    push: str | None = None,
    digest: str | None = None,
    home: Path | None = None,
    descriptors: Sequence[int] = (),
    started: Callable[[subprocess.Popen[str]], object] = lambda _: None,
) -> Export:
    """Export one checkpoint in a process of its own, and wait for the process.

    Args:
        src: the folder of the checkpoint.
        out: the Hugging Face folder.
        options: the options of `vitruvian.convert`.
        push: ORG/NAME to which the model is pushed afterwards, into a branch of the folder's name; None for none.
        digest: the digest of OUT, where OUT exists already and only has to be pushed.
        home: the folder that relative paths start from; None for the current one.
        descriptors: open files that the process keeps open too, and with them their locks.
        started: called with the process.
    """
    task = {"src": str(src), "out": str(out), "push": push, "options": options, "digest": digest}
    words = [sys.executable, "-m", PROGRAM]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, **pipes, text=True, cwd=home, pass_fds=descriptors) as ran:  # noqa: S603  # fixed words
        started(ran)
        output, errors = ran.communicate(json.dumps(task, default=str))
    if ran.returncode:
        lines = errors.strip().splitlines() or ["it was killed"]
        return Export(src, out, error=lines[-1], exit_code=ran.returncode)
    done = json.loads(output)
    return Export(src, out, done["digest"], done["url"], notes=tuple(done["notes"]))


def possible(push: str | None, waiting: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an exporter, checked as far as possible before there is a checkpoint.

    Raises:
        UsageError: an option is unknown or has an impossible value, `config` is no Hugging Face folder, or `push` is
            not a valid name on the Hub.
        SourceError: `config` is a name that the Hub does not have.
    """
    if push is not None:
        check_names(push, None)
    if type(waiting) is not int or waiting < 0:
        raise UsageError(f"waiting = {waiting!r} is not a whole number of 0 or more")
    values = checked(options, Conversion.__optional_keys__ - {"progress"})
    config = values.get("config")
    if config is not None and not (folder_of(Path(config)).folder / "config.json").is_file():
        raise UsageError(f"config = {str(config)!r} is not a Hugging Face folder", "the model the training began with")
    return values


class Exporter:
    """Exports checkpoints to Hub-ready folders, in the order in which they are submitted.

    It ends with `close`, or as a context; checkpoints that are left when the program ends are exported first.

    Args:
        out: the folder in which each checkpoint becomes a folder of its name.
        push: ORG/NAME to which each model is pushed afterwards, into a branch of the folder's name; None for none.
        waiting: how many checkpoints may wait for the one that is exported; a further one is skipped.
        options: the options of `vitruvian.convert`, such as `config` and `dtype`.

    Raises:
        UsageError: an option is unknown or has an impossible value, `push` is not a valid name on the Hub, `out` is
            an address in a store, or the system starts no further thread.
    """

    def __init__(
        self, out: Place, push: str | None = None, waiting: int = 1, options: Mapping[str, Any] | None = None
    ) -> None:
        self.options = possible(push, waiting, options or {})
        self.out, self.push, self.waiting = absolute(path_of(out, "out", ())), push, waiting
        self.home, self.process = current_folder(), os.getpid()
        self.exports: list[Export | None] = []
        self.told = set[str]()
        self.pending: deque[tuple[int, Path]] = deque()
        self.condition, self.busy, self.closed = threading.Condition(), False, False
        self.thread = threading.Thread(target=self._work, name="vitruvian-export")
        with starting():
            self.thread.start()

    def _require_own(self) -> None:
        """Refuse a process that was forked since: it has no thread that exports, and the queue is a copy.

        Raises:
            UsageError: it is not the process that has started the exporter.
        """
        if os.getpid() != self.process:
            raise UsageError(
                f"the exporter belongs to process {self.process}, from which this one was forked: nothing exports here",
                "make the exporter after the fork, in the process that submits to it",
            )

    @property
    def results(self) -> list[Export]:
        """The result of each checkpoint that is done or was skipped, in the order in which they were submitted.

        Raises:
            UsageError: the process was forked from that which has started the exporter.
        """
        self._require_own()
        with self.condition:
            return [export for export in self.exports if export is not None]

    def submit(self, checkpoint: Place) -> bool:
        """Queue a checkpoint, to be exported when those before it are done. Returns at once.

        Args:
            checkpoint: the folder of the checkpoint, which must not change until it is exported.

        Returns:
            Whether there was room in the queue. If not, the checkpoint is skipped, which `results` records.

        Raises:
            UsageError: the exporter is closed, or of the process that this one was forked from; or the value is no
                path.
        """
        self._require_own()
        folder = absolute(path_of(checkpoint, "checkpoint", ()))
        with self.condition:
            if self.closed:
                raise UsageError("the exporter is closed", "start another one")
            skipped = len(self.pending) >= self.waiting + (not self.busy)
            self.exports.append(None)
            number = len(self.exports) - 1
            if not skipped:
                self.pending.append((number, folder))
                self.condition.notify_all()
        if skipped:
            error = "skipped: earlier exports are not done"
            self._note(number, Export(folder, self.out / folder.name, error=error, exit_code=Interrupted.exit_code))
        return not skipped

    def close(self, *, strict: bool = False) -> list[Export]:
        """Wait until all exports are done, and return their results.

        Args:
            strict: raise if an export failed or was skipped.

        Raises:
            ExportError: with `strict`, an export failed or was skipped.
            UsageError: the process was forked from that which has started the exporter.
        """
        self._require_own()
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        self.thread.join()
        failed = [export for export in self.results if export.error]
        if failed and strict:
            first = failed[0]
            raise ExportError(
                f"{len(failed)} of {len(self.results)} exports failed: {first.src}: {first.error}",
                "Exporter.results says what came of each; export it again with vitruvian.convert",
            )
        return self.results

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if os.getpid() == self.process:  # a process that was forked in between leaves the block as it likes
            self.close(strict=kind is None)

    def _work(self) -> None:
        while True:
            with self.condition:
                while not self.pending:
                    if self.closed or not threading.main_thread().is_alive():
                        return
                    self.condition.wait(SECONDS)
                number, folder = self.pending.popleft()
                self.busy = True
            export = export_one(folder, self.out / folder.name, self.options, push=self.push, home=self.home)
            with self.condition:
                self.busy = False
            self._note(number, export)

    def _note(self, number: int, export: Export) -> None:
        with self.condition:
            self.exports[number] = export
        if export.error:
            LOG.warning("%s was not exported: %s", export.src, export.error)
        else:
            for note in export.notes:
                if note not in self.told:
                    self.told.add(note)
                    LOG.warning("%s: %s", export.src, note)
            LOG.info("%s is exported to %s, digest %s", export.src, export.out, export.digest)


def exporter(out: Place, *, push: str | None = None, waiting: int = 1, **options: Unpack[Conversion]) -> Exporter:
    """Start exporting: `submit` each checkpoint, and `close` at the end.

    Args:
        out: the folder in which each checkpoint becomes a Hugging Face folder of its name.
        push: ORG/NAME to which each model is pushed afterwards, into a branch of the folder's name.
        waiting: how many checkpoints may wait for the one that is exported; a further one is skipped.
        options: the options of `convert`, such as `config="BASE"` and `dtype="bf16"`.

    Raises:
        UsageError: an option is unknown or has an impossible value, or `push` is not a valid name on the Hub.
    """
    return Exporter(out, push, waiting, options)
