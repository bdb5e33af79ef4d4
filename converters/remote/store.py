"""The interface of a store to paths: listings of folders, and objects that are read by ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """An object: its size in bytes, and an identity that changes with its content (an ETag, a hash)."""

    size: int
    identity: str


class Store(Protocol):
    """A bucket, a server or a repository."""

    url: str
    """The beginning of all paths in the store."""

    def list_folder(self, folder: str) -> Mapping[str, Entry | None]:
        """The entries of a folder by name; None for a folder. Empty if there is no such folder."""

    def stat(self, key: str) -> Entry | None:
        """The entry of an object, found without listing its folder; None if there is no such object."""

    def fetch(self, key: str, entry: Entry, start: int, stop: int) -> memoryview:
        """Bytes of an object.

        Raises:
            SourceError: the object is gone, or has changed since it was listed as `entry`.
            NetworkError: the store cannot be reached.
            UsageError: the object may not be read.
        """
