"""The journal: which jobs of a conversion are done and on disk, so that a killed run can go on.

`OUT.partial/journal.jsonl` begins with a fingerprint of the conversion; then comes a line for each finished job, its
name and its digest. Lines are written after the data that they speak of was forced to disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from converters.engine import Files
from converters.plan import Job, Plan
from formats.errors import OutputError


class Journal:
    """The finished jobs of a conversion, on disk."""

    def __init__(self, handle: int, digests: dict[str, str], every: float) -> None:
        self.handle, self.digests, self.every = handle, digests, every
        self.fresh: list[tuple[str, str]] = []
        self.committed = time.monotonic()

    def note(self, job: Job, found: str, files: Files) -> None:
        """Remember a finished job; now and then make sure that it outlives the machine."""
        self.digests[job.name] = found
        self.fresh.append((job.name, found))
        if time.monotonic() - self.committed >= self.every:
            self.commit(files)

    def commit(self, files: Files) -> None:
        """Force the data to disk, then the lines that say so."""
        if self.fresh:
            files.sync()
            os.write(self.handle, "".join(json.dumps(pair) + "\n" for pair in self.fresh).encode())
            os.fsync(self.handle)
        self.fresh, self.committed = [], time.monotonic()


@contextmanager
def open_journal(plan: Plan, staging: Path, force: bool, every: float) -> Iterator[Journal]:
    """Open or create the journal in a staging folder, alone, and only for this very conversion.

    Args:
        plan: the conversion.
        staging: the folder; what it holds of another conversion is discarded with `force`, else refused.
        force: see above.
        every: seconds after which finished work is forced to disk.

    Raises:
        OutputError: another process, or another conversion, has the folder.
    """
    fingerprint = _fingerprint(plan)
    try:
        staging.mkdir(parents=True, exist_ok=True)
        handle = os.open(staging / "journal.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise OutputError(f"{staging}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another conversion is writing {staging}") from None
        except OSError:
            pass  # a file system without locks
        lines = os.pread(handle, 1 << 30, 0).decode(errors="replace").splitlines()
        if lines and lines[0] != fingerprint:
            if not force:
                raise OutputError(
                    f"{staging} holds the beginnings of another conversion (or its source has changed since)",
                    f"remove {staging}, or start over with --force",
                )
            lines = []
            shutil.rmtree(staging / "out", ignore_errors=True)
            os.ftruncate(handle, 0)
        if not lines:
            shutil.rmtree(staging / "out", ignore_errors=True)
            os.write(handle, (fingerprint + "\n").encode())
        yield Journal(handle, dict(_pairs(lines[1:])), every)
    finally:
        os.close(handle)


def _pairs(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The entries of a journal; a torn last line is none."""
    for line in lines:
        try:
            name, found = json.loads(line)
        except ValueError:
            return
        yield name, found


def _fingerprint(plan: Plan) -> str:
    """What makes a conversion the same one: the source's files, the target's layout, the casts."""
    source = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in plan.source.files]
    target = (
        [[str(file.path), file.size, [placed.key for placed in file.tensors]] for file in plan.target.files]
        if plan.target
        else []
    )
    jobs = [[job.name, job.dtype, list(job.shape)] for job in plan.jobs]
    return "vitruvian 1 " + blake3(json.dumps([source, target, jobs, repr(plan.source.spec)]).encode()).hexdigest()
