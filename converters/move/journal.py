"""The journal: which jobs of a conversion are done and on disk, so that a killed run can be resumed.

`OUT.partial/journal.jsonl` begins with a fingerprint of the conversion; then comes a line for each finished job, its
name and its digest, and lines of the entries of the source's archives that were found sound. A line is written after
the data that it records was forced to disk. Each line ends with its CRC-32: a line whose CRC-32 differs and those
after it are ignored; if it is the first line, nothing tells which conversion the journal is of, and it is refused.

A conversion can be split over processes on any nodes: each does a share, with a journal of its own beside the common
one, and a job is done if any journal records it. Where a file of the source was changed since a journal was begun, if
only in its attributes, nothing that it records counts. A process that does all jobs locks the common journal
exclusively, processes with a share lock it shared: so shares run at the same time, and never while the process that
finishes runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from blake3 import blake3

from converters.common.atomic import lock, put_back, write_all
from converters.move.blocks import Files
from converters.move.sampled import samples_of
from converters.plan.plan import Job, Plan
from formats.checkpoint import OutputFile
from formats.disk.threads import starting
from formats.errors import OutputError

JOURNAL, JOURNALS = "journal.jsonl", "journal*.jsonl"
"""The journal of all of a conversion, which is made first, and a pattern of it and those of shares."""
SOUND = "sound"
SPOILED = "the source is damaged"
"""Takes the place of the fingerprint in the journal of a share that read damaged data."""
DAMAGED = "the journal is damaged"
"""Stands for a fingerprint whose checksum differs."""
OLDER = "the journal is of an older version"
"""Stands for a fingerprint without a checksum, which lines of journals had not in the beginning."""
UNSEALED = re.compile(rb"(vitruvian 1 [0-9a-f]{64}|average-norms|the source is damaged)\n")
"""The first line of a journal without checksums."""
KIND, OLDER_KINDS = "vitruvian 3 ", ("vitruvian 2 ", "vitruvian 1 ")
"""The beginning of a fingerprint, and of those that older versions made of other facts."""
AT = " at "
"""Stands between what identifies a conversion and a hash of when the files of its source were changed last."""
WHOSE = {
    SPOILED: "of a conversion whose source is damaged",
    DAMAGED: "of a conversion whose journal is damaged",
    OLDER: "of a conversion by an older version, whose journal cannot be resumed",
}
"""What stands for a fingerprint: of what the folder holds the beginnings."""


class Done(NamedTuple):
    """The contents of a journal: fingerprint, finished jobs and sound entries; and how many bytes are whole lines.

    `stale` are jobs that were finished before a file of the source was changed, and have to be done again.
    """

    head: str
    digests: dict[str, str]
    sound: set[str]
    length: int
    stale: frozenset[str] = frozenset()


class Share(NamedTuple):
    """One of several processes of a conversion, `number` from 1 to `of`."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def journal(self) -> str:
        """The name of the share's journal."""
        return f"journal-{self.number}-of-{self.of}.jsonl"

    def jobs(self, jobs: Iterable[Job]) -> list[Job]:
        """The share's part of a plan's jobs, by bytes: consecutive layers, so that few files have two writers."""
        ordered = sorted(jobs, key=lambda job: -1 if job.layer is None else job.layer)
        own, before, total = list[Job](), 0, sum(job.nbytes for job in ordered)
        together: dict[tuple[Path, int], int] = {}
        for job in ordered:
            middle = (2 * before + job.nbytes) * self.of // max(1, 2 * total)
            woven = [(part.fragment.path, part.fragment.offset) for part in job.targets if part.interleaved]
            share = next((together[place] for place in woven if place in together), min(middle, self.of - 1))
            together |= dict.fromkeys(woven, share)
            if share == self.number - 1:
                own.append(job)
            before += job.nbytes
        return own


