"""A conversion whose OUT is in an object store: written and sent file by file, so that few files are on the local disk.

Files that share a tensor are written together in a local folder, sent, and deleted while the next ones are written.
When all weight files have arrived, the output is verified by reading them from the store, with the small files from the
local disk. Small files are sent last, at the end those by which a reader finds a model. A record of the files that were
sent lets the same command resume.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from converters.assets.replaceable import is_known_name
from converters.common.atomic import lock, stoppable, write_all
from converters.common.disk_space import require_space
from converters.common.progress import Progress
from converters.convert import (
    CHANGED,
    Drifted,
    check_apart,
    check_replaceable,
    check_unchanged,
    files_of,
    finish_small,
    make_files,
    opened_stamps,
    prove,
    stamps_of,
    verify_output,
)
from converters.delivery.receivers import Receiver, receiver_of
from converters.move.blocks import Files, finish_files
from converters.move.crc32 import Checksums, sizes_of
from converters.move.engine import execute
from converters.move.journal import conversion_of, fingerprint, open_journal, whose
from converters.move.scratch import room_for
from converters.move.source_checks import SourceChecks, Verdict
from converters.move.staging import disk
from converters.plan.plan import Job, Plan
from converters.plan.request import Request
from converters.prove.sources import check_manifests, compared
from converters.remote.path import RemotePath
from converters.remote.store import Entry
from formats.checkpoint import MANIFEST, OutputFile, Target
from formats.disk.threads import Threads
from formats.errors import DamagedError, Interrupted, OutputError, RefusedError, UnsupportedError, VerificationError

RECORD = "sent.jsonl"
LAST = ("config.json", "model.safetensors.index.json", ".metadata", "metadata.json", "latest",
        "latest_checkpointed_iteration.txt", MANIFEST)  # fmt: skip
"""Small files by which a reader finds a model, in the order in which they are sent after all other files."""


class Group(NamedTuple):
    """Files that share a tensor, and the jobs that write them."""

    files: tuple[OutputFile, ...]
    jobs: tuple[Job, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)


@dataclass
class Sent:
    """The record of files that were sent: a line with the fingerprint of the conversion, then one for each group.

    Attributes:
        resumed: whether an earlier run of the same conversion has begun.
        digests: the digests of the jobs whose files have arrived.
        objects: the objects that have arrived, by path relative to OUT.
    """

    handle: int
    resumed: bool = False
    digests: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Entry] = field(default_factory=dict)

    def claim(self, mark: str) -> None:
        """Write the fingerprint of the conversion, once OUT is known to be free and before anything is sent."""
        if not self.resumed:
            write_all(self.handle, f"{mark}\n".encode())
            os.fsync(self.handle)

    def note(self, digests: Mapping[str, str], objects: Mapping[str, Entry]) -> None:
        """Record a group that has arrived."""
        self.digests.update(digests)
        self.objects.update(objects)
        write_all(self.handle, (json.dumps({"digests": dict(digests), "objects": dict(objects)}) + "\n").encode())
        os.fsync(self.handle)


def deliver(
    plan: Plan,
    request: Request,
    drifted: Drifted = lambda *_: None,
    checked: Callable[[Verdict], object] = lambda _: None,
) -> dict[str, str]:
    """Execute a plan, send its files, verify them in the store, and publish. Else as `converters.convert.run`.

    Returns:
        The digest of each tensor of the output.

    Raises:
        NetworkError: the store cannot be reached; the same call resumes.
        OutputError: OUT exists, or the local disk has no room for its largest files.
        UnsupportedError: the output is an adapter or a universal checkpoint, only written into a folder.
    """
    target, stamps, plan = _target_of(plan, request), opened_stamps(plan), compared(plan)
    for source in plan.sources:
        check_apart(source, request, target.copies.values())
    check_manifests(plan)
    if plan.source.proof is not None:
        prove(plan.source.proof, request)
    groups = groups_of(plan, target)
    sizes = sorted((group.nbytes for group in groups), reverse=True)
    place = next(path for path in request.staging.parents if path.exists())
    nbytes = sum(sizes[:2]) + sum(path.stat().st_size for path in target.copies.values())
    nbytes += max((room_for(plan.sources, group.jobs) for group in groups), default=0)
    require_space(place, nbytes, len(target.files) + len(target.texts) + len(target.copies), request.out)
    mark, receiver = fingerprint(plan, request.limits.replicas), receiver_of(_out(request))
    with stoppable() as stopped, disk(request), _record(request, mark) as sent:
        planned = {_name(file.path, request) for file in target.files} | {*target.texts, *target.copies}
        planned.add(f"{target.home}/{MANIFEST}".removeprefix("./"))
        receiver.begin(planned if sent.resumed else set(), lambda others: check_free(request, others))
        sent.claim(mark)
        checks = SourceChecks(plan.jobs, request.limits.replicas)
        before = sum(job.nbytes for job in plan.jobs if job.name in sent.digests)
        total = sum(job.nbytes for job in plan.jobs)
        try:
            with (
                Progress("converting", total - before, request.quiet, request.tell, before, total) as progress,
                Threads(1) as sender,
            ):
                _each(groups, request, receiver, sent, checks, progress.advance, stopped, drifted, mark, sender)
            with Files(checks=checks) as files:
                checked(checks.complete(files.read_stored, request.limits.threads, stopped))
            finish_small(plan, target, request, sent.digests, receiver.reading({}))
            small = {str(path.relative_to(request.root)): path for path in request.root.rglob("*") if path.is_file()}
            if stopped():
                raise Interrupted("stopped by a signal", "run the same command again to resume")
            if request.verify:
                verify_output(plan, request, sent.digests, stopped, receiver.reading(small))
            check_unchanged(stamps, stamps_of(plan))
            receiver.finish({name: small[name] for name in sorted(small, key=_turn)}, sent.objects)
        except (DamagedError, RefusedError, UnsupportedError, VerificationError):
            receiver.abandon(planned)  # nothing that was sent can be used: the same command starts over
            _clear(request.staging)
            raise
    _clear(request.staging)
    return dict(sent.digests)


def check(plan: Plan, request: Request) -> None:
    """Check what would stop a delivery, before a byte of the weights is read.

    Raises:
        OutputError: OUT exists.
        UnsupportedError: the output is an adapter or a universal checkpoint, only written into a folder.
    """
    target = _target_of(plan, request)
    for source in plan.sources:
        check_apart(source, request, target.copies.values())
    check_manifests(plan)
    receiver_of(_out(request)).check(lambda others: check_free(request, others))


def groups_of(plan: Plan, target: Target) -> list[Group]:
    """The files of a target in groups that share a tensor, in the order of the files."""
    leader: dict[Path, Path] = {file.path: file.path for file in target.files}

    def lead(path: Path) -> Path:
        while leader[path] != path:
            leader[path] = path = leader[leader[path]]
        return path

    first = target.files[0].path
    for job in plan.jobs:
        paths = [part.fragment.path for part in job.targets]
        for path in paths[1:]:
            leader[lead(path)] = lead(paths[0])
    files: dict[Path, list[OutputFile]] = {}
    for file in target.files:
        files.setdefault(lead(file.path), []).append(file)
    jobs: dict[Path, list[Job]] = {}
    for job in plan.jobs:
        jobs.setdefault(lead(job.targets[0].fragment.path if job.targets else first), []).append(job)
    return [Group(tuple(members), tuple(jobs.get(path, ()))) for path, members in files.items()]


def check_free(request: Request, present: Sequence[str]) -> None:
    """Refuse an OUT that is neither absent nor a checkpoint that may be replaced.

    Args:
        request: what the user asked for.
        present: the objects at OUT that are not of this conversion, by path relative to OUT.

    Raises:
        OutputError: OUT may not be replaced.
    """
    if present:
        check_replaceable(request, [name for name in present if not is_known_name(name.rpartition("/")[2])])


def _each(
    groups: Sequence[Group],
    request: Request,
    receiver: Receiver,
    sent: Sent,
    checks: SourceChecks,
    advance: Callable[[int], None],
    stopped: Callable[[], bool],
    drifted: Drifted,
    mark: str,
    sender: Threads,
) -> None:
    """Write and send every group that has not arrived. A group is sent while the next one is written."""
    sending: Future[None] | None = None

    def send(group: Group, digests: Mapping[str, str], journal: Path) -> None:
        names = {_name(file.path, request): file.path for file in group.files}
        sent.note(digests, {name: receiver.send(name, path) for name, path in names.items()})
        for path in names.values():
            path.unlink()
        shutil.rmtree(journal)

    for number, group in enumerate(groups):
        names = [_name(file.path, request) for file in group.files]
        journal_folder = request.staging / f"group-{number}"
        if all(name in sent.objects and receiver.has(name, sent.objects[name]) for name in names):
            for file in group.files:  # files of a run that was killed before it deleted them
                file.path.unlink(missing_ok=True)
            shutil.rmtree(journal_folder, ignore_errors=True)
            continue
        opened = open_journal(journal_folder, f"{mark} {number}", group.files, force=True, every=request.commit_seconds)
        with opened as journal:
            limits = make_files(group.files, request).limits
            sums = None if journal.digests else Checksums(sizes_of(group.files))
            with files_of(request, sums, checks, journal) as files, journal.kept(files):
                todo = [job for job in group.jobs if job.name not in journal.digests]
                advance(sum(job.nbytes for job in group.jobs) - sum(job.nbytes for job in todo))
                execute(
                    todo, files, limits, done=journal.note, advance=advance, stop=stopped, drifted=drifted
                )  # fmt: skip
                finish_files(group.files, files, limits.threads)
            digests = dict(journal.digests)
        if sending is not None:
            sending.result()
        sending = sender.submit(send, group, digests, journal_folder)
        if stopped():
            raise Interrupted("stopped by a signal", "run the same command again to resume")
    if sending is not None:
        sending.result()


@contextmanager
def _record(request: Request, mark: str) -> Iterator[Sent]:
    """The record in the staging folder, locked for this process.

    Raises:
        OutputError: another process or another conversion uses the folder.
    """
    staging = request.staging
    staging.mkdir(parents=True, exist_ok=True)
    if any(staging.iterdir()) and not (staging / RECORD).is_file():
        raise OutputError(f"{staging} is needed for the work and holds something else", "move it out of the way")
    handle = os.open(staging / RECORD, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    mine = False
    try:
        lock(handle, staging)
        mine = True
        head, *lines = (staging / RECORD).read_bytes().splitlines(keepends=True) or [b""]
        begun = conversion_of(head.decode(errors="replace").strip())
        if begun and begun != conversion_of(mark) and not request.force:
            raise OutputError(
                f"{staging} holds the beginnings {whose([begun])}", f"remove {staging}, or start over with --force"
            )
        sent = Sent(handle, resumed=begun == conversion_of(mark))
        if sent.resumed and head != f"{mark}\n".encode():
            if lines and not request.quiet:
                sys.stderr.write(f"note: what was sent is sent again: {CHANGED}\n")
            head, lines = f"{mark}\n".encode(), []
            kept = len(conversion_of(mark).encode())  # never empty: what was sent is this conversion's
            os.ftruncate(handle, kept)
            write_all(handle, head[kept:])
            os.fsync(handle)
        length = len(head)
        for line in lines if sent.resumed else ():
            if not line.endswith(b"\n"):
                break
            record, length = json.loads(line), length + len(line)
            sent.digests.update(record["digests"])
            sent.objects.update({name: Entry(*entry) for name, entry in record["objects"].items()})
        os.ftruncate(handle, length if sent.resumed else 0)
        if not sent.resumed:
            for path in staging.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
        yield sent
    finally:
        if mine and staging.is_dir() and not (staging / RECORD).stat().st_size:  # nothing was begun
            shutil.rmtree(staging)
        os.close(handle)


def _clear(staging: Path) -> None:
    """Delete the staging folder, with the record last, so that the same command resumes after a kill in between."""
    for path in staging.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(staging)


def _target_of(plan: Plan, request: Request) -> Target:
    if plan.target is None:
        raise ValueError("a plan without a target cannot run")
    if plan.plan_of_output is not None or not plan.target.files:
        raise UnsupportedError(
            f"{request.out} is in a store; an adapter and a universal checkpoint are only written into a folder",
            "name a folder, and send it afterwards",
        )
    return plan.target


def _out(request: Request) -> RemotePath:
    assert isinstance(request.out, RemotePath)
    return request.out


def _name(path: Path, request: Request) -> str:
    """The path of a file relative to OUT."""
    return path.relative_to(request.root).as_posix()


def _turn(name: str) -> tuple[int, str]:
    """The sort key that puts small files in the order in which they are sent."""
    last = name.rpartition("/")[2]
    return LAST.index(last) + 1 if last in LAST else 0, name
