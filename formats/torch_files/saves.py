"""The record of a save, which proves that the files of a checkpoint belong to each other.

    STEP/.files    {"vitruvian": 1, "files": {"__0_0.distcp": {"size": 1234, "crc32": "0a1b2c3d"}, ...}}

The CRC-32 of a file of torch.save is that of its zip directories, which have the CRC-32 of every entry: only a few KB
are read of a file of any size. The CRC-32 of any other file, such as `.metadata`, is that of all bytes. `train` writes
the record last, into a folder that gets its final name after that; files in `EDITABLE` are not recorded. Other programs
write no record; for their files see `Checkpoint.ties`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from formats.checkpoint import MANIFEST
from formats.disk.handle import opened, pread
from formats.disk.safetensors import file_size
from formats.errors import SourceError, short, some
from formats.torch_files.archive import directories
from formats.torch_files.crc32 import crc_of

RECORD = ".files"
MOST = 1 << 28
"""Maximum size of a record in bytes; the record of a million files is smaller."""
THREADS = 8
EDITABLE = (
    "tokenizer*", "*.model", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*",
    "generation_config.json",
)  # fmt: skip
"""Files of a checkpoint that may be edited after the save, because they do not change what the weights compute."""
REQUIRED = (".start", "adapter_config.json")
"""Recorded files without which a checkpoint would be taken for another kind. Other files may be deleted: their reader
reports that they are missing, or does not need them."""
ZIP = b"PK\x03\x04"


class Entry(NamedTuple):
    """A file of a save: its size in bytes, and its CRC-32 as this module computes it."""

    size: int
    crc32: int


def entry_of(path: Path) -> Entry:
    """The entry of a file in the record of a save.

    Raises:
        SourceError: the file begins like a file of torch.save, but is not one.
    """
    size = file_size(path)
    with opened(path) as handle:
        crc = 0
        if pread(handle, len(ZIP), 0) != ZIP:
            return Entry(size, crc_of(handle, 0, size, path))
        for directory in directories(handle, path):
            crc = crc32(directory, crc)
    return Entry(size, crc)


def entries_of(paths: Iterable[Path]) -> dict[str, Entry]:
    """The entries of several files of a folder, by file name."""
    from formats.disk.threads import Threads

    every = list(paths)
    with Threads(THREADS) as pool:
        return dict(zip((path.name for path in every), pool.map(entry_of, every), strict=True))


def packed(entries: Mapping[str, Entry]) -> bytes:
    """The bytes of a record file."""
    files = {name: {"size": entry.size, "crc32": f"{entry.crc32:08x}"} for name, entry in sorted(entries.items())}
    return (json.dumps({"vitruvian": 1, "files": files}, indent=1) + "\n").encode()


def is_bound(path: Path) -> bool:
    """Whether a file of a checkpoint belongs in the record."""
    return path.is_file() and path.name != RECORD and not any(fnmatch(path.name, name) for name in EDITABLE)


def recorded(folder: Path) -> dict[str, Entry] | None:
    """The record of a folder, None if it has none.

    Raises:
        SourceError: the record is damaged.
    """
    path = folder / RECORD
    try:
        if not path.is_file():
            return None
        record: Any = json.loads(path.read_bytes()) if file_size(path) <= MOST else None
        return {str(name): _entry(entry) for name, entry in record["files"].items()}
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SourceError(
            f"{path} is no record of the files of a checkpoint", f"copy the folder again: {folder}"
        ) from None


def _entry(fields: Any) -> Entry:
    """An entry of a record. Raises ValueError, TypeError or KeyError if the fields are invalid."""
    if type(fields["size"]) is not int or not re.fullmatch(r"[0-9a-f]{8}", fields["crc32"]):
        raise ValueError
    return Entry(fields["size"], int(fields["crc32"], 16))


def differing(record: Mapping[str, Entry], paths: Iterable[Path]) -> list[str]:
    """The names of the files whose size or CRC-32 differs from the record. Files without an entry are ignored.

    Raises:
        SourceError: a file is damaged.
    """
    every = [path for path in paths if path.name in record]
    names = [path.name for path in every if file_size(path) != record[path.name].size]
    entries = entries_of(path for path in every if path.name not in names)
    return sorted([*names, *(name for name, entry in entries.items() if entry != record[name])])


def files_of(record: Mapping[str, Entry], folder: Path) -> list[Path]:
    """The recorded files that exist.

    Raises:
        SourceError: a recorded file in `REQUIRED` does not exist.
    """
    lacking = [name for name in REQUIRED if name in record and not (folder / name).is_file()]
    if lacking:
        raise SourceError(
            f"{folder / lacking[0]} is not there, and {folder / RECORD} lists it",
            f"copy the folder again: rsync -rc SOURCE/{folder.name}/ {quote(str(folder))}/",
        )
    return [path for path in sorted(folder.iterdir()) if path.name in record and path.is_file()]


def require_one_save(folder: Path) -> None:
    """Check that the files of a folder with a record were saved together.

    Raises:
        SourceError: some files are of another save.
    """
    record = recorded(folder)
    if record:
        refuse_mixed(folder, differing(record, files_of(record, folder)))


def refuse_mixed(folder: Path, names: Iterable[str]) -> None:
    """Raise SourceError if names are given, which are those of files of another save."""
    mixed = list(names)
    if mixed:
        raise SourceError(
            f"{folder} is a mixture of different saves: {some(mixed, 3)} {'is' if len(mixed) == 1 else 'are'} not of "
            f"this step: {folder / RECORD} has another size or checksum",
            f"copy it again, by checksums and not by sizes: rsync -rc SOURCE/{folder.name}/ {quote(str(folder))}/",
        )


def untied(folder: Path, paths: Collection[Path], ties: Collection[str]) -> str:
    """A note that checksums do not prove that files are of one save; empty where something else proves it.

    Args:
        folder: folder of the checkpoint.
        paths: the files of torch.save that have its tensors.
        ties: as in `Checkpoint`.
    """
    if len(paths) < 2 or ties or any((folder / name).is_file() for name in (RECORD, MANIFEST)):
        return ""
    kinds = " and ".join(sorted({path.suffix for path in paths}))
    return f"each file by itself; nothing ties {kinds} files to each other"


def require_same(values: Mapping[Path, Callable[[str], Any]], ties: Iterable[str]) -> None:
    """Check that the model files of a checkpoint have the same values of the save, such as its step.

    Args:
        values: for each file, a function that returns a value by its name, None if the file has no such value.
        ties: the names of the values that have to be equal.

    Raises:
        SourceError: two files have different values.
    """
    (first, of_first), *others = values.items()
    for name in ties:
        for path, of_other in others:
            ours, theirs = short(of_other(name)), short(of_first(name))
            if ours != theirs:
                raise SourceError(
                    f"{path} is of {name} {ours}, {first} of {theirs}: files of different saves",
                    "copy the files of one save from all nodes",
                )
