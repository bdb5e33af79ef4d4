"""A conversion from end to end: write, verify, publish.

Everything is written to `OUT.partial/out` beside OUT, which is renamed to OUT only when all of it is written, verified
and on disk. So OUT is complete or absent, and the same command resumes a killed one.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from converters.assets import files as assets
from converters.assets.replaceable import reason_to_keep
from converters.common.atomic import put_in_place, stoppable, sync_path
from converters.common.disk_space import require_space
from converters.common.progress import Progress
from converters.common.stripes import stripe
from converters.move import scratch
from converters.move.blocks import Files, finish_files
from converters.move.crc32 import Checksums, sizes_of
from converters.move.engine import digest_of, execute, workers_for
from converters.move.journal import JOURNAL, Journal, Share, fingerprint, open_journal
from converters.move.source_checks import SourceChecks, Verdict
from converters.move.staging import disk, intact
from converters.move.turns import Turns, one_writer
from converters.plan.plan import Job, Plan, make_plan, needs
from converters.plan.request import Request
from converters.prove import digest, sources
from formats.checkpoint import MANIFEST, Checkpoint, OutputFile, Settings, Target
from formats.disk.handle import is_remote
from formats.disk.stamps import Stamp, stamp_of
from formats.errors import (
    DamagedError,
    Interrupted,
    OutputError,
    RefusedError,
    SourceError,
    UnsupportedError,
    VerificationError,
    count,
    some,
)
from formats.model.spec import Verbatim, differences
from formats.registry import detected, open_checkpoint, steps

if TYPE_CHECKING:
    from converters.move.workers import Workers

FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
"""Suffixes that no folder of a checkpoint has."""
CHANGED = "a file of the source, or an attribute of it, was changed since"
ANEW = "what was written is deleted, the same command starts over"


Drifted = Callable[[Job, float], object]
"""Called with each job whose copies had to be averaged, and how far apart they were."""


def run(
    plan: Plan,
    request: Request,
    drifted: Drifted = lambda *_: None,
    checked: Callable[[Verdict], object] = lambda _: None,
) -> dict[str, str]:
    """Execute what is left of a plan, verify the output and publish it.

    Args:
        plan: the plan.
        request: what the user asked for.
        drifted: called with each job whose copies were averaged.
        checked: called with the verdict on the checksums of the source.

    Returns:
        The digest of each tensor of the output.

    Raises:
        OutputError: OUT exists, or there is no room.
        DamagedError: data that was read does not have the checksum that the source records, or a file of the source
            was written during the conversion.
        VerificationError: the source contradicts its manifest; or the output does not read back as planned.
        Interrupted: a signal came; the same call resumes.
    """
    plan, stamps = sources.compared(plan), opened_stamps(plan)
    target, opened = _begin(plan, request)
    if plan.source.proof is not None:
        prove(plan.source.proof, request)
    with stoppable() as stopped, opened as journal:
        _check_free(request)  # once more: what a killed run had moved away is back
        try:
            # the bytes that earlier runs wrote are not counted here: checksums are read from disk
            sums = None if journal.digests else Checksums(sizes_of(target.files))
            checks = SourceChecks(plan.jobs, request.limits.replicas, journal.sound)
            scratch.clear(request.staging)
            opened_files = files_of(request, sums, checks, journal)
            with disk(request):
                request = make_files(target.files, request)
            with (
                disk(request),
                intact(target, request, journal),
                opened_files as files,
                journal.kept(files),
                workers_for(_unfinished(plan.jobs, journal), request.limits, journal.locks) as workers,
            ):
                _execute(plan.jobs, request, journal, files, stopped, drifted, workers=workers)
                checked(checks.complete(files.read_stored, request.limits.threads, stopped))
                finish_files(target.files, files, request.limits.threads)  # its open files are not on disk yet
                files.descriptors.written(finish_small(plan, target, request, journal.digests, request.root))
                if stopped():
                    raise Interrupted("stopped by a signal", "run the same command again to resume")
                if request.verify:
                    verify_output(plan, request, journal.digests, stopped, request.root, workers)
                check_unchanged(stamps, stamps_of(plan))
        except (DamagedError, RefusedError, UnsupportedError, VerificationError):
            shutil.rmtree(request.staging)  # nothing in it can be used: the same command starts over
            raise
        try:
            publish(request)
        except OSError as error:
            what = f"{error.filename or request.root}: {error.strerror}"
            raise OutputError(f"{request.out} cannot be put in its place: {what}") from None
        return journal.digests


def run_share(plan: Plan, share: Share, request: Request, drifted: Drifted = lambda *_: None) -> list[Job]:
    """Execute one process's share of a plan, beside other processes. `run` does the rest, verifies and publishes.

    Returns:
        The jobs of the share.

    Raises:
        OutputError: OUT exists, there is no room, or another process works on the share or on the whole conversion.
        DamagedError: data that was read does not have the checksum that the source records. `run` compares the archive
            entries of which each process has read a part.
        VerificationError: copies of a tensor differ, or the source contradicts its manifest.
        Interrupted: a signal came; the same call resumes.
    """
    plan = sources.compared(plan)
    target, opened = _begin(plan, request, share)
    jobs = share.jobs(plan.jobs)
    with stoppable() as stopped, opened as journal:
        checks = SourceChecks(jobs, request.limits.replicas, journal.sound)
        try:
            opened_files = files_of(request, None, checks, journal, part=True)
            with disk(request):
                request = make_files(target.files, request)
            with disk(request), intact(target, request, journal), opened_files as files, journal.kept(files):
                _execute(jobs, request, journal, files, stopped, drifted, part=True)
        except DamagedError:
            journal.spoil()
            raise
    return jobs


def _begin(plan: Plan, request: Request, share: Share | None = None) -> tuple[Target, AbstractContextManager[Journal]]:
    """The target of a plan, after the checks of paths, manifests and room, and the context of its journal."""
    if plan.target is None:
        raise ValueError("a plan without a target cannot run")
    for source in plan.sources:
        check_paths(source, request, plan.target.copies.values())
    sources.check_manifests(plan)
    check_room(plan, request, share)
    mark, files = fingerprint(plan, request.limits.replicas), plan.target.files
    every, place = request.commit_seconds, request.place
    return plan.target, open_journal(request.staging, mark, files, share, force=request.force, every=every, place=place)


def files_of(
    request: Request, sums: Checksums | None, checks: SourceChecks, journal: Journal, part: bool = False
) -> Files:
    """The files that a conversion opens. A `part` takes no turns to write: other parts may be stopped in theirs."""
    turns = Turns(not part and one_writer(request.staging))
    return Files(sums, checks, journal.locks, scratch.Scratch(request.staging), turns=turns)


def stamps_of(plan: Plan) -> dict[Path, Stamp]:
    """The stamp of each file of the sources that exists."""
    return {path: stamp_of(path) for source in plan.sources for path in source.files if path.exists()}


def opened_stamps(plan: Plan) -> dict[Path, Stamp]:
    """The stamp of each file of the sources from before its header was read, or else the present one."""
    return stamps_of(plan) | {path: stamp for source in plan.sources for path, stamp in source.stamps.items()}


def check_unchanged(before: Mapping[Path, Stamp], after: Mapping[Path, Stamp]) -> None:
    """Refuse a source of which a file was written while it was read. A file that was deleted was read before.

    Raises:
        DamagedError: size or a time of a file changed.
    """
    for path, stamp in before.items():
        now = after.get(path, stamp)
        if now != stamp:
            how = "written anew" if now[:2] != stamp[:2] else "changed, or an attribute of it,"
            raise DamagedError(f"{path} was {how} while it was read", "run it again when the save is complete")


def prove(masters: Checkpoint, request: Request) -> None:
    """Compare FP32 master weights, which the output does not hold, with the weights: so the moments are of this model.

    Raises:
        VerificationError: the master weights do not round to the weights.
    """
    plan = make_plan(masters)
    with Progress("comparing master weights", plan.nbytes, request.quiet, request.tell) as progress:
        digest_of(plan.jobs, request.limits, progress.advance)


def _execute(
    jobs: Iterable[Job],
    request: Request,
    journal: Journal,
    files: Files,
    stopped: Callable[[], bool],
    drifted: Drifted,
    *,
    part: bool = False,
    workers: Workers | None = None,
) -> None:
    """Write the tensors of jobs into the staging folder, except those that the journal records as finished.

    The progress includes the verification that follows, unless the jobs are only a `part` of the work.
    """
    every = [*jobs]
    todo = _unfinished(every, journal)
    if (again := sum(job.name in journal.stale for job in todo)) and not request.quiet:
        sys.stderr.write(f"note: {count(again, 'tensor is', 'tensors are')} done again: {CHANGED}\n")
    remaining, whole = (sum(job.nbytes for job in each) for each in (todo, every))
    to_verify = whole if request.verify and not part else 0
    with Progress("converting", remaining, request.quiet, request.tell, whole - remaining, to_verify) as progress:
        execute(
            todo,
            files,
            request.limits,
            done=journal.note,
            advance=progress.advance,
            stop=stopped,
            drifted=drifted,
            workers=workers,
        )


def _unfinished(jobs: Iterable[Job], journal: Journal) -> list[Job]:
    return [job for job in jobs if job.name not in journal.digests]


def make_files(files: Iterable[OutputFile], request: Request) -> Request:
    """Create the weight files in the staging folder, each of its size; existing files keep their contents.

    Returns:
        The request. If there were files, zeros have to be written too: the files may have values of a source that was
        changed since.
    """
    every = [*files]
    fresh = not any(file.path.exists() for file in every)
    if request.stripes and not request.root.exists():
        request.root.mkdir(parents=True, exist_ok=True)  # several processes may do this at once
        stripe(request.root)
    for path in {file.path.parent for file in every} | {request.root}:
        path.mkdir(parents=True, exist_ok=True)
    for file in every:
        with file.path.open("ab") as handle:
            handle.truncate(file.size)  # changes nothing in a file that other shares have begun
    return request if fresh else replace(request, limits=replace(request.limits, fresh=False))


def finish_small(plan: Plan, target: Target, request: Request, digests: Mapping[str, str], weights: Path) -> list[Path]:
    """Write the small files into the staging folder. Returns their paths; they are not forced to disk yet.

    `weights` is the folder of the output in which its weight files can be read.
    """
    sources.check_source(plan, digests)
    written = assets.write(request.root, target.texts, target.copies)
    if plan.plan_of_output is None or plan.remembered:
        manifest = digest.manifest(plan, target, digests, request.root, weights)
        written += assets.write(request.root / target.home, {MANIFEST: manifest}, {})
    return written


def check_paths(source: Checkpoint, request: Request, others: Iterable[Path] = ()) -> None:
    """Refuse an OUT that is not free, or that is not apart from all files that are read.

    Args:
        source: the checkpoint that is converted.
        request: what the user asked for.
        others: files that are copied.

    Raises:
        OutputError: OUT exists and may not be replaced, is no name for a folder, or overlaps with what is read.
        UnsupportedError: OUT is in an object store.
    """
    out = request.out
    if is_remote(out):
        raise UnsupportedError(f"{out} is in a store, and this is written into a folder", "name a folder")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} exists and is not a folder")
    if out.suffix in FILES:
        raise OutputError(f"OUT is a folder, and {out} is named like a file", f"name it {out.with_suffix('')}")
    if out.is_symlink() and not out.exists():
        raise OutputError(f"{out} is a broken link")
    check_apart(source, request, others)
    _check_free(request)  # last, as it offers --force


def check_apart(source: Checkpoint, request: Request, others: Iterable[Path] = ()) -> None:
    """Refuse an OUT and a source that are inside each other, and files to read inside the folders that OUT replaces.

    OUT may be inside the folder of its config, or of its adapter.

    Raises:
        OutputError: OUT and the source are inside each other, or a file that is read would be replaced.
    """
    root, home = source.root.resolve(), source.home.resolve()  # a run may keep models beside its checkpoints
    for place in (request.place, request.staging):
        if place in (root, home) or home in place.parents or place in root.parents:
            raise OutputError(f"{place} and the source {root} are inside each other", "choose another folder")
    paths = [*source.files, *(source.proof.files if source.proof else ()), *others, *request.named]
    paths += [path for path in (source.assets, source.settings.config) if path is not None]
    for path in dict.fromkeys(paths):
        real = {path.resolve(), path.parent.resolve() / path.name}  # of a link its target, and the link itself
        for place in (request.place, request.staging):
            if any(folder == place or place in folder.parents for folder in real):
                raise OutputError(f"{path} is read, and is in {place}, which is replaced", "choose another folder")


def _check_free(request: Request) -> None:
    """Refuse an OUT that is neither absent, nor empty, nor a checkpoint that may be replaced."""
    place = request.place
    if place.is_dir() and any(place.iterdir()):
        check_replaceable(request)


def check_replaceable(request: Request, odd: Sequence[str] | None = None) -> None:
    """Refuse to replace anything at OUT but one checkpoint, with --force.

    Args:
        request: what the user asked for.
        odd: the files at OUT that no checkpoint has, where they are known.

    Raises:
        OutputError: OUT may not be replaced.
    """
    place = request.place
    if not request.force:
        raise OutputError(f"{request.out} exists", "choose another folder, or delete it with --force")
    if detected(place) is None:
        raise OutputError(
            f"{request.out} exists and is no checkpoint", "--force deletes checkpoints only; remove it yourself"
        )
    iterations = steps(place)
    if len(iterations) > 1:
        raise OutputError(
            f"{request.out} holds {len(iterations)} checkpoints: {some(iterations, 4)}",
            "--force deletes one checkpoint, not a training; remove it yourself",
        )
    if reason := reason_to_keep(place, odd):
        raise OutputError(
            f"{request.out} {reason}",
            "--force deletes one checkpoint and nothing else; move that elsewhere, or remove the folder yourself",
        )


def check_room(plan: Plan, request: Request, share: Share | None = None) -> None:
    """Refuse an output without room for the files and bytes that are not written yet, and for decoded chunks.

    Chunks of a conversion that is resumed are not counted: what is left of it is not known before its journal is open.

    Raises:
        OutputError: there is too little room.
    """
    target = plan.target
    assert target is not None
    begun = (request.staging / (share.journal if share else JOURNAL)).exists()
    jobs = () if begun else share.jobs(plan.jobs) if share else plan.jobs
    present = [file.path.stat().st_blocks * 512 for file in target.files if file.path.exists()]
    nbytes, files = needs(target)
    place = next(path for path in request.staging.parents if path.exists())
    nbytes += scratch.room_for(plan.sources, jobs)
    require_space(place, nbytes - sum(present), files - len(present), request.out)


def _reopened(plan: Plan, root: Path) -> Plan:
    """A plan that reads the output with the reader of its format, whose settings have to be those of the plan."""
    verbatim, accept = isinstance(plan.spec, Verbatim), plan.source.settings.accept
    try:
        written = open_checkpoint(root, Settings(plan.spec.vocab, verbatim=verbatim, accept=accept))
    except (SourceError, RefusedError, UnsupportedError) as error:  # the error names files that are about to be deleted
        text = str(error).replace(f"{root}/", "").replace(str(root), "the output")
        raise VerificationError(f"what was written of {plan.source.root} does not read back: {text}") from None
    changed = differences(written.spec, plan.spec)
    if changed:
        raise VerificationError(
            f"the output's settings differ from the source's (output | source): {'; '.join(changed)}"
        )
    reopened = make_plan(written)
    return replace(reopened, jobs=(*reopened.jobs, *(plan.output_jobs(written) if plan.output_jobs else ())))


def verify_output(
    plan: Plan,
    request: Request,
    digests: Mapping[str, str],
    stopped: Callable[[], bool],
    root: Path,
    workers: Workers | None = None,
) -> None:
    """Read the output at `root` with the reader of its format, and compare settings and digests with the plan's.

    The `workers` read it if there are any.

    Raises:
        VerificationError: settings or digests differ, or the output cannot be read.
    """
    reopened = plan.plan_of_output(plan) if plan.plan_of_output else _reopened(plan, root)
    with Progress("verifying", reopened.nbytes, request.quiet, request.tell) as progress:
        try:
            limits = replace(request.limits, replicas="verify")
            actual = digest_of(reopened.jobs, limits, progress.advance, stopped, checked=False, workers=workers)
        except VerificationError as error:
            raise VerificationError(f"what was written does not read back: {error}", ANEW) from None
    wrong = sorted(name for name in {*actual, *digests} if actual.get(name) != digests.get(name))
    if wrong:
        raise VerificationError(f"{len(wrong)} tensors, such as {wrong[0]}, do not read back as written", ANEW)


def publish(request: Request) -> None:
    """Rename the finished folder to OUT.

    Raises:
        OutputError: OUT is not free; or OUT is complete, and the staging folder could not be deleted.
        OSError: the folder could not be renamed.
    """
    _check_free(request)  # once more: OUT may have been created during the conversion
    for folder in [request.root, *(path for path in request.root.rglob("*") if path.is_dir())]:
        sync_path(folder)
    put_in_place(request.root, request.place, request.staging)
    try:
        sync_path(request.place.parent)
        shutil.rmtree(request.staging)
    except OSError as error:
        raise OutputError(
            f"{request.out} is complete and in its place; after that {error.filename or request.staging} could not be "
            f"put in order: {error.strerror}",
            f"delete {request.staging}",
        ) from None
