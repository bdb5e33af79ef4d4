"""What keeps work safe while it is interrupted: signals that wait, one process a folder, and names forced to disk."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from formats.errors import OutputError

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks for an end: a scheduler, a terminal, and Slurm some time before the limit (`--signal=USR1@300`)."""


@contextmanager
def answered(handler: Callable[[int, FrameType | None], object], numbers: Iterable[int] = STOPS) -> Iterator[None]:
    """Answer signals. Only the main thread may: any other leaves them as they are."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Signals let the running jobs finish. Yields a function that says whether one came."""
    came = threading.Event()
    with answered(lambda *_: came.set()):
        yield came.is_set


def lock(handle: int, what: object, *, shared: bool = False, wait: bool = False) -> bool:
    """Be the only process that works on something, as long as the handle of a file in it is open.

    Args:
        handle: of the file.
        what: how an error calls it, such as the folder.
        shared: work beside others that share it too.
        wait: until no other process works on it.

    Returns:
        Whether the file system has locks.

    Raises:
        OutputError: another process works on it.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise OutputError(f"another process is writing {what}", "wait until it has ended") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
            raise
        return False
    return True


def write_all(handle: int, content: bytes) -> None:
    """Append all of it: a full disk can cut a write short."""
    while content:
        content = content[os.write(handle, content) :]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of the system that does not tell which file it is about is about this one."""
    try:
        yield
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, forced to disk once it is complete."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Write a small file in one step: it is there as a whole, or as it was before."""
    staged = path.with_name(path.name + ".tmp")
    with named(path), synced(staged) as file:
        file.write(content)
    staged.rename(path)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
