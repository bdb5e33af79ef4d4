"""Read an object at any offset: neighbouring reads become one request, and sequential reads are fetched ahead.

A read outside all windows fetches a window from its offset on. The window is small at first, so that a header costs
kilobytes, and twice as large whenever a read begins where the last window ended. When a window that has grown is used
again, the next one is fetched ahead. All windows of the process share a bound: with many open files each gets smaller
windows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from functools import lru_cache

from converters.remote.store import Entry, Store
from formats.disk.threads import Threads

BOUND = 32 << 20
"""Bytes of all windows together."""
SMALLEST, LARGEST = 16 << 10, 4 << 20
"""Least and most bytes of a window."""
GROWN = 256 << 10
"""Bytes of a window from which on the next one is fetched ahead."""
FETCHERS = 8


@lru_cache(maxsize=1)
def fetchers() -> Threads:
    """The thread pool that fetches ahead."""
    return Threads(FETCHERS, "fetch")


class Window:
    """A range of bytes of an object, which are fetched or being fetched."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.content: Future[memoryview] = Future()
        self.begun = False
        self.follows = stop - start >= GROWN
        """Whether the next window is to be fetched when this one is used again."""


class Cache:
    """The windows of all objects; the oldest are dropped to make room."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: OrderedDict[tuple[int, int], tuple[Object, Window]] = OrderedDict()
        self.nbytes = 0
        self.objects: dict[int, int] = {}
        """How many windows each object has."""

    def largest(self) -> int:
        """Most bytes of a new window, given the number of open objects."""
        return max(SMALLEST, min(LARGEST, BOUND // (4 * max(1, len(self.objects)))))

    def keep(self, owner: Object, window: Window) -> None:
        """Add a window; the caller has the lock."""
        self.held[id(owner), window.start] = owner, window
        self.objects[id(owner)] = self.objects.get(id(owner), 0) + 1
        self.nbytes += window.stop - window.start
        while self.nbytes > BOUND and len(self.held) > 1:
            self.drop(*next(iter(self.held.values())))

    def drop(self, owner: Object, window: Window) -> None:
        """Remove a window; the caller has the lock."""
        if self.held.pop((id(owner), window.start), None) is None:
            return
        owner.windows.remove(window)
        self.nbytes -= window.stop - window.start
        self.objects[id(owner)] -= 1
        if not self.objects[id(owner)]:
            del self.objects[id(owner)]
        if not window.begun:
            window.begun = True
            window.content.cancel()


CACHE = Cache()


class Object:
    """An open object of a store (`formats.disk.handle.Ranges`)."""

    def __init__(self, store: Store, key: str, entry: Entry, head: Future[memoryview] | None = None) -> None:
        self.store, self.key, self.entry, self.head = store, key, entry, head
        self.size, self.identity = entry.size, f"{store.url}/{key} {entry.size} {entry.identity}"
        self.windows: list[Window] = []
        self.ends: dict[int, int] = {}
        """End of a window: its size."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer (`Ranges`)."""
        count = min(len(buffer), self.size - offset)
        done = 0
        while done < count:
            window = self._window(offset + done, count - done)
            self._fill(window)
            try:
                content = window.content.result()
            except CancelledError:  # the window was dropped before it was fetched
                continue
            piece = content[offset + done - window.start :][: count - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return max(0, done)

    def close(self) -> None:
        """Drop all windows of the object (`Ranges`)."""
        with CACHE.lock:
            for window in [*self.windows]:
                CACHE.drop(self, window)

    def _window(self, at: int, size: int) -> Window:
        """The window that contains a byte, a new one if there is none."""
        with CACHE.lock:
            for window in self.windows:
                if window.start <= at < window.stop:
                    if window.follows:
                        window.follows = False
                        self._ahead(window)
                    return window
            return self._new(at, size)

    def _new(self, at: int, size: int) -> Window:
        """A new window from a byte on, up to the next window at most; the caller has the lock."""
        grown = min(2 * self.ends.pop(at, SMALLEST // 2), CACHE.largest())
        next_start = min((other.start for other in self.windows if other.start > at), default=self.size)
        window = Window(at, min(at + max(grown, size), next_start, self.size))
        self.ends[window.stop] = window.stop - window.start
        self.windows.append(window)
        CACHE.keep(self, window)
        return window

    def _ahead(self, window: Window) -> None:
        """Fetch the window that follows a window; the caller has the lock."""
        if window.stop < self.size and not any(other.start <= window.stop < other.stop for other in self.windows):
            fetchers().submit(self._fill, self._new(window.stop, 0))

    def _fill(self, window: Window) -> None:
        """Fetch a window, unless a thread already does. An error is raised in waiting threads, and drops the window."""
        with CACHE.lock:
            if window.begun:
                return
            window.begun = True
        try:
            if self.head is not None and window.start == 0 and window.stop <= SMALLEST:
                content = self.head.result()[: window.stop]
            else:
                content = self.store.fetch(self.key, self.entry, window.start, window.stop)
        except BaseException as error:
            with CACHE.lock:
                CACHE.drop(self, window)
            window.content.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            window.content.set_result(content)
