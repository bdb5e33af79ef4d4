"""A sample of a stream of unknown length, in memory that does not grow with the stream.

Record number n of the stream (counted from 0, after everything that drops records) has the priority

    BLAKE2b-64("SEED:n"), its 8 bytes read as a big-endian number

and a sample of N is the N records of lowest priority, in the order of the stream. There is no random number generator,
so the sample is the same on every machine, in every version and in any other program that does the same; and a sample
of 1000 is a subset of the sample of 2000 with the same seed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import IO

SPARE = 4096
"""Number of candidates beyond twice the sample that are kept before the worst are dropped."""


class Sample:
    """Draws a sample of lines. Candidates are in a file, with 24 bytes of memory for each, at most 2 N + SPARE.

    Attributes:
        number: number of lines offered so far.
    """

    def __init__(self, count: int, seed: int, file: IO[bytes]) -> None:
        self.count, self.seed, self.file = count, seed, file
        self.number, self.end, self.limit = 0, 0, 1 << 64
        self.priorities, self.starts, self.sizes = array("Q"), array("Q"), array("Q")

    def offer(self, line: bytes) -> None:
        """Consider the next line of the stream."""
        digest = blake2b(b"%d:%d" % (self.seed, self.number), digest_size=8).digest()
        priority = int.from_bytes(digest, "big")
        self.number += 1
        if priority >= self.limit:
            return
        self.file.write(line)
        self.priorities.append(priority)
        self.starts.append(self.end)
        self.sizes.append(len(line))
        self.end += len(line)
        if len(self.priorities) >= 2 * self.count + SPARE:
            self._forget()

    def lines(self) -> Iterator[bytes]:
        """The lines of the sample, in the order of the stream."""
        self._forget()
        for start, nbytes in zip(self.starts, self.sizes, strict=True):
            self.file.seek(start)
            yield self.file.read(nbytes)

    def _forget(self) -> None:
        """Keep the `count` candidates of lowest priority, the earlier ones of equal priority."""
        if len(self.priorities) <= self.count:
            return
        import numpy as np

        priorities = np.frombuffer(self.priorities, np.uint64)
        best = np.sort(np.argsort(priorities, kind="stable")[: self.count])
        self.limit = int(priorities[best].max())
        for name in ("priorities", "starts", "sizes"):
            chosen = array("Q")
            chosen.frombytes(np.frombuffer(getattr(self, name), np.uint64)[best].tobytes())
            setattr(self, name, chosen)
