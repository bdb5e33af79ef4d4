"""Writes token files: bytes copied by the kernel, files that appear complete or not at all, long columns."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from converters.common.atomic import claimed, clear, discard, named, sync_path, synced, write_file
from converters.common.progress import size
from formats.disk.safetensors import write_from
from formats.disk.threads import Threads
from formats.errors import Interrupted, OutputError, RefusedError, SourceError
from train.data.tokens.documents import other_bin
from train.data.tokens.indexed import Column, Indexed, bin_path, chunks, idx_path
from train.data.tokens.sidecar import Facts, facts_path, facts_text, mask_path

STEP = 64 << 20
"""Number of bytes that the kernel copies at a time; signals are handled between two copies."""
BUFFER = 4 << 20
"""Number of bytes that pass through memory at a time, where the kernel does not copy."""
MARK = "packs.lock"
"""Name of the file that tells a staging folder of these commands from others, such as those of `train tokenize`."""
NOT_HERE = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}
"""Errors of `copy_file_range` where that call is not supported: across file systems, old kernels, containers."""

Advance = Callable[[int], None]
Stop = Callable[[], bool]
Result = TypeVar("Result")


# --- bytes -----------------------------------------------------------------------------------------------------------


def json_bytes(record: Mapping[str, Any]) -> bytes:
    """A JSON file as people read it."""
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def stop_here() -> Interrupted:
    """The error to raise when `stop` is true."""
    return Interrupted("stopped by a signal", "run the same command again")


def copy_range(source: Path, begin: int, count: int, target: Path, advance: Advance, stop: Stop) -> None:
    """Copy a byte range of a file to a new file, and fsync the new file. Memory does not depend on the range.

    Raises:
        SourceError: the source ends before the range does.
        Interrupted: `stop` was true.
    """
    move: Callable[..., int | None] = _in_kernel if hasattr(os, "copy_file_range") else _in_memory
    with source.open("rb", buffering=0) as reader, synced(target) as writer:
        done = 0
        while done < count:
            if stop():
                raise stop_here()
            moved = move(reader.fileno(), writer.fileno(), begin + done, count - done, done)
            if moved is None:
                move = _in_memory
                continue
            if not moved:
                raise SourceError(f"{source} ends at byte {begin + done}, {begin + count} were expected")
            done += moved
            advance(moved)


def _in_kernel(reader: int, writer: int, begin: int, count: int, at: int) -> int | None:
    try:
        return os.copy_file_range(reader, writer, min(STEP, count), begin, at)
    except OSError as error:
        if error.errno in NOT_HERE:
            return None
        raise


def _in_memory(reader: int, writer: int, begin: int, count: int, at: int) -> int:
    piece = memoryview(os.pread(reader, min(BUFFER, count), begin))
    write_from(writer, piece, at)
    return len(piece)


def in_threads(tasks: Sequence[Callable[[Stop], Result]], jobs: int, stop: Stop) -> list[Result]:
    """Run tasks in parallel threads, and return their results in order. An error in one task stops all tasks.

    Args:
        tasks: the tasks; each is called with a function that returns whether the task has to stop.
        jobs: number of threads.
        stop: returns whether all tasks have to stop.
    """
    failed = threading.Event()
    with Threads(jobs) as pool:
        futures = [pool.submit(task, lambda: stop() or failed.is_set()) for task in tasks]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        if waiting:
            failed.set()
        for future in waiting:
            future.cancel()
    for future in done:
        future.result()
    return [future.result() for future in futures]


# --- complete or absent ----------------------------------------------------------------------------------------------


def members(prefix: Path) -> tuple[Path, ...]:
    """Paths of all files that a prefix may have, the index last: if the index exists, the others are complete."""
    return bin_path(prefix), mask_path(prefix), facts_path(prefix), idx_path(prefix)


def staging_of(prefix: Path) -> Path:
    """The folder in which the files of a prefix are written; a process that was killed leaves it."""
    return prefix.with_name(prefix.name + ".partial")


@contextmanager
def fresh(prefix: Path) -> Iterator[Path]:
    """Yield a prefix in a staging folder; its files are renamed to those of `prefix` when all of them are on disk.

    An error leaves no files; a `kill -9` leaves the folder `PREFIX.partial`, which the next attempt clears.

    Raises:
        OutputError: another process writes the files, or `PREFIX.partial` holds something else.
    """
    staging = staging_of(prefix)
    with claimed(staging, MARK):
        clear(staging, MARK)
        try:
            with named(prefix):
                yield staging / prefix.name
                sync_path(staging)
                idx_path(prefix).unlink(missing_ok=True)
                for staged, place in zip(members(staging / prefix.name), members(prefix), strict=True):
                    if staged.exists():
                        staged.replace(place)
                    else:
                        place.unlink(missing_ok=True)
                sync_path(prefix.parent)
        finally:
            discard(staging, MARK)


def write_facts(prefix: Path, facts: Facts | None) -> None:
    """Write the sidecar of token files, if there is one."""
    if facts is not None:
        write_file(facts_path(prefix), facts_text(facts).encode())


def check_space(folder: Path, needed: int) -> None:
    """Check that the disk of a folder has room for a number of bytes.

    Raises:
        OutputError: the disk has not enough room.
    """
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(f"{folder} needs {size(needed)} ({needed:,} bytes), {place} has {size(free)} free")


# --- long columns ----------------------------------------------------------------------------------------------------


class Joined:
    """Concatenated columns of numbers, each with an offset added, that are read a slice at a time."""

    def __init__(self, parts: Sequence[tuple[Column, int]], dtype: str) -> None:
        self.parts, self.dtype = parts, dtype
        self.starts = [0, *accumulate(len(part) for part, _ in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, where: slice) -> NDArray[Any]:
        low, high, _ = where.indices(len(self))
        pieces = [np.empty(0, self.dtype)]
        number = bisect_right(self.starts, low) - 1
        while low < high:
            (part, plus), start = self.parts[number], self.starts[number]
            piece = part[low - start : min(high - start, len(part))]
            pieces.append(np.asarray(piece, self.dtype) + np.array(plus, self.dtype))
            low, number = low + len(piece), number + 1
        return np.concatenate(pieces)


def check_beside(indexed: Indexed) -> None:
    """Check what is beside token files that are cut, merged or appended to.

    Raises:
        SourceError: their loss mask has another length.
        RefusedError: they are role bins, of which one would be changed without the other.
    """
    other = other_bin(indexed.prefix)
    if other is not None:
        raise RefusedError(
            f"{indexed.prefix} and {other.name} are role bins, tokens and the role of each: data packs have no roles",
            "name each P-text in data.train, or make one of all inputs: train role-bins --input FILE,FILE",
        )
    mask = mask_path(indexed.prefix)
    if mask.exists() and mask.stat().st_size != indexed.total:
        raise SourceError(f"{mask} has {mask.stat().st_size:,} bytes for {indexed.total:,} tokens")


def marks_of(indexed: Indexed) -> NDArray[np.int64] | None:
    """First sequence of each document, and the number of sequences at the end; None where each sequence is a document.

    A merge of GPT-NeoX loses the documents of its parts: marks that do not end at the last sequence are ignored.
    """
    marks = indexed.documents
    if indexed.whole or not len(marks) or marks[0] != 0 or marks[-1] != len(indexed):
        return None
    sound = ((part[1:] >= part[:-1]).all() and part[0] >= marks[max(0, low - 1)] for low, part in chunks(marks))
    if not all(sound):
        raise SourceError(f"{idx_path(indexed.prefix)} has documents that end before they begin")
    return marks
