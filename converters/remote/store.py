"""What a store is to a path: folders that are listed, and objects that are read by ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """An object: its size in bytes, and what changes whenever it does (an ETag, the hash of its content)."""

    size: int
    identity: str


class Store(Protocol):
    """A bucket, a server or a repository, as it was when it was first asked."""

    url: str
    """How the paths in it begin."""

    def listed(self, folder: str) -> Mapping[str, Entry | None]:
        """What is in a folder, by name; None for a folder. Nothing in one that is not there."""

    def found(self, key: str) -> Entry | None:
        """An object, without a list of its folder."""

    def fetch(self, key: str, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes of an object.

        Raises:
            SourceError: it is gone, or another one than that entry was.
            NetworkError: it cannot be reached.
            UsageError: it may not be read.
        """
