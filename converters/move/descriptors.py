"""Open files: at most as many at a time as the process may have, however many ranks a checkpoint is of.

A file is opened when it is first needed. When there are too many, those that were not used for longest are closed; data
that was written to them is forced to disk first, since an error that the disk reports after that would not be seen.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from formats.disk.handle import Handle, close_handle, open_handle
from formats.errors import OutputError, SourceError, hint_of

RESERVE = 64
"""Descriptors that are left to everything else: libraries, journals, threads that read directories."""

_Key = tuple[Path, bool]


class Descriptors:
    """Open files, shared by all threads."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.most = max(8, max(soft, hard) - RESERVE)
        self.held: dict[_Key, Handle] = {}
        """Open handles in the order of their use, the latest last."""
        self.used: dict[_Key, int] = {}
        self.fresh: set[_Key] = set()
        self.outputs: set[Path] = set()
        """Files that were opened to be written."""
        self.lock = threading.Lock()

    @contextmanager
    def open(self, path: Path, writable: bool = False) -> Iterator[Handle]:
        """The handle of a file, which stays open while the context is entered.

        Raises:
            OutputError: a file of the output cannot be opened, to be written or read again.
            SourceError: another file cannot be opened.
        """
        with self._used((path, writable)) as fd:
            try:
                yield fd
            finally:
                if writable:
                    with self.lock:
                        self.fresh.add((path, writable))

    def written(self, paths: Iterable[Path]) -> None:
        """Force files that another process has written to disk at the next sync too."""
        with self.lock:
            self.fresh.update((path, True) for path in paths)

    def sync(self) -> None:
        """Force to disk what was written since the last call: only files that were written are synced."""
        with self.lock:
            fresh, self.fresh = self.fresh, set()
        for key in fresh:
            with self._used(key) as fd:
                _sync(fd)

    def close(self) -> None:
        """Close all open files."""
        for handle in self.held.values():
            close_handle(handle)

    @contextmanager
    def _used(self, key: _Key) -> Iterator[Handle]:
        with self.lock:
            fd = self.held.pop(key, None)
            self.held[key] = fd = self._opened(key) if fd is None else fd
            self.used[key] = self.used.get(key, 0) + 1
        try:
            yield fd
        finally:
            with self.lock:
                self.used[key] -= 1
                if not self.used[key]:
                    del self.used[key]

    def _opened(self, key: _Key) -> Handle:
        path, writable = key
        self.outputs |= {path} if writable else set()
        while len(self.held) >= self.most:
            idle = next((candidate for candidate in self.held if candidate not in self.used), None)
            if idle is None:
                break
            if idle in self.fresh:
                _sync(self.held[idle])
                self.fresh.discard(idle)
            close_handle(self.held.pop(idle))
        try:
            # Never both: to write part of a page a client of NFS would read all of it, and write all of it back over
            # what another node has put there meanwhile (Linux 6, fs/nfs/file.c and write.c).
            return os.open(path, os.O_WRONLY) if writable else open_handle(path)
        except OSError as error:
            kind = OutputError if path in self.outputs else SourceError
            raise kind(f"{path}: {error.strerror}", hint_of(error)) from None


def _sync(handle: Handle) -> None:
    """Force to disk what was written to a file."""
    assert isinstance(handle, int)
    os.fdatasync(handle)
