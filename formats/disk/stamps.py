"""Stamps of files, which are others when a file is written or replaced.

Offsets of tensors hold for the file whose header was read. So the stamp that counts is one from before that: `noted`
collects the stamps of all files whose headers are read in a context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import stat_result
from pathlib import Path
from typing import NamedTuple


class Stamp(NamedTuple):
    """Size, times and inode of a file. No program can set the ctime back."""

    size: int
    mtime: int
    ctime: int
    inode: int


_OPEN: dict[int, dict[Path, Stamp]] = {}
"""The stamps of each context that has been entered; threads of it, and of others, add to all."""


def stamp_of(path: Path) -> Stamp:
    """The present stamp of a file. Raises OSError if there is none."""
    return _stamp(path.stat())


def note(path: Path, about: stat_result) -> None:
    """Note the stamp of a file of which a header will be read."""
    for stamps in tuple(_OPEN.values()):
        stamps.setdefault(path, _stamp(about))


@contextmanager
def noted() -> Iterator[dict[Path, Stamp]]:
    """A context, with the first stamp of each file of which a header is read in it."""
    stamps: dict[Path, Stamp] = {}
    _OPEN[id(stamps)] = stamps
    try:
        yield stamps
    finally:
        del _OPEN[id(stamps)]


def _stamp(about: stat_result) -> Stamp:
    return Stamp(about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
