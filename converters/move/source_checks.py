"""Compare the CRC-32 that zip archives record of their entries with the bytes that a conversion reads.

Bytes are counted when they are read, in any order and from any number of threads, and each byte once: tensors are read
in tiles, and bytes between two wanted ones more than once. Bytes of an entry that no tile has read (padding, a part
that no tensor is in, many small pieces, what an earlier run has read) are read at the end, in the order of the file.
So every entry that a tensor is read from is compared as a whole.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from converters.plan.plan import Job
from formats.disk.safetensors import Fragment, Member
from formats.disk.threads import Threads
from formats.disk.zstd_stream import Stream
from formats.errors import DamagedError, Interrupted, some
from formats.torch_files import crc32

SMALL = 16 << 10
"""A piece of fewer bytes is cheaper to read once more than to count."""
_Key = tuple[Path, Stream | None, int]
"""Identifies an entry: its file, the stream in the file if there is one, and its first byte."""
Read = Callable[[Fragment, int, memoryview], None]
"""Reads bytes of a fragment, from an offset in it."""


class Verdict(NamedTuple):
    """How many entries have a checksum, all of them sound; how many have none; how many parts are in no archive."""

    entries: int
    unrecorded: int
    without: int

    @property
    def word(self) -> str:
        """The result in words, for all entries that have a checksum."""
        return "verified" if self.entries else "none recorded" if self.unrecorded else "none in this format"

    def record(self) -> dict[str, str | int]:
        """The result as JSON values, for programs."""
        return {"checked": self.word, **self._asdict()}

    def __str__(self) -> str:
        rest = [f"{self.unrecorded} of {self.entries + self.unrecorded} entries have none"] if self.unrecorded else []
        rest += [f"{self.without} parts of tensors are in no archive"] if self.without else []
        return "; ".join([self.word, *rest]) if self.entries else self.word


@dataclass
class Entry:
    """An entry that is not complete: bytes left, starts and stops in turn of the counted bytes, and their register."""

    left: int
    bounds: list[int] = field(default_factory=list)
    register: int = 0


Entries = dict[_Key, Entry | None]
"""The entries of which bytes were counted; None for complete ones. There may be a million of them."""


class SourceChecks:
    """The entries that the tensors of some jobs are in, and which of them are sound.

    Args:
        jobs: all jobs of a conversion, those that an earlier run has done too.
        replicas: whether further copies of a tensor are read.
        sound: names of the entries that an earlier run found sound.
    """

    def __init__(self, jobs: Iterable[Job], replicas: str = "verify", sound: Collection[str] = ()) -> None:
        self.jobs, self.copies = tuple(read for job in jobs for read in job.reads), replicas != "first"
        self.before, self.fresh = frozenset(sound), list[_Key]()
        self.entries: Entries = {}
        self.lock = threading.Lock()

    def passed(self, fragment: Fragment, at: int, piece: memoryview) -> None:
        """Count bytes that were read `at` bytes into a fragment.

        Raises:
            DamagedError: the bytes complete an entry, and its CRC-32 is not the recorded one.
        """
        member = fragment.member
        if member is not None and member.crc and len(piece) >= min(SMALL, member.size):
            self._count(fragment, member, fragment.offset + at - member.start, piece)

    def merge(self, job: Job, entries: Entries) -> None:
        """Add the counts of another process that did a job; entries whose bytes overlap are left to `complete`.

        Raises:
            DamagedError: the counts complete an entry, and its CRC-32 is not the recorded one.
        """
        fragments = {
            _key(fragment, fragment.member): (fragment, fragment.member)
            for read in job.reads
            for fragment in _read_by(read, copies=True)
            if fragment.member
        }
        for key, counted in entries.items():
            fragment, member = fragments[key]
            with self.lock:
                entry = self._entry(key, member)
                if entry is None:
                    continue
                bounds = [0, member.size] if counted is None else counted.bounds
                merged, intervals = list(entry.bounds), list(zip(bounds[::2], bounds[1::2], strict=True))
                if any(claim(merged, low, high) != [(low, high)] for low, high in intervals):
                    continue
                entry.bounds, entry.left = merged, entry.left - sum(high - low for low, high in intervals)
                entry.register ^= counted.register if counted else 0
                complete = not entry.left
                if complete:
                    self.entries[key] = None
            if complete:
                if counted is not None:  # an entry that another process has completed, that process has judged too
                    self._judge(fragment, member, crc32.crc_from_sum(entry.register, member.size))
                with self.lock:
                    self.fresh.append(key)

    def noted(self) -> list[str]:
        """The names of the entries that were found sound since the last call."""
        with self.lock:
            fresh, self.fresh = self.fresh, []
        return [_name(key) for key in fresh]

    def complete(self, read: Read, threads: int, stop: Callable[[], bool] = lambda: False) -> Verdict:
        """Read the bytes of the entries that were not counted yet.

        Args:
            read: the function that reads them.
            threads: entries at a time.
            stop: asked at every block; when true, nothing further is read.

        Raises:
            DamagedError: an entry has another CRC-32 than its archive records.
            Interrupted: `stop` was true.
        """
        left, unrecorded, without = dict[_Key, tuple[Fragment, Member]](), set[_Key](), 0
        for fragment in self._fragments():
            member = fragment.member
            if member is None:
                without += 1
            elif not member.crc:
                unrecorded.update([_key(fragment, member)] if member.size else [])
            elif self._begun(_key(fragment, member), member):
                left[_key(fragment, member)] = fragment, member

        def rest(key: _Key, fragment: Fragment, member: Member) -> None:
            entry, buffer = self.entries[key], memoryview(bytearray(min(crc32.STEP, member.size)))
            for low, high in claim(list(entry.bounds), 0, member.size) if entry else ():
                for start in range(low, high, crc32.STEP):
                    if stop():
                        raise Interrupted("stopped by a signal", "run the same command again to resume")
                    piece = buffer[: min(crc32.STEP, high - start)]
                    read(fragment, member.start + start - fragment.offset, piece)
                    self._count(fragment, member, start, piece)

        with Threads(threads) as pool:
            try:
                ordered = sorted(left, key=lambda key: (key[0], key[2]))
                for done in [pool.submit(rest, key, *left[key]) for key in ordered]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)
        return Verdict(len(self.entries), len(unrecorded), without)

    def _begun(self, key: _Key, member: Member) -> bool:
        """Whether an entry is not complete. It takes the lock: other threads that share a view may read the entry."""
        with self.lock:
            return self._entry(key, member) is not None

    def _entry(self, key: _Key, member: Member) -> Entry | None:
        """The counts of an entry, None if it is complete; the caller has the lock."""
        if key not in self.entries:
            self.entries[key] = None if self.before and _name(key) in self.before else Entry(member.size)
        return self.entries[key]

    def _count(self, fragment: Fragment, member: Member, low: int, piece: memoryview) -> None:
        key = _key(fragment, member)
        with self.lock:
            entry = self._entry(key, member)
            if entry is None:
                return
            fresh = claim(entry.bounds, low, low + len(piece))
        register = 0
        for start, stop in fresh:
            register ^= crc32.part(piece[start - low : stop - low], member.size - stop)
        with self.lock:
            entry.register ^= register
            entry.left -= sum(stop - start for start, stop in fresh)
            complete = bool(fresh) and not entry.left
            if complete:
                self.entries[key] = None
        if complete:
            self._judge(fragment, member, crc32.crc_from_sum(entry.register, member.size))
            with self.lock:
                self.fresh.append(key)

    def _judge(self, fragment: Fragment, member: Member, crc: int) -> None:
        if crc == member.crc:
            return
        key, path = _key(fragment, member), fragment.path
        with self.lock:
            self.entries[key] = Entry(member.size)  # whoever reads it again is refused again
        inside = dict.fromkeys(
            job.stored_as
            for job in self.jobs
            if any(
                fragment_of.member and _key(fragment_of, fragment_of.member) == key
                for fragment_of in _read_by(job, self.copies)
            )
        )
        raise DamagedError(
            f"{path} is damaged: the {member.size} bytes at byte {member.start} ({some([*inside], 3)}) have the CRC-32 "
            f"{crc:08x}, the file says {member.crc:08x}",
            f"copy it again, or take another checkpoint; `convert verify {path.parent}` lists all that is damaged",
        )

    def _fragments(self) -> Iterator[Fragment]:
        for job in self.jobs:
            yield from _read_by(job, self.copies)


def claim(bounds: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """Add an interval to a set of intervals, given as starts and stops in turn. Returns the parts that are new."""
    first, last = bisect_left(bounds, low), bisect_right(bounds, high)
    start, stop = ([low] if first % 2 == 0 else []), ([high] if last % 2 == 0 else [])
    edges = [*start, *bounds[first:last], *stop]
    bounds[first:last] = [*start, *stop]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _read_by(job: Job, copies: bool) -> Iterator[Fragment]:
    """Every fragment that a job reads, with those of further copies if `copies` are read or summed."""
    further = chain(*job.replicas.values(), *job.twins.values()) if copies or job.partial else ()
    for part in chain(job.sources, further):
        yield part.fragment
        yield from part.fragment.inputs


def _key(fragment: Fragment, member: Member) -> _Key:
    return fragment.path, fragment.stream, member.start


def _name(key: _Key) -> str:
    """The name of an entry in a journal."""
    path, stream, start = key
    return f"{path}:{stream.start if stream else ''}:{start}"
