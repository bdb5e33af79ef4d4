"""The journal: which jobs of a conversion are done and on disk, so that a killed run can go on.

`OUT.partial/journal.jsonl` begins with a fingerprint of the conversion; then comes a line for each finished job, its
name and its digest. Lines are written after the data that they speak of was forced to disk.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from converters.blocks import Files
from converters.durable import lock, write_all
from converters.plan import Job, Plan
from formats.checkpoint import OutputFile
from formats.errors import OutputError

JOURNAL = "journal.jsonl"


class Journal:
    """The finished jobs of a conversion, on disk. `digests` has those of a run before this one too."""

    def __init__(self, handle: int, digests: dict[str, str], every: float) -> None:
        self.handle, self.digests, self.every = handle, digests, every
        self.fresh: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def note(self, job: Job, found: str) -> None:
        """Remember a finished job."""
        with self.lock:
            self.digests[job.name] = found
            self.fresh.append((job.name, found))

    def commit(self, files: Files) -> None:
        """Force the data to disk, then the lines that say so."""
        with self.lock:
            fresh, self.fresh = self.fresh, []
        files.sync()
        if fresh:
            write_all(self.handle, "".join(json.dumps(pair) + "\n" for pair in fresh).encode())
            os.fsync(self.handle)

    @contextmanager
    def kept(self, files: Files) -> Iterator[None]:
        """Commit again and again while jobs run, and once more behind them: the disk works along."""
        finished, failed = threading.Event(), []

        def work() -> None:
            try:
                while not finished.wait(self.every):
                    self.commit(files)
            except OSError as error:  # raised where the conversion can see it
                failed.append(error)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            yield
        finally:
            finished.set()
            worker.join()
            self.commit(files)
        if failed:
            raise failed[0]


@contextmanager
def open_journal(
    staging: Path, fingerprint: str, files: Iterable[OutputFile], *, force: bool, every: float
) -> Iterator[Journal]:
    """Open or create the journal in a staging folder, alone, and only for this very conversion.

    Args:
        staging: the folder.
        fingerprint: what the journal must be of.
        files: what the finished jobs wrote to; if one of them is gone, nothing counts as finished.
        force: discard what the folder holds of another conversion, instead of refusing.
        every: seconds after which finished work is forced to disk.

    Raises:
        OutputError: another process, or another conversion, has the folder; or it cannot be written.
    """
    handle = -1
    try:
        staging.mkdir(parents=True, exist_ok=True)
        if not (staging / JOURNAL).is_file() and any(staging.iterdir()):
            raise OutputError(f"{staging} is needed for the work and holds something else", "move it out of the way")
        handle = os.open(staging / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        lock(handle, staging)
        head, finished, length = _entries(os.pread(handle, os.fstat(handle).st_size, 0))
        if head not in ("", fingerprint) and not force:
            raise OutputError(
                f"{staging} holds the beginnings of another conversion (or its source has changed since)",
                f"remove {staging}, or start over with --force",
            )
        whole = all(file.path.is_file() and file.path.stat().st_size == file.size for file in files)
        if head != fingerprint or (finished and not whole):
            shutil.rmtree(staging / "out", ignore_errors=True)
            finished, length = {}, 0
        os.ftruncate(handle, length)
        if not length:
            write_all(handle, (fingerprint + "\n").encode())
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        raise OutputError(f"{staging}: {error.strerror}") from None
    except OutputError:
        if handle >= 0:
            os.close(handle)
        raise
    try:
        yield Journal(handle, finished, every)
    finally:
        os.close(handle)


def _entries(content: bytes) -> tuple[str, dict[str, str], int]:
    """Fingerprint, finished jobs and their digests, and how many bytes of the journal are whole."""
    head, *lines = content.splitlines(keepends=True) or [b""]
    if not head.endswith(b"\n"):
        return "", {}, 0
    finished, length = {}, len(head)
    for line in lines:
        try:
            pair = json.loads(line)
        except ValueError:
            break
        if not isinstance(pair, list) or [type(part) for part in pair] != [str, str]:
            break
        finished[pair[0]] = pair[1]
        length += len(line)
    return head.decode(errors="replace").strip(), finished, length


def fingerprint(plan: Plan, replicas: str) -> str:
    """What makes a conversion the same one: the source's files, the target's layout, casts and replica policy."""
    source = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in plan.source.files]
    files = plan.target.files if plan.target else ()
    target = [
        [str(file.path), file.size, [(placed.slot.file, placed.key, placed.slot.layer) for placed in file.tensors]]
        for file in files
    ]
    jobs = [[job.name, job.dtype, list(job.shape)] for job in plan.jobs]
    facts = json.dumps([source, target, jobs, repr(plan.spec), replicas])
    return "vitruvian 1 " + blake3(facts.encode()).hexdigest()
