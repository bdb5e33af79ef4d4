"""Files that are read at any offset: those of the disk, and objects of a store that are read by ranges.

A path that is no path of the disk has a method `ranges`, which opens it (`converters.remote.path`). Everything that
reads at offsets goes through here, so no reader of a format knows where its bytes come from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Ranges(Protocol):
    """An object of a store, read by ranges from any number of threads."""

    size: int
    """Bytes."""
    identity: str
    """What changes whenever the object does."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer from an offset on. Returns how many bytes; 0 at the end alone."""

    def close(self) -> None:
        """Give up what was read ahead."""


Handle = int | Ranges
"""An open file: its descriptor, or the object that stands for it."""


def open_handle(path: Path) -> Handle:
    """Open a file to read. Raises OSError where it cannot be."""
    ranges = getattr(path, "ranges", None)
    if ranges is None:
        return os.open(path, os.O_RDONLY)
    handle: Ranges = ranges()
    return handle


def close_handle(handle: Handle) -> None:
    """Close what `open_handle` opened."""
    if isinstance(handle, int):
        os.close(handle)
    else:
        handle.close()


def is_elsewhere(path: Path) -> bool:
    """Whether a path is of a store, and not of the disk."""
    return hasattr(path, "ranges")


@contextmanager
def opened(path: Path) -> Iterator[Handle]:
    """A file that is open for a while."""
    handle = open_handle(path)
    try:
        yield handle
    finally:
        close_handle(handle)


def size_of(handle: Handle) -> int:
    """Bytes of an open file."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def read_at(handle: Handle, buffer: memoryview, offset: int) -> int:
    """Read into a buffer from an offset on. Returns how many bytes; 0 at the end alone."""
    return os.preadv(handle, [buffer], offset) if isinstance(handle, int) else handle.read_at(buffer, offset)


def pread(handle: Handle, count: int, offset: int) -> bytes:
    """The bytes from an offset on, fewer at the end."""
    if isinstance(handle, int):
        return os.pread(handle, count, offset)
    raw, done = bytearray(count), 0
    while done < count and (got := handle.read_at(memoryview(raw)[done:], offset + done)):
        done += got
    return bytes(raw[:done])


def preadv(handle: Handle, buffers: Sequence[memoryview], offset: int) -> None:
    """Read into buffers, one after the other, from an offset on. What is behind the end stays as it is."""
    if isinstance(handle, int):
        os.preadv(handle, buffers, offset)
        return
    for buffer in buffers:
        done = 0
        while done < len(buffer) and (got := handle.read_at(buffer[done:], offset + done)):
            done += got
        offset += len(buffer)


def soon(paths: Iterable[Path]) -> None:
    """Say that the heads of files will be read: those of a store are asked for together."""
    by_store: dict[type[Path], list[Path]] = {}
    for path in paths:
        if is_elsewhere(path):
            by_store.setdefault(type(path), []).append(path)
    for kind, paths_of_store in by_store.items():
        kind.ahead(paths_of_store)  # type: ignore[attr-defined]  # of a kind that has `ranges`