class Journal:
    """The finished jobs of a conversion, on disk.

    Attributes:
        digests: the digest of each finished job by its name, those of earlier runs too.
        sound: the entries of the source's archives that earlier runs found sound.
        stale: jobs that earlier runs finished before a file of the source was changed.
        locks: locked descriptors, which keep other conversions out as long as any process has them open.
    """

    def __init__(self, locks: tuple[int, ...], done: Done, every: float) -> None:
        self.locks, self.digests, self.sound, self.every = locks, done.digests, done.sound, every
        self.stale = done.stale
        self.handle = locks[-1]
        self.fresh: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.committing: threading.Thread | None = None

    def note(self, job: Job, digest: str) -> None:
        """Record a finished job, which the next commit writes."""
        with self.lock:
            self.digests[job.name] = digest
            self.fresh.append((job.name, digest))
        if self.committing is not None and self.committing.ident is None:
            with starting():
                self.committing.start()

    def commit(self, files: Files) -> None:
        """Force the data of finished jobs to disk, then write their lines."""
        with self.lock:
            fresh, self.fresh = self.fresh, []
        files.sync()
        sound = files.checks.noted() if files.checks else []
        lines = [*fresh, *([{SOUND: sound}] if sound else [])]
        if lines:
            write_all(self.handle, b"".join(sealed(json.dumps(line)) for line in lines))
            os.fsync(self.handle)

    def spoil(self) -> None:
        """Record that data which was read for finished jobs is damaged, so that no run resumes them."""
        os.ftruncate(self.handle, 0)
        _begin(self.handle, SPOILED)

    @contextmanager
    def kept(self, files: Files) -> Iterator[None]:
        """Begin to commit every `every` seconds from the first finished job on, and commit once at the end.

        The disk writes meanwhile; a commit that takes longer is followed by the next one at once.
        The thread that commits is not started before: until then the process can be copied (`converters.move.workers`).
        """
        finished, failed = threading.Event(), list[OSError | OutputError]()

        def work() -> None:
            try:
                due = time.monotonic() + self.every
                while not finished.wait(due - time.monotonic()):
                    due = time.monotonic() + self.every
                    self.commit(files)
            except (OSError, OutputError) as error:  # raised below, in the thread of the conversion
                failed.append(error)

        self.committing = threading.Thread(target=work, daemon=True)
        try:
            yield
        finally:
            finished.set()
            if self.committing.ident is not None:
                self.committing.join()
            self.committing = None
            if not failed:  # Linux reports lost data once: the data of jobs that were recorded since may be lost
                self.commit(files)
        if failed:
            raise failed[0]


