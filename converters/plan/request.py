"""The user's request for a conversion, and the limits that it keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from converters.common.cores import cores
from converters.common.progress import Tell
from formats.disk.handle import is_remote
from formats.errors import OutputError

COMMIT_SECONDS = 0.25
"""Seconds of work that a killed run may lose, after which finished work is forced to disk."""
LONGEST_NAME = 255
"""Bytes that the name of a file may have (NAME_MAX, linux/limits.h)."""
LEAST_MEMORY, EACH_MEMORY = 16 << 20, 4 << 20
"""Default bytes of all buffers: the least, and those for each thread where there are many."""
LONG = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Torch's name of the element type of a cast: the name here."""


def named_of(options: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files among the options of a command: a chat template, a tokenizer, a family of the user's own."""
    given = [options.get(name) for name in ("chat_template", "tokenizer", "family")]
    paths = [Path(getattr(place, "file", place)) for place in given if place is not None]
    return tuple(path for path in paths if path.is_file())


GONE, WHOLE = "the current folder no longer exists", "cd to another one, or name the whole path"
"""What is said of a path that depends on a current folder which was deleted, and what to do."""


def current_folder() -> Path | None:
    """The current folder; None if it was deleted, in which an absolute path is all the same."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Limits:
    """How much of the machine to use.

    Attributes:
        threads: jobs at a time.
        memory: bytes of all buffers together; None for the default.
        replicas: what to do with further copies of a tensor: `verify`, `first`, `mean`, or `drift`, the mean of copies
            that are near each other.
        finite: refuse NaN and infinity.
        accepted: the states of an optimizer that are taken even if no Adam computes them, and other deviations.
        fresh: the output files read as zeros before they are written, so that zeros need not be written.
    """

    threads: int = field(default_factory=cores)
    memory: int | None = None
    replicas: str = "verify"
    finite: bool = False
    accepted: tuple[str, ...] = ()
    fresh: bool = True

    @property
    def room(self) -> int:
        """Bytes of all buffers together."""
        return self.memory or max(LEAST_MEMORY, EACH_MEMORY * self.threads)


@dataclass(frozen=True)
class Request:
    """The user's request for an output: everything except the source.

    Attributes:
        out: the folder to write.
        cast: bf16, fp16 or fp32; None keeps each element type.
        limits: threads, memory, replica policy.
        force: replace an output that exists.
        verify: read the output back and compare.
        quiet: no progress is printed.
        tell: called with progress.
        stripes: on Lustre, files are spread over its disks by their size.
        commit_seconds: seconds after which finished work is forced to disk and recorded in the journal.
        named: files that the user named besides the source and its config, such as a chat template.
    """

    out: Path
    cast: str | None = None
    limits: Limits = field(default_factory=Limits)
    force: bool = False
    verify: bool = True
    quiet: bool = False
    tell: Tell | None = field(default=None, compare=False)
    stripes: bool = True
    commit_seconds: float = COMMIT_SECONDS
    named: tuple[Path, ...] = ()

    @cached_property
    def place(self) -> Path:
        """OUT itself, links followed when it is first asked for: the current folder may change afterwards.

        Raises:
            OutputError: OUT is the root or the current folder, which no other folder can replace; or its links lead
                in a circle; or it is relative to a folder that was deleted.
        """
        try:
            place = self.out.resolve()
        except RuntimeError:
            raise OutputError(f"the links in {self.out} lead in a circle", "name a new folder") from None
        except FileNotFoundError:
            raise OutputError(f"{self.out}: {GONE}", WHOLE) from None
        if not place.name or place == current_folder():
            raise OutputError(f"{self.out} cannot be replaced by a checkpoint", "name a new folder")
        return place

    @cached_property
    def staging(self) -> Path:
        """The folder of an unfinished output: beside OUT; in the current folder, if OUT is in an object store.

        Raises:
            OutputError: it would be in a current folder that was deleted, or its name would be too long.
        """
        if is_remote(self.place):
            here = current_folder()
            if here is None:
                raise OutputError(f"{self.out} is prepared in the current folder: {GONE}", "cd to another one")
            return here / _short_enough(re.sub(r"[^\w.@-]+", "-", str(self.place)) + ".partial")
        return self.place.with_name(_short_enough(self.place.name + ".partial"))

    @property
    def root(self) -> Path:
        """The folder in `staging` that becomes the output."""
        return self.staging / "out"


def _short_enough(name: str) -> str:
    """The name of a staging folder (OutputError: no file system has so long a name)."""
    if (length := len(os.fsencode(name))) > LONGEST_NAME:
        text = f"OUT is written as {name} first, which is {length - LONGEST_NAME} bytes too long a name"
        raise OutputError(text, "choose a shorter one")
    return name
