"""The CRC-32 that zip archives keep of their entries, compared with the bytes that a conversion reads.

Bytes are counted as they pass, in any order and from any number of threads, and each byte once: tensors are read in
tiles, and bytes between two wanted ones more than once. What of an entry no tile has read (padding, a part that no
tensor is in, many small pieces, what a run before this one has read) is read at the end, in the order of the file. So
every entry that a tensor is read from is compared as a whole.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from converters.plan import Job
from formats import crc32
from formats.errors import DamagedError, Interrupted, some
from formats.storage import Fragment, Member

SMALL = 16 << 10
"""A piece of fewer bytes is cheaper to read once more than to count."""
Read = Callable[[Fragment, int, memoryview], None]
"""Reads bytes of a fragment, from an offset in it."""


class Verdict(NamedTuple):
    """What was compared: entries with a checksum, all of them sound; entries without one; tensors in no archive."""

    entries: int
    unrecorded: int
    without: int

    @property
    def word(self) -> str:
        """What came of it, for all entries that have a checksum."""
        return "verified" if self.entries else "none recorded" if self.unrecorded else "none in this format"

    def record(self) -> dict[str, str | int]:
        """The same for a program."""
        return {"checked": self.word, **self._asdict()}

    def __str__(self) -> str:
        rest = [f"{self.unrecorded} of {self.entries + self.unrecorded} entries have none"] if self.unrecorded else []
        rest += [f"{self.without} parts of tensors are in no archive"] if self.without else []
        return "; ".join([self.word, *rest]) if self.entries else self.word


@dataclass
class _Entry:
    """An entry that is not complete: what of it was counted, as starts and stops in turn, and what that adds up to."""

    left: int
    bounds: list[int] = field(default_factory=list)
    register: int = 0


class SourceChecks:
    """The entries that the tensors of some jobs are in, and which of them are sound.

    Args:
        jobs: all of a conversion, those that an earlier run has done too.
        replicas: whether further copies of a tensor are read.
        sound: names of the entries that an earlier run found sound.
    """

    def __init__(self, jobs: Iterable[Job], replicas: str = "verify", sound: Collection[str] = ()) -> None:
        self.jobs, self.copies = tuple(jobs), replicas != "first"
        self.sound, self.fresh = set(sound), list[str]()
        self.entries: dict[str, _Entry] = {}
        self.lock = threading.Lock()

    def passed(self, fragment: Fragment, at: int, piece: memoryview) -> None:
        """Count bytes that were read `at` bytes into a fragment.

        Raises:
            DamagedError: they complete an entry, and its CRC-32 is another.
        """
        member = fragment.member
        if member is not None and member.crc and len(piece) >= min(SMALL, member.size):
            self._count(fragment, member, fragment.offset + at - member.start, piece)

    def noted(self) -> list[str]:
        """The names of the entries that were found sound since the last time."""
        with self.lock:
            fresh, self.fresh = self.fresh, []
        return fresh

    def complete(self, read: Read, threads: int, stop: Callable[[], bool] = lambda: False) -> Verdict:
        """Read what was not read yet of the entries.

        Args:
            read: how.
            threads: entries at a time.
            stop: asked at every block; when true, nothing further is read.

        Raises:
            DamagedError: an entry has another CRC-32 than its archive says.
            Interrupted: `stop` was true.
        """
        held, without = dict[str, tuple[Fragment, Member]](), 0
        for fragment in self._fragments():
            if fragment.member is not None:
                held.setdefault(_name(fragment), (fragment, fragment.member))
            else:
                without += 1
        recorded = {name: pair for name, pair in held.items() if pair[1].crc}
        left = [(name, *pair) for name, pair in recorded.items() if name not in self.sound]

        def rest(name: str, fragment: Fragment, member: Member) -> None:
            entry, buffer = self.entries.get(name), memoryview(bytearray(min(crc32.STEP, member.size)))
            for low, high in claim(list(entry.bounds) if entry else [], 0, member.size):
                for start in range(low, high, crc32.STEP):
                    if stop():
                        raise Interrupted("stopped by a signal", "run the same command again to resume")
                    piece = buffer[: min(crc32.STEP, high - start)]
                    read(fragment, member.start + start - fragment.offset, piece)
                    self._count(fragment, member, start, piece)

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(rest, *one) for one in sorted(left, key=lambda one: (one[1].path, one[2].start))]:
                done.result()
        empty = sum(not pair[1].size for pair in held.values())
        return Verdict(len(recorded), len(held) - len(recorded) - empty, without)

    def _count(self, fragment: Fragment, member: Member, low: int, piece: memoryview) -> None:
        name = _name(fragment)
        with self.lock:
            if name in self.sound:
                return
            entry = self.entries.setdefault(name, _Entry(member.size))
            fresh = claim(entry.bounds, low, low + len(piece))
        register = 0
        for start, stop in fresh:
            register ^= crc32.part(piece[start - low : stop - low], member.size - stop)
        with self.lock:
            entry.register ^= register
            entry.left -= sum(stop - start for start, stop in fresh)
            complete = bool(fresh) and not entry.left
            if complete:
                del self.entries[name]
                self.sound.add(name)
        if complete:
            self._judge(fragment, member, crc32.whole(entry.register, member.size))
            with self.lock:
                self.fresh.append(name)

    def _judge(self, fragment: Fragment, member: Member, found: int) -> None:
        if found == member.crc:
            return
        name, path = _name(fragment), fragment.path
        inside = [job.name for job in self.jobs if any(_name(one) == name for one in self._of(job) if one.member)]
        raise DamagedError(
            f"{path} is damaged: the {member.size} bytes at byte {member.start} ({some(inside, 3)}) have the CRC-32 "
            f"{found:08x}, the file says {member.crc:08x}",
            f"copy it again, or take another checkpoint; `convert verify {path.parent}` lists all that is damaged",
        )

    def _fragments(self) -> Iterator[Fragment]:
        for job in self.jobs:
            yield from self._of(job)

    def _of(self, job: Job) -> Iterator[Fragment]:
        """Every fragment that a job reads."""
        copies = chain(*job.replicas.values(), job.twins) if self.copies or job.partial else ()
        for part in chain(job.sources, copies):
            yield part.fragment
            if part.fragment.scales is not None:
                yield part.fragment.scales.factors


def claim(bounds: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """Add an interval to a set of them, given as starts and stops in turn. Returns what of it is new."""
    first, last = bisect_left(bounds, low), bisect_right(bounds, high)
    start, stop = ([low] if first % 2 == 0 else []), ([high] if last % 2 == 0 else [])
    edges = [*start, *bounds[first:last], *stop]
    bounds[first:last] = [*start, *stop]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _name(fragment: Fragment) -> str:
    """What an entry is called in a journal."""
    member, stream = fragment.member, fragment.stream
    assert member is not None
    return f"{fragment.path}:{stream.start if stream else ''}:{member.start}"
