"""The engine: executes jobs in threads or, with enough cores and bytes to move, in worker processes."""

from __future__ import annotations

import errno
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from converters.move.blocks import Files
from converters.move.job import Outcome, buffers_of, run_job
from converters.move.source_checks import SourceChecks
from converters.plan.plan import Job
from converters.plan.request import Limits
from formats.disk.threads import FEWER_PROCESSES, Threads
from formats.errors import LESS, Interrupted, UsageError

if TYPE_CHECKING:
    from converters.move.workers import Workers

COPIED, STARTED = (2, 64 << 20), (4, 512 << 20)
"""(fewest worker processes, fewest bytes for each) for which processes replace threads: forked, and newly started."""
TASKS = Path("/proc/self/task")
LIMITS = {errno.EAGAIN: FEWER_PROCESSES, errno.ENOMEM: LESS}
"""Error of a process that is started: what to do about it (fork(2), ERRORS)."""


def execute(
    jobs: Iterable[Job],
    files: Files,
    limits: Limits,
    *,
    done: Callable[[Job, str], None],
    advance: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    drifted: Callable[[Job, float], object] = lambda *_: None,
    workers: Workers | None = None,
) -> None:
    """Execute jobs, the largest first, in threads or in processes (`converters.move.workers`).

    Args:
        jobs: the jobs to execute.
        files: open files.
        limits: how much of the machine to use.
        done: called in the calling thread with each finished job and its digest.
        advance: called with the bytes of each tile.
        stop: asked at every tile; when true, nothing further is done.
        drifted: called in the calling thread with each job whose copies were averaged, and how far apart they were.
        workers: processes that execute the jobs; None to start as many as the jobs are worth (`workers_for`).

    Raises:
        Interrupted: `stop` was true before all jobs were done.
    """
    waiting, buffers = in_order(jobs)[::-1], buffers_of(limits)
    with ExitStack() as stack:
        workers = workers or stack.enter_context(workers_for(waiting, limits, files.locks))
        if workers:
            from converters.move.workers import Pass

            run, threads = Pass(workers, files, buffers, limits).run, len(workers.all)
        else:
            run, threads = lambda job, *rest: run_job(job, files, buffers, limits, *rest), limits.threads
        pool = stack.enter_context(Threads(threads))
        running: dict[Future[Outcome], Job] = {}
        while waiting or running:
            while waiting and len(running) < threads and not stop():
                job = waiting.pop()
                running[pool.submit(run, job, advance, stop)] = job
            if not running:
                raise Interrupted("stopped by a signal", "run the same command again to resume")
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                job, outcome = running.pop(future), future.result()
                done(job, outcome.digest)
                if outcome.drift:
                    drifted(job, outcome.drift)


@contextmanager
def workers_for(jobs: Collection[Job], limits: Limits, locks: Iterable[int]) -> Iterator[Workers | None]:
    """Start the worker processes that jobs are worth; None where threads of this process execute them.

    Args:
        jobs: the jobs to execute.
        limits: how much of the machine to use.
        locks: locked descriptors, which every process that writes keeps.
    """
    copied = has_one_thread()
    number = processes_for(jobs, limits, copied)
    if not number:
        yield None
        return
    from converters.move.workers import Workers

    with starting_processes():
        workers = Workers(number, copied, locks)
    with workers:
        yield workers


@contextmanager
def starting_processes() -> Iterator[None]:
    """A context in which processes are started.

    Raises:
        UsageError: the system starts no further one: there are too many, or the memory is short.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in LIMITS:
            raise
        raise UsageError(f"no further process can be started: {error.strerror}", LIMITS[error.errno]) from None


def has_one_thread() -> bool:
    """Whether this process can be forked: it has one thread, libraries' among them, according to Linux's /proc."""
    return TASKS.is_dir() and len([*TASKS.iterdir()]) == 1


def processes_for(jobs: Collection[Job], limits: Limits, copied: bool) -> int:
    """Return the number of worker processes for jobs; 0 for threads of this process.

    Args:
        jobs: the jobs to execute.
        limits: how much of the machine to use.
        copied: whether the workers are forked from this process.
    """
    fewest, each = COPIED if copied else STARTED
    number = min(limits.threads, len(jobs), sum(job.nbytes for job in jobs) // each)
    return number if number >= fewest and sys.executable else 0


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs, the largest first; jobs of one size alternate between output files, each of which has one writer."""
    turns, ranked = Counter[tuple[int, Path]](), list[tuple[int, int, Job]]()
    for job in jobs:
        number = 0
        for part in islice(job.targets, 1):
            turns[job.nbytes, part.fragment.path] += 1
            number = turns[job.nbytes, part.fragment.path]
        ranked.append((-job.nbytes, number, job))
    return [job for _, _, job in sorted(ranked, key=itemgetter(0, 1))]


def digest_of(
    jobs: Iterable[Job],
    limits: Limits,
    advance: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    checked: bool = True,
    workers: Workers | None = None,
) -> dict[str, str]:
    """Return the digest of each tensor, by the name of its job.

    Args:
        jobs: the jobs that read the tensors.
        limits: how much of the machine to use.
        advance: called with the bytes of each tile.
        stop: asked at every tile; when true, nothing further is done.
        checked: compare the checksums of the archives that hold the tensors. Not needed for tensors just written, whose
            digests are compared with those of the source, which is the stronger check.
        workers: processes that execute the jobs; None to start as many as the jobs are worth.

    Raises:
        DamagedError: a checksum differs.
    """
    digests: dict[str, str] = {}
    every = list(jobs)
    checks = SourceChecks(every, limits.replicas) if checked else None

    def done(job: Job, digest: str) -> None:
        digests[job.name] = digest

    with Files(checks=checks) as files:
        execute(every, files, limits, done=done, advance=advance, stop=stop, workers=workers)
        if checks is not None:
            checks.complete(files.read_stored, limits.threads, stop)
    return digests
