"""Files that are read at any offset: files of the disk, and objects of a store that are read by ranges.

A path that is not on the disk has a method `ranges`, which opens its object (`converters.remote.path`). All reads at
offsets use this file, so that no reader of a format depends on where the bytes come from.
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
    """Size of the object, in bytes."""
    identity: str
    """Text that changes whenever the object changes."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer from an offset. Returns the number of bytes, which is 0 only at the end."""

    def close(self) -> None:
        """Discard the bytes that were read ahead."""


Handle = int | Ranges
"""An open file: its descriptor, or the object of a store."""


def open_handle(path: Path) -> Handle:
    """Open a file for reading. Raises OSError if it cannot be opened."""
    ranges = getattr(path, "ranges", None)
    if ranges is None:
        return os.open(path, os.O_RDONLY)
    handle: Ranges = ranges()
    return handle


def close_handle(handle: Handle) -> None:
    """Close a handle of `open_handle`."""
    if isinstance(handle, int):
        os.close(handle)
    else:
        handle.close()


def dangling(path: Path) -> str:
    """What to say of a link that leads nowhere, as in half a copy of the Hub's cache; empty for any other path."""
    return (
        f"{path} is a link to {path.readlink()}, which is not there" if path.is_symlink() and not path.exists() else ""
    )


def is_remote(path: Path) -> bool:
    """Whether a path is of a store, not of the disk."""
    return hasattr(path, "ranges")


@contextmanager
def opened(path: Path) -> Iterator[Handle]:
    """Open a file for reading, and close it at the end."""
    handle = open_handle(path)
    try:
        yield handle
    finally:
        close_handle(handle)


def size_of(handle: Handle) -> int:
    """Size of an open file, in bytes."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def read_at(handle: Handle, buffer: memoryview, offset: int) -> int:
    """Read into a buffer from an offset. Returns the number of bytes, which is 0 only at the end."""
    return os.preadv(handle, [buffer], offset) if isinstance(handle, int) else handle.read_at(buffer, offset)


def pread(handle: Handle, count: int, offset: int) -> bytes:
    """Read `count` bytes from an offset; fewer at the end of the file."""
    if isinstance(handle, int):
        return os.pread(handle, count, offset)
    raw, done = bytearray(count), 0
    while done < count and (got := handle.read_at(memoryview(raw)[done:], offset + done)):
        done += got
    return bytes(raw[:done])


def preadv(handle: Handle, buffers: Sequence[memoryview], offset: int) -> None:
    """Read into consecutive buffers from an offset. Buffers stay unchanged past the end of the file."""
    if isinstance(handle, int):
        os.preadv(handle, buffers, offset)
        return
    for buffer in buffers:
        done = 0
        while done < len(buffer) and (got := handle.read_at(buffer[done:], offset + done)):
            done += got
        offset += len(buffer)


def prefetch(paths: Iterable[Path]) -> None:
    """Announce that the heads of files will be read: those of a store are requested together."""
    by_store: dict[type[Path], list[Path]] = {}
    for path in paths:
        if is_remote(path):
            by_store.setdefault(type(path), []).append(path)
    for kind, paths_of_store in by_store.items():
        kind.ahead(paths_of_store)  # type: ignore[attr-defined]  # of a kind that has `ranges`
