"""What the user sees: progress on stderr, sizes and tables as text."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

EVERY = 30.0
"""Seconds between two lines in a log file."""


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def table(rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Left-aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    if not texts:
        return ""
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts
    )


Tell = Callable[[str, int, int], object]
"""Called with what is being done, how many bytes of it are done, and how many there are; from any thread."""


class Progress:
    """Bytes, rate and time left: one live line on a terminal, one line every 30 s in a log file; calls of `tell`."""

    def __init__(self, what: str, total: int, quiet: bool = False, tell: Tell | None = None) -> None:
        self.what, self.total, self.quiet, self.tell = what, total, quiet, tell
        self.done, self.lock = 0, threading.Lock()
        self.began = self.said = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty() and self.total:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.what, total=self.total)
            self.bar.start()
        return self

    def advance(self, nbytes: int) -> None:
        """Count bytes; called from any thread."""
        with self.lock:
            self.done += nbytes
            if self.tell:
                self.tell(self.what, self.done, self.total)
            now = time.monotonic()
            if self.bar:
                self.bar.update(self.task, completed=self.done)
            elif not self.quiet and now - self.said >= EVERY:
                self.said = now
                rate = self.done / (now - self.began)
                left = (self.total - self.done) / rate if rate else 0.0
                line = f"{self.what}: {size(self.done)} of {size(self.total)}, {size(rate)}/s, {left:.0f} s left\n"
                sys.stderr.write(line)
                sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()
