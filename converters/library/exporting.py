"""Export each checkpoint of a training while it goes on: a process for each, one after the other, a bounded queue.

No export stops a training: what finds the queue full is skipped, and a failure is recorded and logged. Who wants to
know asks `Exporter.results`, or `close(strict=True)`.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.library.options import Conversion, Place, require_known
from formats.errors import VitruvianError

if TYPE_CHECKING:
    from typing_extensions import Unpack

PROGRAM = "vitruvian.export"
"""The module that exports one checkpoint in a process of its own."""
LOG = logging.getLogger("vitruvian")


class ExportError(VitruvianError):
    """Exports failed, or were skipped."""


@dataclass(frozen=True)
class Export:
    """What came of one checkpoint.

    Attributes:
        src: its folder.
        out: the Hugging Face folder.
        digest: the hash of its weights; empty if it was not exported.
        url: its page on the Hub, if it was pushed.
        error: why not, in one sentence; empty if it was exported.
        exit_code: that of the commands, 0 if it was exported.
    """

    src: Path
    out: Path
    digest: str = ""
    url: str = ""
    error: str = ""
    exit_code: int = 0


@dataclass
class Exporter:
    """Exports checkpoints to Hub-ready folders, in the order in which they are submitted.

    Attributes:
        out: the folder in which each becomes a folder of its name.
        push: ORG/NAME to which each is pushed afterwards, into a branch of the folder's name; None for none.
        waiting: how many checkpoints may wait for the one that is exported.
        options: those of `vitruvian.convert`, such as `config` and `dtype`.
        results: what came of each, in order.
    """

    out: Path
    push: str | None = None
    waiting: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    results: list[Export] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_known(self.options, Conversion.__optional_keys__ - {"progress"})
        self.queue: queue.Queue[Path | None] = queue.Queue(self.waiting)
        self.thread = threading.Thread(target=self._work, name="vitruvian-export", daemon=True)
        self.thread.start()

    def submit(self, checkpoint: Place) -> bool:
        """Export a checkpoint when those before it are done. Returns at once.

        Args:
            checkpoint: its folder, which must stay as it is until it is exported.

        Returns:
            Whether there was room in the queue. If not, it is skipped, which `results` say.
        """
        folder = Path(checkpoint)
        try:
            self.queue.put_nowait(folder)
        except queue.Full:
            self._note(
                Export(folder, self.out / folder.name, error="skipped: earlier exports are not done", exit_code=75)
            )
            return False
        return True

    def close(self, *, strict: bool = False) -> list[Export]:
        """Wait until all is done.

        Args:
            strict: insist on every export.

        Raises:
            ExportError: one failed or was skipped, and `strict`.
        """
        self.queue.put(None)
        self.thread.join()
        failed = [one for one in self.results if one.error]
        if failed and strict:
            raise ExportError(
                f"{len(failed)} of {len(self.results)} exports failed: {failed[0].src}: {failed[0].error}"
            )
        return self.results

    def _work(self) -> None:
        while (folder := self.queue.get()) is not None:
            self._note(self._export(folder))

    def _export(self, folder: Path) -> Export:
        out = self.out / folder.name
        task = {"src": str(folder), "out": str(out), "push": self.push, "options": self.options}
        ran = subprocess.run(  # noqa: S603  # this interpreter, and fixed words
            [sys.executable, "-m", PROGRAM],
            input=json.dumps(task, default=str),
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            lines = ran.stderr.strip().splitlines() or ["it was killed"]
            return Export(folder, out, error=lines[-1], exit_code=ran.returncode)
        done = json.loads(ran.stdout)
        return Export(folder, out, done["digest"], done["url"])

    def _note(self, export: Export) -> None:
        self.results.append(export)
        if export.error:
            LOG.warning("%s was not exported: %s", export.src, export.error)
        else:
            LOG.info("%s is exported to %s, digest %s", export.src, export.out, export.digest)


def exporter(out: Place, *, push: str | None = None, waiting: int = 1, **options: Unpack[Conversion]) -> Exporter:
    """Start exporting: `submit` each checkpoint, and `close` at the end.

    Args:
        out: the folder in which each checkpoint becomes a Hugging Face folder of its name.
        push: ORG/NAME to which each is pushed afterwards, into a branch of the folder's name.
        waiting: how many checkpoints may wait for the one that is exported; a further one is skipped.
        options: those of `convert`, such as `config="BASE"` and `dtype="bf16"`.
    """
    return Exporter(Path(out), push, waiting, dict(options))
