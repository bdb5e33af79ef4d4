"""Average the norms of a GPT-NeoX checkpoint over its tensor parallel ranks, in the module and in FP32 master weights.

Each rank trains its own copy of every norm, and in a long training the copies drift apart. If only those in the module
were averaged, the first step that resumes from the master weights would bring the old ones back. Every other byte stays
what it is: files without a norm are hard links.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from converters.assets.trusted import require_inside
from converters.common.atomic import sync_path
from converters.convert import check_paths, publish
from converters.move.blocks import Files
from converters.move.engine import digest_of, execute
from converters.move.journal import open_journal
from converters.move.source_checks import SourceChecks
from converters.plan.parts import Part
from converters.plan.plan import Job, Plan, make_plan
from converters.plan.request import Limits, Request
from converters.prove.archive_crc import amend, check
from formats.checkpoint import MANIFEST, Checkpoint, Settings
from formats.deepspeed import folders as deepspeed
from formats.deepspeed.neox import checkpoint as neox
from formats.detect import signs
from formats.errors import DamagedError, OutputError, SourceError, UnsupportedError, count, some
from formats.torch_files import saved_names

NORMS = ("input_norm", "input_norm_bias", "post_norm", "post_norm_bias", "final_norm", "final_norm_bias")
MARK = "average-norms"
"""The fingerprint in the journal, which records no jobs."""


@dataclass(frozen=True)
class Averaging:
    """The planned work: jobs, and which files are copied or linked.

    Attributes:
        source: the opened checkpoint.
        jobs: the jobs that write the means, with their targets in the output.
        written: files of the source that hold a norm.
        linked: files of the source that hold no norm.
        out: the folder of the tag in the output.
        settings: the settings that the source was opened with.
        masters: whether there are optimizer states.
    """

    source: Checkpoint
    jobs: tuple[Job, ...]
    written: tuple[Path, ...]
    linked: tuple[Path, ...]
    out: Path
    settings: Settings
    masters: bool


def plan(run: Path, settings: Settings, request: Request) -> Averaging:
    """Find every copy of every norm.

    Raises:
        UnsupportedError: there is one tensor parallel rank, and so one copy; or the run is no checkpoint of GPT-NeoX.
        SourceError: a file that would be copied or linked is not one of the checkpoint.
    """
    signs.check(run)
    settings = replace(settings, gqa_layout="blocked")  # no norm depends on it
    source = neox.read(run, replace(settings, weights="module"))
    if source.topology["tp"] == 1:
        raise UnsupportedError(f"{source.home} is of one tensor parallel rank: its norms have one copy")
    out = request.root / source.home.name
    planned = [make_plan(source)]
    module = _norms(planned[0])
    jobs: list[Job] = []
    with_optimizer = any(saved_names.OPTIM.fullmatch(path.name) for path in source.home.iterdir())
    if with_optimizer:
        planned.append(make_plan(neox.read(run, replace(settings, weights="fp32-master"))))
        for name, job in _norms(planned[1]).items():
            mean = replace(job, targets=_moved(job, source.home, out))
            places = _moved(module[name], source.home, out)
            rounded = replace(mean, dtype=module[name].dtype, targets=places, twins={})
            jobs += [mean, rounded]
    else:
        jobs += [replace(job, targets=_moved(job, source.home, out)) for job in module.values()]
    _require_own(
        source.home,
        {part.fragment.path for planned_part in planned for job in planned_part.jobs for part in _copies(job)},
    )
    names = {part.fragment.path.name for job in jobs for part in job.targets}
    files = [path for path in sorted(source.home.iterdir()) if path.is_file() and path.name != MANIFEST]
    written = tuple(path for path in files if path.name in names)
    linked = tuple(path for path in files if path.name not in names)
    return Averaging(source, tuple(jobs), written, linked, out, settings, with_optimizer)


def _norms(plan: Plan) -> dict[str, Job]:
    return {job.name: job for job in plan.jobs if job.tensor in NORMS}


def _copies(job: Job) -> Iterable[Part]:
    return chain(job.sources, *job.replicas.values())


def _require_own(home: Path, weights: Collection[Path]) -> None:
    """Refuse files to copy or link that are outside the tag's folder; weights may be links to another file system.

    Raises:
        SourceError: a link leads out of the folder or nowhere, or something is neither a file nor a folder.
    """
    for path in sorted(home.rglob("*")):
        if path not in weights:
            require_inside(path, home)
        if not path.is_file() and not path.is_dir():
            raise SourceError(f"{path} is not a regular file", "remove it if it is not of the checkpoint")


def _moved(job: Job, home: Path, out: Path) -> tuple[Part, ...]:
    """The parts of all copies of a tensor, in the files of the output."""
    places = ((part, out / part.fragment.path.relative_to(home)) for part in _copies(job))
    return tuple(replace(part, fragment=part.fragment._replace(path=path)) for part, path in places)


def run(work: Averaging, request: Request, limits: Limits) -> dict[str, float]:
    """Write the output: linked files, copies of the others with the means in them.

    Returns:
        Name of each norm whose copies differed: how far apart these were.

    Raises:
        OutputError: OUT exists, there is no room, or another process or conversion uses the staging folder.
        DamagedError: an entry of a file that is copied has another CRC-32 than its archive records.
        VerificationError: the FP32 master weights of a norm are not those of the module.
    """
    check_paths(work.source, request)
    every, place = request.commit_seconds, request.place
    with open_journal(request.staging, MARK, (), force=request.force, every=every, place=place):
        check_paths(work.source, request)  # once more: what a killed run had moved away is back
        return _write(work, request, limits)


def _write(work: Averaging, request: Request, limits: Limits) -> dict[str, float]:
    """Write and publish the output, from the beginning: files that a killed run left are deleted."""
    drifted: dict[str, float] = {}
    try:
        if request.root.exists():
            shutil.rmtree(request.root)
        work.out.mkdir(parents=True)
        for path in work.linked:
            _link(path.resolve(), work.out / path.name)
        for path in work.written:
            shutil.copyfile(path, work.out / path.name)
        for folder in (path for path in work.source.home.iterdir() if path.is_dir()):
            shutil.copytree(folder, work.out / folder.name)
        (request.root / deepspeed.LATEST).write_text(work.source.home.name)
        checks = SourceChecks(work.jobs)
        with Files(checks=checks) as files:
            execute(
                work.jobs,
                files,
                replace(limits, replicas="mean", fresh=False, finite=True),
                done=lambda *_: None,
                drifted=lambda job, distance: drifted.update({job.name: distance}),
            )
            checks.complete(files.read_stored, limits.threads)
        _require_sound(work, limits)
        for path, ranges in _changed(work.jobs).items():
            amend(path, ranges)
            sync_path(path.parent)
        _verify(work, limits)
        publish(request)
    except OSError as error:
        reason = f"{error.filename or request.staging}: {error.strerror}"
        raise OutputError(reason, "free some space, and run it again") from None
    return drifted


def _require_sound(work: Averaging, limits: Limits) -> None:
    """Compare the checksums of all entries that are copied, also of those that hold no norm.

    Raises:
        DamagedError: one differs.
    """
    if damaged := check([*work.written], limits.threads, lambda _: None).damaged:
        parts = count(len(damaged), "part is", "parts are")
        raise DamagedError(
            f"{work.source.home} is damaged: {parts} not what was written: {some(damaged, 3)}", "copy it again"
        )


def _verify(work: Averaging, limits: Limits) -> None:
    """Read every norm of the output back: all copies have to be equal, and master weights to round to the module.

    Raises:
        VerificationError: copies differ, or the module differs from the rounded master weights.
    """
    for weights in ("module", *(["fp32-master"] if work.masters else [])):
        written = neox.read(work.out, replace(work.settings, tag=None, weights=weights))
        digest_of(_norms(make_plan(written)).values(), replace(limits, replicas="verify"), checked=False)


def _link(path: Path, place: Path) -> None:
    """Make a hard link, or a copy where file systems differ."""
    try:
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)


def _changed(jobs: Iterable[Job]) -> Mapping[Path, list[tuple[int, int]]]:
    """The byte ranges of each file that were written."""
    extents: dict[Path, list[tuple[int, int]]] = {}
    for job in jobs:
        for part in job.targets:
            extents.setdefault(part.fragment.path, []).append((part.fragment.offset, part.fragment.nbytes))
    return extents
