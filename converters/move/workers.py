"""Worker processes that execute jobs, one process for each thread of the engine.

Python's global interpreter lock lets one thread of a process run at a time, and each system call releases and takes the
lock again: two threads lose part of their time to that, and from four on they wait for the lock more than they work. A
command's process has one thread, and is forked within a hundredth of a second. A process with many threads, such as a
trainer's, cannot be forked safely: a new process costs a fifth of a second and 21 MB.

The parent process decides the order of jobs, writes the journal and forces data to disk. A worker gets a job, and
answers with its outcome and the checksums of the bytes that it read and wrote.
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
from converters.move.turns import Turns
from converters.plan.plan import Job
from converters.plan.request import Limits
from formats.disk.handle import is_remote
from formats.disk.safetensors import Fragment
from formats.errors import Interrupted, ShortMemoryError, VitruvianError, short_memory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KEPT = 16 << 20
"""Bytes that a worker allocates and frees first: glibc then keeps freed blocks up to this size mapped (mallopt(3))."""
EVERY = 0.1
"""Seconds between two progress messages of a worker, and between two checks of whether to stop."""
PATIENCE = 10
"""Seconds within which a worker must end when it has no job or is asked to stop; after that it is killed."""
SHORT = 12
"""Exit code of a worker that gets no further memory."""
_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; from converters.move.workers import serve; "
    "sys.exit(serve(int(sys.argv[1])))"
)


class _Setting(NamedTuple):
    """The first message of a pass to a worker, which holds for the jobs that follow.

    Attributes:
        limits: the worker's own limits.
        sizes: the sizes of the storages to write that need a checksum; None where none does.
        checked: whether checksums of the source are compared.
        scratch: the folder of decoded chunks; None where the source has no chunks.
        turns: whether those that write to one file take turns.
    """

    limits: Limits
    sizes: Sizes | None
    checked: bool
    scratch: Path | None
    turns: bool


class _Done(NamedTuple):
    """A worker's answer to a job: the outcome, and the checksums of the bytes that it wrote and read."""

    outcome: Outcome
    written: Counted
    read: Entries


class Workers:
    """Worker processes, all started on construction, while this process still has no other thread.

    They serve one pass over jobs after another: the files that a conversion writes are read back by those that wrote.

    Args:
        number: the number of workers.
        copied: whether workers are forked from this process; otherwise they are new interpreters.
        locks: locked descriptors, which every process that writes keeps.
    """

    def __init__(self, number: int, copied: bool, locks: Iterable[int]) -> None:
        self.all: list[_Worker] = []
        try:
            for _ in range(number):
                self.all.append(_Worker(copied, [worker.connection for worker in self.all], locks))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all:
            worker.connection.close()
        for worker in self.all:  # they end side by side
            worker.wait()


class Pass:
    """One pass of the workers over jobs.

    Args:
        workers: the worker processes.
        files: the open files of this process, which executes jobs that no other process can (`_is_portable`).
        buffers: the buffers of this process's threads.
        limits: how much of the machine to use; each worker gets an equal share of the memory.
    """

    def __init__(self, workers: Workers, files: Files, buffers: Buffers, limits: Limits) -> None:
        self.files, self.buffers, self.limits = files, buffers, limits
        self.own = threading.local()
        self.idle = workers.all.copy()

    def run(self, job: Job, advance: Callable[[int], None], stop: Callable[[], bool]) -> Outcome:
        """Execute one job in the calling thread's worker. Raises as `run_job` does.

        Raises:
            Interrupted: the worker ended unexpectedly, or did not stop when asked to.
            ShortMemoryError: it got no further memory.
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
            chunks = any(fragment.chunk for fragment in _fragments(job))  # all jobs of a source read chunks, or none
            scratch = self.files.scratch.folder if chunks else None
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # a worker that has ended is an error: `_ended`
            self.own.worker = self.idle.pop()
            checked = self.files.checks is not None
            self.own.worker.send(_Setting(limits, sizes, checked, scratch, self.files.turns.taken))
        worker: _Worker = self.own.worker
        return worker


def _is_portable(job: Job) -> bool:
    """Whether another process can execute a job.

    Not portable are: a stream, which is read in order from where its previous tensor ended; an interleaved tensor,
    which one writer at a time writes; and a file in a store, which only the process that has signed in can read.
    """
    return not any(part.interleaved for part in job.targets) and not any(
        fragment.stream is not None or is_remote(fragment.path) for fragment in _fragments(job)
    )


def _fragments(job: Job) -> Iterator[Fragment]:
    """Yield all fragments that a job reads."""
    reads = chain.from_iterable(
        chain(read.sources, *read.twins.values(), *read.replicas.values()) for read in job.reads
    )
    return chain.from_iterable((part.fragment, *part.fragment.inputs) for part in reads)


class _Worker:
    """A worker process, seen from the parent process.

    Args:
        copied: whether the worker is forked from this process; otherwise it is a new interpreter.
        others: the parent's connections to earlier workers, which a forked worker inherits and has to close.
        locks: descriptors of locks that a new interpreter inherits and keeps open.
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
        """Have the worker execute a job, and return its answer.

        Raises:
            Interrupted: the worker ended unexpectedly, or did not stop within `PATIENCE` seconds and was killed.
            ShortMemoryError: it got no further memory.
        """
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

    def wait(self) -> None:
        """Wait until the worker has ended, whose connection is closed. One that waits for a dead disk is left."""
        for hangs in (False, True):
            if hangs:
                self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
                return

    def send(self, message: object) -> None:
        """Send the worker the `_Setting` of a pass, a job, or None to stop its current job.

        Raises:
            Interrupted: the worker has ended.
            ShortMemoryError: it got no further memory.
        """
        try:
            self.connection.send(message)
        except ConnectionError:
            raise self._ended() from None

    def _ended(self) -> Interrupted | ShortMemoryError:
        code = self.process.wait()
        if code == SHORT:
            return short_memory(f"process {self.process.pid}, one of those that convert, got no more")
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return Interrupted(
            f"process {self.process.pid}, one of those that convert, was ended {how}",
            "run the same command again to resume, if memory was short with a lower -j",
        )


