"""Runs a conversion and kills itself, as `kill -9` would, at the N-th call that changes the disk.

    python killed_at.py N SRC OUT TP PP [DIALECT]

N = 0: do not; print how many calls there were, and how many of them wrote weights. N < 0: at the -N-th such write.
Writing weights is slowed down, and waits before such a write kills, so that the journal keeps pace on any machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path


class Count:
    """Calls that changed the disk, and those of them that wrote weights."""

    calls = writes = 0
    lock = threading.Lock()


def killing(limit: int) -> Count:
    """Wrap the calls that change the disk: the process ends at the one that a limit names."""
    count = Count()

    def counted(function):
        def call(*args, **kwargs):
            with count.lock:  # of several threads none may pass the limit unseen
                count.calls += 1
                count.writes += function is pwrite
                calls, writes = count.calls, count.writes
            if function is pwrite:
                time.sleep(0.001)
            last = function is pwrite and writes == -limit
            if last:
                time.sleep(0.2)
            if calls == limit or last:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    pwrite = os.pwrite
    for module, name in (
        (os, "pwrite"),
        (os, "write"),
        (os, "fsync"),
        (os, "fdatasync"),
        (os, "ftruncate"),
        (shutil, "rmtree"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    for name in ("rename", "mkdir", "open"):
        setattr(Path, name, counted(getattr(Path, name)))
    return count


def main() -> None:
    """Wrap the calls, then convert."""
    limit, source, out, tp, pp = int(sys.argv[1]), *map(str, sys.argv[2:4]), *map(int, sys.argv[4:6])
    count = killing(limit)
    from converters.convert import run
    from converters.plan.request import Limits, Request
    from converters.plan.targets import plan_megatron
    from formats.megatron.args.options import CORE, Options
    from formats.registry import open_checkpoint

    request = Request(Path(out), limits=Limits(threads=1), quiet=True, commit_seconds=0.002)
    run(
        plan_megatron(
            open_checkpoint(Path(source)), request, Options(tp, pp, dialect=(sys.argv[6:] or [CORE])[0]), None
        ),
        request,
    )
    sys.stdout.write(f"{count.calls} {count.writes}")


if __name__ == "__main__":
    main()
