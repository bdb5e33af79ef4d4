"""An object that is read at any offset: neighbouring reads become one request, and what follows is asked for ahead.

A read that finds nothing fetches a window from its offset on. The window is small at first, so that a header costs
kilobytes, and twice as large whenever a read begins where the last one ended. Of one that has grown the next window is
fetched meanwhile. All windows of the process share a bound: with many files open each gets smaller ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import lru_cache

from converters.remote.store import Entry, Store

BOUND = 32 << 20
"""Bytes of all windows together."""
SMALLEST, LARGEST = 16 << 10, 4 << 20
"""Bytes of a window."""
GROWN = 256 << 10
"""From this size on the next one is fetched ahead."""
FETCHERS = 8


@lru_cache(maxsize=1)
def fetchers() -> ThreadPoolExecutor:
    """What fetches ahead."""
    return ThreadPoolExecutor(FETCHERS, "fetch")


class Window:
    """Bytes of an object, or the promise of them."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.content: Future[memoryview] = Future()
        self.begun = False
        self.follows = stop - start >= GROWN
        """Whether the next one is to be fetched when this one is used once more."""


class Cache:
    """The windows of all objects, the oldest of which make room."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: OrderedDict[tuple[int, int], tuple[Object, Window]] = OrderedDict()
        self.nbytes = 0
        self.objects: dict[int, int] = {}
        """How many windows each object has."""

    def largest(self) -> int:
        """How large a window may be now."""
        return max(SMALLEST, min(LARGEST, BOUND // (4 * max(1, len(self.objects)))))

    def keep(self, owner: Object, window: Window) -> None:
        """Hold a window; the lock is held."""
        self.held[id(owner), window.start] = owner, window
        self.objects[id(owner)] = self.objects.get(id(owner), 0) + 1
        self.nbytes += window.stop - window.start
        while self.nbytes > BOUND and len(self.held) > 1:
            self.drop(*next(iter(self.held.values())))

    def drop(self, owner: Object, window: Window) -> None:
        """Forget a window; the lock is held."""
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
    """An object of a store that is open (`formats.disk.handle.Ranges`)."""

    def __init__(self, store: Store, key: str, entry: Entry, head: Future[memoryview] | None = None) -> None:
        self.store, self.key, self.entry, self.head = store, key, entry, head
        self.size, self.identity = entry.size, f"{store.url}/{key} {entry.size} {entry.identity}"
        self.windows: list[Window] = []
        self.ends: dict[int, int] = {}
        """Where a window ended: how large it was."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer (`Ranges`)."""
        count = min(len(buffer), self.size - offset)
        done = 0
        while done < count:
            window = self._window(offset + done, count - done)
            self._fill(window)
            try:
                content = window.content.result()
            except CancelledError:  # it had to make room before anybody fetched it
                continue
            piece = content[offset + done - window.start :][: count - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return max(0, done)

    def close(self) -> None:
        """Give up what was read ahead (`Ranges`)."""
        with CACHE.lock:
            for window in [*self.windows]:
                CACHE.drop(self, window)

    def _window(self, at: int, size: int) -> Window:
        """The window that a byte is in."""
        with CACHE.lock:
            for window in self.windows:
                if window.start <= at < window.stop:
                    if window.follows:
                        window.follows = False
                        self._ahead(window)
                    return window
            return self._new(at, size)

    def _new(self, at: int, size: int) -> Window:
        """A window from a byte on, no further than where the next one begins; the lock is held."""
        grown = min(2 * self.ends.pop(at, SMALLEST // 2), CACHE.largest())
        after = min(
            (window_before.start for window_before in self.windows if window_before.start > at), default=self.size
        )
        window = Window(at, min(at + max(grown, size), after, self.size))
        self.ends[window.stop] = window.stop - window.start
        self.windows.append(window)
        CACHE.keep(self, window)
        return window

    def _ahead(self, window: Window) -> None:
        """Fetch what follows a window; the lock is held."""
        if window.stop < self.size and not any(other.start <= window.stop < other.stop for other in self.windows):
            fetchers().submit(self._fill, self._new(window.stop, 0))

    def _fill(self, window: Window) -> None:
        """Fetch a window, if nobody does. An error is for whoever waits for it, and the window is gone then."""
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