class _Copy:
    """A fork of this process that serves jobs, with the used part of the interface of `subprocess.Popen`.

    Args:
        descriptor: the worker's end of the socket over which it gets jobs.
        others: inherited connections that the fork closes.
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
                code = serve(descriptor)
            except BaseException:  # noqa: BLE001  # the fork must not continue the work of this process
                traceback.print_exc()
            finally:
                os._exit(code)

    def wait(self, seconds: float = inf) -> int:
        """Wait for the end of the fork; return its exit code, or the negative number of a signal.

        Raises:
            TimeoutExpired: the fork has not ended within `seconds`.
        """
        limit = time.monotonic() + seconds
        while self.code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: the system has reaped the fork, and its code is lost
                pid, status = self.pid, 0
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a worker", seconds)
            else:
                time.sleep(0.001)
        return self.code

    def kill(self) -> None:
        """Kill the fork, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


# --- the process of a worker -----------------------------------------------------------------------------------------


def serve(descriptor: int) -> int:
    """Execute jobs from a socket until its other end is closed. Signals are left to the parent process.

    Returns:
        The exit code of this process.
    """
    from multiprocessing.connection import Connection

    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    try:
        bytearray(KEPT)
        connection: Connection[Any, Any] = Connection(descriptor)
        setting = connection.recv()
        while True:
            setting = _serve_pass(setting, connection)
    except (EOFError, ConnectionError):  # the parent process has ended, or has closed the connection
        return 0
    except (MemoryError, ShortMemoryError):  # the parent process says so (`_ended`)
        return SHORT


def _serve_pass(setting: _Setting, connection: Connection[Any, Any]) -> _Setting:
    """Execute the jobs of one pass; return the setting of the next. Raises EOFError after the last."""
    buffers = buffers_of(setting.limits)
    sums = Checksums(setting.sizes) if setting.sizes is not None else None
    with Files(sums, scratch=Scratch(folder=setting.scratch), turns=Turns(setting.turns)) as files:
        while True:
            match connection.recv():
                case Job() as job:
                    files.checks = SourceChecks([job], setting.limits.replicas) if setting.checked else None
                    connection.send(_answer(job, files, buffers, setting.limits, connection))
                case _Setting() as following:
                    return following
                case None:  # to stop: it may arrive after the job was done
                    pass


def _answer(
    job: Job, files: Files, buffers: Buffers, limits: Limits, connection: Connection[Any, Any]
) -> _Done | tuple[Exception, str]:
    """Execute a job, sending progress in bytes; return the answer, or an error with its traceback."""
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
    except Exception as error:  # noqa: BLE001  # raised again in the parent process
        return error, traceback.format_exc()
    connection.send(moved)
    return _Done(outcome, files.sums.taken() if files.sums else {}, files.checks.entries if files.checks else {})
