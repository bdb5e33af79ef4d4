"""Jobs in processes of their own, one for each thread that asks.

Python lets one thread of a process work at a time, and each call to the system gives that right away and asks for it
again: two threads lose a part of their time to that, and from four on they wait for it more than they work. A command's
process has no other thread, and is copied within a hundredth of a second. One with many, as a trainer's is, cannot be
copied: a new one costs a fifth of a second and 21 MB.

Which job is done when, what is noted and what is forced to disk stays with the process that asked. A worker gets a job,
and answers with its outcome and what it has counted: the checksums of what it read and wrote.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.common.atomic import STOPS
from converters.move.blocks import Files
from converters.move.crc32 import Checksums, Counted, Sizes
from converters.move.job import Outcome, buffers_of, run_job
from converters.move.reading import Buffers
from converters.move.scratch import Scratch
from converters.move.source_checks import Entries, SourceChecks
from converters.plan.plan import Job
from converters.plan.request import Limits
from formats.disk.handle import is_elsewhere
from formats.disk.safetensors import Fragment
from formats.errors import Interrupted, VitruvianError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KEPT = 16 << 20
"""Bytes that are freed once: after that glibc keeps freed blocks of up to this size and unmaps none (mallopt(3))."""
EVERY = 0.1
"""Seconds between two messages about progress, and between two looks at whether to stop."""
PATIENCE = 10
"""Seconds in which a worker ends that has no job, or is to stop."""
_CHILD = "import sys; sys.path[:] = sys.argv[2:]; from converters.move.workers import serve; serve(int(sys.argv[1]))"


class _Setting(NamedTuple):
    """What a worker gets once.

    Attributes:
        limits: its own.
        sizes: storages that need a checksum.
        checked: whether those that it reads have one.
        scratch: where chunks are decoded; None where there are none.
    """

    limits: Limits
    sizes: Sizes | None
    checked: bool
    scratch: Path | None


class _Done(NamedTuple):
    """What a worker answers: the outcome of a job, and what it has counted of what it wrote and read."""

    outcome: Outcome
    written: Counted
    read: Entries


class Workers:
    """The processes of some jobs, all started at once: as long as this process has no other thread.

    Args:
        number: how many.
        copied: whether they are copies of this process.
        files: the open files of this process, which does what cannot be done elsewhere.
        buffers: the memory of its threads.
        limits: how much of the machine to use; a worker gets its share of the memory.
    """

    def __init__(self, number: int, copied: bool, files: Files, buffers: Buffers, limits: Limits) -> None:
        self.files, self.buffers, self.limits = files, buffers, limits
        self.own = threading.local()
        self.all: list[_Worker] = []
        for _ in range(number):
            self.all.append(_Worker(copied, [worker.connection for worker in self.all], files.locks))
        self.idle = self.all.copy()

    def run(self, job: Job, advance: Callable[[int], None], stop: Callable[[], bool]) -> Outcome:
        """Execute one job in this thread's process. Raises as `run_job` does.

        Raises:
            Interrupted: the process ended, which no job does.
        """
        job = job.made
        if not _is_portable(job):
            return run_job(job, self.files, self.buffers, self.limits, advance, stop)
        done = self._worker(job).run(job, advance, stop)
        if self.files.sums is not None:
            self.files.sums.merge(done.written)
        if self.files.checks is not None:
            self.files.checks.merge(job, done.read)
        self.files.descriptors.written(part.fragment.path for part in job.targets)
        return done.outcome

    def _worker(self, job: Job) -> _Worker:
        if not hasattr(self.own, "worker"):
            limits = replace(self.limits, threads=1, memory=self.limits.room // self.limits.threads)
            sizes = self.files.sums.sizes if self.files.sums is not None else None
            chunks = any(fragment.chunk for fragment in _fragments(job))  # in one job of a source, or in none
            scratch = self.files.scratch.folder if chunks else None
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # a worker that has ended is an error: `_ended`
            self.own.worker = self.idle.pop()
            self.own.worker.send(_Setting(limits, sizes, self.files.checks is not None, scratch))
        worker: _Worker = self.own.worker
        return worker

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all:
            worker.close()


def _is_portable(job: Job) -> bool:
    """Whether another process can do a job.

    A stream is read on from where the last tensor of it ended, an interleaved tensor is written by one at a time, and
    a store is asked by the process that has signed in.
    """
    return not any(part.woven for part in job.targets) and not any(
        fragment.stream is not None or is_elsewhere(fragment.path) for fragment in _fragments(job)
    )


def _fragments(job: Job) -> Iterator[Fragment]:
    """All that a job reads."""
    reads = chain.from_iterable(chain(read.sources, read.twins, *read.replicas.values()) for read in job.reads)
    return chain.from_iterable((part.fragment, *part.fragment.inputs) for part in reads)


class _Worker:
    """A process, as the one that asks sees it.

    Args:
        copied: whether it is a copy of this one.
        others: the ends of earlier workers' connections that a copy of this process has, too.
        locks: descriptors that it keeps open.
    """

    def __init__(self, copied: bool, others: Iterable[Connection[Any, Any]], locks: Iterable[int]) -> None:
        from multiprocessing.connection import Pipe

        self.connection, far = Pipe()
        with far:
            self.process = (
                _Copy(far.fileno(), [self.connection, *others])
                if copied
                else subprocess.Popen(  # noqa: S603  # our own interpreter and our own words
                    [sys.executable, "-c", _CHILD, str(far.fileno()), *sys.path],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(far.fileno(), *locks),
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                )
            )

    def run(self, job: Job, advance: Callable[[int], None], stop: Callable[[], bool]) -> _Done:
        """Have a job done."""
        self.send(job)
        asked = inf
        while True:
            if asked == inf and stop():
                self.send(None)
                asked = time.monotonic()
            if time.monotonic() - asked > PATIENCE:
                self.process.kill()
                raise Interrupted(
                    f"process {self.process.pid}, one of those that convert, did not stop within {PATIENCE} seconds "
                    "and was killed",
                    "run the same command again to resume",
                )
            if not self.connection.poll(EVERY):
                continue
            try:
                answer = self.connection.recv()
            except (EOFError, ConnectionError):
                raise self._ended() from None
            match answer:
                case int():
                    advance(answer)
                case _Done():
                    return answer
                case (Exception() as error, str() as trace):
                    if not isinstance(error, VitruvianError | OSError):
                        error.__cause__ = RuntimeError(f"in a process of its own:\n{trace}")
                    raise error

    def close(self) -> None:
        """End the process, which has no job or whose job no longer counts. One that waits for a dead disk is left."""
        self.connection.close()
        for hangs in (False, True):
            if hangs:
                self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
                return

    def send(self, message: object) -> None:
        """Give it a job, None to stop the last one, or first of all its setting."""
        try:
            self.connection.send(message)
        except ConnectionError:
            raise self._ended() from None

    def _ended(self) -> Interrupted:
        code = self.process.wait()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return Interrupted(
            f"process {self.process.pid}, one of those that convert, was ended {how}",
            "run the same command again to resume, if memory was short with a lower -j",
        )


class _Copy:
    """A copy of this process that does jobs, with what is used of `subprocess.Popen`.

    Args:
        descriptor: the end of a socket from which it gets them.
        others: connections that are not its own.
    """

    def __init__(self, descriptor: int, others: Iterable[Connection[Any, Any]]) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                gc.freeze()  # so that memory stays shared
                os.setsid()
                for connection in others:
                    connection.close()
                serve(descriptor)
                code = 0
            except BaseException:  # noqa: BLE001  # nothing of what this process had to do is left to the copy
                traceback.print_exc()
            finally:
                os._exit(code)

    def wait(self, seconds: float = inf) -> int:
        """Its exit code, or a signal's negative number. Raises TimeoutExpired."""
        limit = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a worker", seconds)
            else:
                time.sleep(0.001)
        return self.code

    def kill(self) -> None:
        """End it."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


# --- the process of a worker -----------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Do jobs until the other end of a socket is closed. Signals are the business of the process that asks."""
    from multiprocessing.connection import Connection

    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    bytearray(KEPT)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        setting = connection.recv()
        buffers = buffers_of(setting.limits)
        sums = Checksums(setting.sizes) if setting.sizes is not None else None
        with Files(sums, scratch=Scratch(folder=setting.scratch)) as files:
            while True:
                job = connection.recv()
                if job is not None:  # the word to stop comes late where the job was done already
                    files.checks = SourceChecks([job], setting.limits.replicas) if setting.checked else None
                    connection.send(_answer(job, files, buffers, setting.limits, connection))
    except (EOFError, ConnectionError):  # the other process has ended, or wants no more
        return


def _answer(
    job: Job, files: Files, buffers: Buffers, limits: Limits, connection: Connection[Any, Any]
) -> _Done | tuple[Exception, str]:
    """Do a job, and say how far it is on the way."""
    incoming = select.poll()
    incoming.register(connection, select.POLLIN)
    moved, reported = 0, time.monotonic()

    def advance(nbytes: int) -> None:
        nonlocal moved, reported
        moved += nbytes
        if time.monotonic() - reported > EVERY:
            connection.send(moved)
            moved, reported = 0, time.monotonic()

    try:
        outcome = run_job(job, files, buffers, limits, advance, lambda: bool(incoming.poll(0)))
    except Exception as error:  # noqa: BLE001  # raised where it was asked for
        return error, traceback.format_exc()
    connection.send(moved)
    return _Done(outcome, files.sums.taken() if files.sums else {}, files.checks.entries if files.checks else {})
