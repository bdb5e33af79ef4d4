"""CRC-32 of a storage that is written in any order, by any number of threads.

A CRC without its initial and final inversion is linear: the CRC of a storage is the sum (exclusive or) of those of its
pieces, each multiplied by x^(8n) for the n bytes behind it, and bytes that are never written are zeros and add nothing.
The arithmetic is that of polynomials over GF(2) modulo the CRC's, in the reflected form that zlib uses.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect
from collections.abc import Iterable
from pathlib import Path

from formats.checkpoint import OutputFile
from formats.storage import Fragment, read_into

POLYNOMIAL = 0xEDB88320
ONES = 0xFFFFFFFF
STEP = 1 << 20
"""Bytes that are read at a time."""
SMALL, MANY = 16 << 10, 256
"""A storage of more than so many pieces of fewer bytes is cheaper to read once more."""


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials; bit 31 is x^0."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & ONES
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


_SQUARES = [0x40000000]  # x^(2^k)
for _ in range(31):
    _SQUARES.append(_multiply(_SQUARES[-1], _SQUARES[-1]))


def shift(crc: int, nbytes: int) -> int:
    """What a CRC register becomes after so many zero bytes."""
    power, k = nbytes, 3
    while power:
        if power & 1:
            crc = _multiply(_SQUARES[k % 32], crc)
        power >>= 1
        k += 1
    return crc


class Checksums:
    """The running CRC-32 of every storage that needs one."""

    def __init__(self, files: Iterable[OutputFile]) -> None:
        self.sizes = {(file.path, offset): size for file in files for offset, size in file.checksums.values()}
        self.sums = dict.fromkeys(self.sizes, 0)
        self.small = dict.fromkeys(self.sizes, 0)
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
        register = shift(zlib.crc32(piece, ONES) ^ ONES, self.sizes[key] - at - len(piece))
        with self.lock:
            self.sums[key] ^= register
            self.small[key] += len(piece) < SMALL

    def forget(self, fragment: Fragment) -> None:
        """Count no more of the storage of a tensor, bytes of which are written more than once."""
        key = self._storage(fragment)
        if key is not None:
            self.small[key] = MANY

    def _storage(self, fragment: Fragment) -> tuple[Path, int] | None:
        starts = self.starts.get(fragment.path, ())
        return (fragment.path, starts[bisect(starts, fragment.offset) - 1]) if starts else None

    def get(self, path: Path, offset: int) -> int | None:
        """The CRC-32 of a storage; None where reading it is cheaper."""
        key = (path, offset)
        if self.small[key] >= MANY:
            return None
        return self.sums[key] ^ shift(ONES, self.sizes[key]) ^ ONES


def crc_of(fd: int, offset: int, nbytes: int, path: Path) -> int:
    """The CRC-32 of a byte range of a file, read once."""
    crc, buffer = 0, bytearray(min(STEP, nbytes))
    for position in range(0, nbytes, STEP):
        piece = memoryview(buffer)[: min(STEP, nbytes - position)]
        read_into(fd, piece, offset + position, path)
        crc = zlib.crc32(piece, crc)
    return crc
