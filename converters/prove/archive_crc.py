"""Check and update the CRC-32 that files of torch.save record of each of their members."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from formats.disk.handle import dangling, opened, pread, size_of
from formats.disk.threads import Threads
from formats.errors import SourceError
from formats.torch_files.archive import members_of
from formats.torch_files.crc32 import crc_of

SUFFIXES = (".pt", ".pth", ".bin", ".distcp")


@dataclass(frozen=True)
class Checked:
    """The result of checking the archives of a checkpoint.

    Attributes:
        files: how many archives there are.
        members: how many members have a checksum, and match it.
        unrecorded: how many members have none: `torch.serialization.set_crc32_options(False)` leaves it out.
        others: files of the same suffixes that are no archives, such as compressed ones.
        damaged: sentences on members that do not match, and on files that cannot be read.
    """

    files: int
    members: int
    unrecorded: int
    others: tuple[str, ...]
    damaged: tuple[str, ...]


def archives(folder: Path) -> list[Path]:
    """The files below a folder that may be archives.

    Raises:
        SourceError: a file is a broken link.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if broken := next(filter(None, map(dangling, paths)), ""):
        raise SourceError(broken)
    return [path for path in paths if path.is_file()]


def check(
    paths: list[Path],
    threads: int,
    advance: Callable[[int], None],
    is_checked: Callable[[Path, int], bool] = lambda *_: True,
) -> Checked:
    """Read every archive once, and compare the checksums of its members.

    Args:
        paths: the files.
        threads: files at a time.
        advance: called with the bytes of each member.
        is_checked: whether the member of a file that begins at a byte is read; the others are not counted.
    """
    with Threads(threads) as pool:
        states_of = list(pool.map(lambda path: list(_one(path, advance, is_checked)), paths))
    others = tuple(str(path) for path, states in zip(paths, states_of, strict=True) if states == [None])
    states = [state for of_file in states_of if of_file != [None] for state in of_file]
    damaged = tuple(state for state in states if state)
    return Checked(len(paths) - len(others), states.count(""), states.count(None), others, damaged)


def amend(path: Path, changed: Iterable[tuple[int, int]]) -> None:
    """Update the CRC-32 of an archive's members after byte ranges (offset, size) of the file were overwritten."""
    ranges = list(changed)
    with path.open("r+b") as file:
        fd = file.fileno()
        for member in members_of(fd, path):
            touched = any(at < member.start + member.size and member.start < at + size for at, size in ranges)
            if not touched or not member.crc:
                continue
            old = struct.pack("<I", member.crc)
            new = struct.pack("<I", crc_of(fd, member.start, member.size, path))
            for place in member.noted:
                if os.pread(fd, 4, place) == old:
                    os.pwrite(fd, new, place)
        os.fsync(fd)


def _one(path: Path, advance: Callable[[int], None], is_checked: Callable[[Path, int], bool]) -> Iterator[str | None]:
    """Yield the fault of each member, empty if sound, None without a checksum; None alone if the file is no archive."""
    with opened(path) as fd:
        if path.suffix != ".distcp" and not size_of(fd):  # torch writes an empty .distcp for a thread without data
            yield f"{path} is empty"
            return
        if pread(fd, 4, 0) != b"PK\x03\x04":
            yield None
            return
        try:
            for member in members_of(fd, path):
                if not is_checked(path, member.start):
                    advance(member.size)
                    continue
                if member.crc and crc_of(fd, member.start, member.size, path) != member.crc:
                    yield f"{path}: {member.name} ({member.size} bytes at byte {member.start})"
                else:
                    yield "" if member.crc or not member.size else None
                advance(member.size)
        except SourceError as error:
            yield str(error)
