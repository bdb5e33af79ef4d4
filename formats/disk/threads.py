"""Pools of threads, in a system that may start no further one (`ulimit -u`, pids.max of a cgroup, short memory)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from formats.errors import UsageError

FEWER_PROCESSES = "lower -j, or raise the limit of processes (`ulimit -u`, or pids.max of the job's cgroup)"
"""What to do where the system starts no further process."""
FEWER_THREADS = f"{FEWER_PROCESSES}, or that of memory (`ulimit -v`)"
"""What to do where the system starts no further thread: one whose stack gets no memory looks the same."""
Args = ParamSpec("Args")
Result = TypeVar("Result")


def is_of_a_thread(error: BaseException) -> bool:
    """Whether an error is that of a thread which the system does not start (CPython, Modules/_threadmodule.c)."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


def no_further_thread() -> UsageError:
    """The error of a process that can start no further thread."""
    return UsageError("no further thread can be started", FEWER_THREADS)


@contextmanager
def starting() -> Iterator[None]:
    """A context in which threads are started.

    Raises:
        UsageError: the system starts no further one.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_thread(error):
            raise
        raise no_further_thread() from None


class Threads(ThreadPoolExecutor):
    """A pool of threads, which are started as work is submitted."""

    def submit(self, fn: Callable[Args, Result], /, *args: Args.args, **kwargs: Args.kwargs) -> Future[Result]:
        """Give work to the pool; `map` does so too.

        Raises:
            UsageError: this needs a further thread, and the system starts none.
        """
        with starting():
            return super().submit(fn, *args, **kwargs)
