"""CRC-32 of a storage that is written in any order, by any number of threads; bytes that are not written are zeros."""

from __future__ import annotations

import threading
from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from formats.checkpoint import OutputFile
from formats.disk.safetensors import Fragment
from formats.torch_files import crc32

SMALL, MANY = 16 << 10, 256
"""A storage with `MANY` pieces of fewer than `SMALL` bytes is cheaper to read once more than to count."""


Sizes = dict[tuple[Path, int], int]
"""Bytes of each storage that needs a checksum, by its file and its first byte."""
Counted = dict[tuple[Path, int], tuple[int, int]]
"""Of each storage the register of the counted bytes, combined by exclusive or, and how many small pieces there were."""


def sizes_of(files: Iterable[OutputFile]) -> Sizes:
    """The storages of some files that need a checksum."""
    return {(file.path, offset): size for file in files for offset, size in file.checksums.values()}


class Checksums:
    """The running CRC-32 of every storage that needs one."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.sums, self.small = Counter[tuple[Path, int]](), Counter[tuple[Path, int]]()
        self.starts: dict[Path, list[int]] = {}
        for path, offset in sorted(self.sizes):
            self.starts.setdefault(path, []).append(offset)
        self.lock = threading.Lock()

    def add(self, fragment: Fragment, at: int, piece: memoryview) -> None:
        """Count a piece that was written `at` bytes into a tensor, which may be one of several in a storage."""
        key = self._storage(fragment)
        if key is None or self.small[key] >= MANY:
            return
        at += fragment.offset - key[1]
        register = crc32.part(piece, self.sizes[key] - at - len(piece))
        with self.lock:
            self.sums[key] ^= register
            self.small[key] += len(piece) < SMALL

    def taken(self) -> Counted:
        """The registers and counts since the last call, for another process to merge."""
        with self.lock:
            counted = {key: (self.sums[key], self.small[key]) for key in {*self.sums, *self.small}}
            self.sums.clear()
            self.small.clear()
        return counted

    def merge(self, counted: Counted) -> None:
        """Add what another process has counted."""
        with self.lock:
            for key, (register, small) in counted.items():
                self.sums[key] ^= register
                self.small[key] += small

    def forget(self, fragment: Fragment) -> None:
        """Stop counting the storage of a tensor, since bytes of the storage are written more than once."""
        key = self._storage(fragment)
        if key is not None:
            with self.lock:  # `add` of another thread writes what it has read before
                self.small[key] = MANY

    def _storage(self, fragment: Fragment) -> tuple[Path, int] | None:
        starts = self.starts.get(fragment.path, ())
        return (fragment.path, starts[bisect(starts, fragment.offset) - 1]) if starts else None

    def get(self, path: Path, offset: int) -> int | None:
        """The CRC-32 of a storage; None where reading it is cheaper."""
        key = (path, offset)
        if self.small[key] >= MANY:
            return None
        return crc32.crc_from_sum(self.sums[key], self.sizes[key])