@contextmanager
def open_journal(
    staging: Path,
    fingerprint: str,
    files: Iterable[OutputFile],
    share: Share | None = None,
    *,
    force: bool,
    every: float,
    place: Path | None = None,
) -> Iterator[Journal]:
    """Open or create the journal in a staging folder, locked, and only for the same conversion.

    Args:
        staging: the folder.
        fingerprint: the fingerprint of the conversion.
        files: the files that finished jobs wrote to; if one of them is gone, no job counts as finished.
        share: the share whose journal is opened, beside those of other shares; None for all of the conversion.
        force: discard the files of another conversion in the folder, instead of refusing. A share never does.
        every: seconds after which finished work is forced to disk.
        place: OUT; a folder that a killed run has moved from there into the staging folder is put back.

    Raises:
        OutputError: another process or another conversion uses the folder, or the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            locks = _claim(stack, staging, share)
            if place is not None and share is None:
                put_back(place, staging)
            finished = _resume(locks[-1], staging, fingerprint, files, share, force)
        except OSError as error:
            raise OutputError(f"{staging}: {error.strerror}") from None
        yield Journal(locks, finished, every)


def _claim(stack: ExitStack, staging: Path, share: Share | None) -> tuple[int, ...]:
    """Lock the staging folder, or a share of it. Returns the locked handles, that of the journal last."""
    staging.mkdir(parents=True, exist_ok=True)
    if any(staging.iterdir()) and not (staging / JOURNAL).is_file():  # in this order: the journal is created first
        raise OutputError(f"{staging} is needed for the work and holds something else", "move it out of the way")
    common = own = _open(stack, staging / JOURNAL)
    if share is None:
        try:
            lock(common, staging)
        except OutputError:
            lock(common, staging, shared=True)  # then the others have shared locks
            raise OutputError(f"other processes are writing parts of {staging}", "wait until they are done") from None
    else:
        own = _open(stack, staging / share.journal)
        if not (lock(common, f"all of {staging}", shared=True) and lock(own, f"part {share} of {staging}")):
            raise OutputError(f"{staging} is on a file system without locks, which --part needs", "leave --part out")
    if not os.path.samestat(os.fstat(common), (staging / JOURNAL).stat()):
        raise OutputError(f"another process has begun {staging} anew", "wait until it is done")
    return (common,) if share is None else (common, own)


def _open(stack: ExitStack, path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    stack.callback(os.close, handle)
    return handle


def _resume(
    handle: int, staging: Path, fingerprint: str, files: Iterable[OutputFile], share: Share | None, force: bool
) -> Done:
    """Prepare the journal for appending. Returns the finished jobs and sound entries of all journals."""
    own = staging / (share.journal if share else JOURNAL)
    own_entries = _entries(os.pread(handle, os.fstat(handle).st_size, 0))
    os.ftruncate(handle, own_entries.length)
    new = share is not None and not own_entries.length
    if new:
        _begin(handle, fingerprint)  # before the others are read: of two conversions at a time one sees the other
    others = {path: _entries(path.read_bytes()) for path in staging.glob(JOURNALS) if path != own}
    every = [own_entries, *others.values()]
    current = [entries for entries in every if entries.head == fingerprint]
    finished = {name: digest for entries in current for name, digest in entries.digests.items()}
    sound = {name for entries in current for name in entries.sound}
    stale = frozenset(name for entries in every for name in entries.digests if name not in finished)
    heads = {conversion_of(entries.head) for entries in every if entries.head}
    if heads - {conversion_of(fingerprint)} and (share or not force):
        if new:
            os.ftruncate(handle, 0)
        hint = f"remove {staging}" + (", or start over with --force" if share is None else "")
        raise OutputError(f"{staging} holds the beginnings {whose(heads)}", hint)
    whole = not finished or all(file.path.is_file() and file.path.stat().st_size == file.size for file in files)
    if share is not None:
        if not whole:
            raise OutputError(
                f"{staging} lacks files that its journals speak of", "the same command without --part starts over"
            )
    elif heads != {conversion_of(fingerprint)} or not whole:
        if (staging / "out").exists():
            shutil.rmtree(staging / "out")
        for path in others:
            path.unlink()
        os.ftruncate(handle, 0)
        _begin(handle, fingerprint)
        return Done(fingerprint, {}, set(), 0)
    else:
        for path in [path for path, entries in others.items() if entries.head != fingerprint]:
            path.unlink()
    if not new and own_entries.head != fingerprint:
        os.ftruncate(handle, 0)
        _begin(handle, fingerprint)
    return Done(fingerprint, finished, sound, own_entries.length, stale)


def conversion_of(fingerprint: str) -> str:
    """What of a fingerprint identifies the conversion, without when the files of its source were changed last."""
    return fingerprint.partition(AT)[0]


def whose(heads: Collection[str]) -> str:
    """Of what a folder holds the beginnings, by the fingerprints in its journals."""
    known = {OLDER if head.startswith(OLDER_KINDS) else head for head in heads}
    usual = "of another conversion (or its source has changed since)"
    return next((words for head, words in WHOSE.items() if head in known), usual)


def _begin(handle: int, fingerprint: str) -> None:
    write_all(handle, sealed(fingerprint))
    os.fsync(handle)


def sealed(text: str) -> bytes:
    """A line of a journal."""
    return f"{text} {crc32(text.encode()):08x}\n".encode()


def _text(line: bytes) -> bytes | None:
    """What a line says, None if it is not the one that was written."""
    text, _, _ = line.rpartition(b" ")
    return text if line == b"%b %08x\n" % (text, crc32(text)) else None


def _entries(content: bytes) -> Done:
    head, *lines = content.splitlines(keepends=True) or [b""]
    if not head.endswith(b"\n"):
        return Done("", {}, set(), 0)
    finished, sound, length = dict[str, str](), set[str](), len(head)
    for line in lines:
        text = _text(line)
        try:
            record = None if text is None else json.loads(text)
        except ValueError:
            break
        match record:
            case [str(name), str(digest)]:
                finished[name] = digest
            case {"sound": [*names]} if all(isinstance(name, str) for name in names):
                sound.update(names)
            case _:
                break
        length += len(line)
    partial_line = _text(head)
    unread = OLDER if UNSEALED.fullmatch(head) else DAMAGED
    return Done(unread if partial_line is None else partial_line.decode(errors="replace"), finished, sound, length)


def fingerprint(plan: Plan, replicas: str) -> str:
    """A hash that identifies a conversion: what is read from which files, the target's layout, casts, replica policy.

    It is made of what decides bytes. Sentences, such as notes and reasons, may be others in the next version.
    Behind `AT` is a hash of the ctimes of the source's files. Every change of their bytes or attributes sets these, and
    no program can set them back, as it can the times in the first part, whose samples are not all bytes.

    Raises:
        SourceError: a file of the source cannot be read.
    """
    paths = tuple(dict.fromkeys(path for source in plan.sources for path in source.files))
    source = [
        [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns, sample]
        for path, sample in zip(paths, samples_of(paths), strict=True)
    ]
    changed = [path.stat().st_ctime_ns for path in paths]
    files = plan.target.files if plan.target else ()
    target = [
        [str(file.path), file.size, [(placed.slot.place, placed.key, placed.slot.layer) for placed in file.tensors]]
        for file in files
    ]
    facts = blake3(json.dumps([source, target, repr(plan.spec), replicas]).encode())
    place = lru_cache(maxsize=None)(lambda path: path.resolve())  # the same for every spelling of a path
    for job in plan.jobs:  # which tensors are read, and in which order, and not only from which files
        facts.update(_line(job).encode())
        for term in job.terms:
            facts.update(f"{term.factor!r} {term.policy} {_line(term.job)}".encode())
        for norms in job.norms:
            line = f"{norms.wanted} {norms.columns} {norms.transposed}\n"
            facts.update(line.encode(errors="surrogateescape"))
        for part in (*(part for read in job.reads for part in read.sources), *job.targets):
            at, spans = part.fragment, [(span.start, span.stop, span.stride) for span in part.leaf.spans]
            of = at.scales
            scaled = of and (of.method, place(of.factors.path), of.factors.offset, of.block, of.rows, of.columns)
            divisor = f" {place(of.whole.path)} {of.whole.offset}" if of and of.whole else ""
            crc = at.member.crc if at.member else 0
            computed = (at.product or at.pieces or at.coded) and (at.product, at.pieces or at.coded, at.shape)
            line = f"{place(at.path)} {at.offset} {at.stream} {scaled} {at.strides} {part.leaf.base} {spans} {crc}"
            chunk = (
                f" {at.chunk.name} {at.chunk.start} {at.chunk.outer} {at.chunk.change and at.chunk.change[:2]}"
                if at.chunk
                else ""
            )
            line += f" {computed}{divisor}{chunk}\n"
            facts.update(line.encode(errors="surrogateescape"))  # a path is bytes
    return f"{KIND}{facts.hexdigest()}{AT}{blake3(json.dumps(changed).encode()).hexdigest()}"


def _line(job: Job) -> str:
    """The line of a job in the fingerprint: its tensor, element types, shape and changes of value."""
    rows = (job.rows, job.last)
    return f"{job.name} {job.source_dtype} {job.dtype} {job.shape} {rows} {job.partial} {job.less_one}\n"
