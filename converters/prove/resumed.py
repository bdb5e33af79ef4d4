"""A verification that resumes after a kill, and that several processes can share; `OUT.verify` holds the journals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from converters.common.atomic import stoppable
from converters.move.blocks import Files
from converters.move.engine import execute
from converters.move.journal import AT, JOURNAL, JOURNALS, Share, fingerprint, open_journal
from converters.plan.plan import Plan
from converters.plan.request import COMMIT_SECONDS, Limits
from formats.errors import OutputError


def journal_of(out: Path) -> Path:
    """The folder of the journals of a checkpoint's verification."""
    place = out.resolve()
    return place.with_name(place.name + ".verify")


def has_journal(out: Path) -> bool:
    """Whether a part of a checkpoint was verified, or a verification was interrupted. Empty journals say nothing."""
    folder = journal_of(out)
    return (folder / JOURNAL).is_file() and any(path.stat().st_size for path in folder.glob(JOURNALS))


def _remove_empty(folder: Path) -> None:
    """Delete empty journals, and their folder if nothing else is in it."""
    with suppress(OSError):
        for path in folder.glob(JOURNALS):
            if not path.stat().st_size:
                path.unlink()
        folder.rmdir()


def digests(
    out: Path, plan: Plan, limits: Limits, share: Share | None, advance: Callable[[int], None]
) -> dict[str, str]:
    """The digests of a plan's jobs, or of a share of them. Tensors in a journal of the same files are not read again.

    Raises:
        OutputError: the journal cannot be written; or another process has locked it, or the files have changed.
        Interrupted: a signal came; the same call resumes.
    """
    files = sorted({part.fragment.path for job in plan.reads for part in job.sources})
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    facts, _, changed = fingerprint(plan, limits.replicas).partition(AT)
    mark = blake3(f"{facts} {stats}".encode(errors="surrogateescape")).hexdigest() + AT + changed
    jobs = share.jobs(plan.jobs) if share else [*plan.jobs]
    opened = open_journal(journal_of(out), mark, (), share, force=True, every=COMMIT_SECONDS)
    try:
        with stoppable() as stopped, opened as journal, Files() as open_files, journal.kept(open_files):
            todo = [job for job in jobs if job.name not in journal.digests]
            advance(sum(job.nbytes for job in jobs) - sum(job.nbytes for job in todo))
            execute(todo, open_files, limits, done=journal.note, advance=advance, stop=stopped)
    except OutputError:
        if not has_journal(out):  # no room for a line
            _remove_empty(journal_of(out))
        raise
    return {job.name: journal.digests[job.name] for job in jobs}
