"""Keep work safe when it is interrupted: deferred signals, one process per folder, and files forced to disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from formats.errors import OutputError

REPLACED = "replaced"
"""The folder in a staging folder that holds what OUT was, while the new one is put in its place."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask for an end: of a scheduler, a terminal, and Slurm before the time limit (`--signal=USR1@300`)."""


@contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Iterable[int] = STOPS
) -> Iterator[None]:
    """A context in which a handler answers signals. Only the main thread may set one: in any other nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """A context in which signals let the running jobs finish. Yields a function that tells whether a signal came."""
    came = threading.Event()
    with handling_signals(lambda *_: came.set()):
        yield came.is_set


def lock(handle: int, what: object, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock a file, so that no other process works on the same thing, as long as the file is open.

    Args:
        handle: the descriptor of the file.
        what: the name in an error of what is locked, such as the folder.
        shared: take a lock that several processes may share.
        wait: wait until no other process has the lock.

    Returns:
        Whether the file system has locks.

    Raises:
        OutputError: another process has the lock.
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


@contextmanager
def claimed(folder: Path, mark: str) -> Iterator[None]:
    """A context in which no other process works in a staging folder, which is made if it is not there.

    Args:
        folder: the folder.
        mark: name of the file in it that is locked. It is made first and deleted last (`discard`): a folder that has
            files and lacks it is somebody else's.

    Raises:
        OutputError: another process works in the folder, or it holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / mark).is_file():
        raise OutputError(f"{folder} is needed for the work and holds something else", "move it out of the way")
    handle = os.open(folder / mark, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, folder)
        if not (folder / mark).exists() or not os.path.samestat(os.fstat(handle), (folder / mark).stat()):
            raise OutputError(f"another process has just ended its work in {folder}", "run the same command again")
        yield
    finally:
        os.close(handle)
        if not (folder / mark).exists():
            with suppress(OSError):  # another process has begun to work in it
                folder.rmdir()


def discard(folder: Path, mark: str) -> None:
    """Delete all that a claimed folder holds; the folder itself goes when it is no longer claimed."""
    clear(folder, mark)
    (folder / mark).unlink()


def clear(folder: Path, mark: str) -> None:
    """Delete all that a claimed folder holds, but for its mark."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != mark:
            path.unlink()


def write_all(handle: int, content: bytes) -> None:
    """Write all bytes: a single write may be cut short, as by a full disk."""
    while content:
        content = content[os.write(handle, content) :]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A context that adds this path to an OSError without a file name."""
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
    """Write a small file in one step: it has all of the new content, or is as before."""
    staged = path.with_name(path.name + ".tmp")
    with named(path), synced(staged) as file:
        file.write(content)
    staged.rename(path)


def put_in_place(new: Path, place: Path, staging: Path) -> None:
    """Rename a finished folder to its place; a folder that is there is moved into `staging` first, and back on failure.

    Raises:
        OSError: the folder could not be renamed.
    """
    put_back(place, staging)
    aside = staging / REPLACED
    if aside.exists():  # of a run that was killed after both renames
        shutil.rmtree(aside)
    if place.is_dir() and _is_taken(place):  # a file that was made meanwhile is not ours to move
        place.rename(aside)
    try:
        new.rename(place)
    except OSError:
        put_back(place, staging)
        raise


def put_back(place: Path, staging: Path) -> None:
    """Rename what a run has moved out of its place into `staging` back there, if that run was killed just then."""
    aside = staging / REPLACED
    if aside.exists() and not _is_taken(place):
        aside.rename(place)  # POSIX renames a folder onto an empty one too


def _is_taken(place: Path) -> bool:
    return place.exists() and not (place.is_dir() and not any(place.iterdir()))


def sync_path(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
