"""Runs `train` and kills itself, as `kill -9` would, at the N-th call that changes the disk.

    python slice_killed_at.py N WORDS...

N = 0: do not; print to stderr how many calls there were.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path


def main() -> None:
    """Wrap the calls, then run."""
    limit, calls, guard = int(sys.argv[1]), 0, threading.Lock()

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            with guard:
                calls += 1
                if calls == limit:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, names in {
        os: ("copy_file_range", "pwrite", "write", "fsync", "ftruncate"),
        shutil: ("rmtree",),
        Path: ("rename", "replace", "mkdir", "open", "unlink"),
    }.items():
        for name in names:
            setattr(module, name, counted(getattr(module, name)))

    from train import cli

    sys.argv = ["train", *sys.argv[2:]]
    try:
        cli.main()
    finally:
        sys.stderr.write(f"calls {calls}\n")


if __name__ == "__main__":
    main()
