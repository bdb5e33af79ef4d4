"""Progress on stderr, and sizes, times and tables as text."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

EVERY = 30.0
"""Seconds between two lines in a log file."""


def size(nbytes: float) -> str:
    """A number of bytes as text, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def table(rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Left-aligned columns, the first one in colour on a terminal."""
    texts = [[str(cell) for cell in row] for row in rows]
    if not texts:
        return ""
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in texts]
    if len(widths) > 1 and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        lines = [[f"\x1b[36m{first}\x1b[0m", *others] for first, *others in lines]
    return "\n".join(indent + "  ".join(line).rstrip() for line in lines)


Tell = Callable[[str, int, int], object]
"""Called with the name of the step, how many of its bytes are done, and how many there are; from any thread."""


class Progress:
    """Bytes, rate and time left: one live line on a terminal, one line every 30 s in a log file; calls of `tell`.

    `before` are bytes that an earlier run has done, which is printed; `after` are bytes of later steps, such as reading
    back, which count only for the time left.
    """

    def __init__(
        self, what: str, total: int, quiet: bool = False, tell: Tell | None = None, before: int = 0, after: int = 0
    ) -> None:
        self.what, self.total, self.quiet, self.tell = what, total, quiet, tell
        self.before, self.after, self.done, self.lock = before, after, 0, threading.Lock()
        self.began = self.said = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and self.before:
            sys.stderr.write(f"resuming: {size(self.before)} of {size(self.before + self.total)} done\n")
        if not self.quiet and sys.stderr.isatty() and self.total:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.what, total=self.total, left="")
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
                self.bar.update(self.task, completed=self.done, left=f"{self.left(now)} left")
            elif not self.quiet and now - self.said >= EVERY:
                self.said = now
                rate = f"{size(self.done / (now - self.began))}/s"
                line = f"{self.what}: {size(self.done)} of {size(self.total)}, {rate}, {self.left(now)} left\n"
                sys.stderr.write(line)
                sys.stderr.flush()

    def left(self, now: float) -> str:
        """The time left, with that of later steps (`after`), at the rate so far."""
        rest = max(0, self.total - self.done) + self.after
        return clock(rest * (now - self.began) / self.done if self.done else 0.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()
