"""Plans archives of `torch.save` that are to be written, or makes small ones as a whole; `archive.py` reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zlib_ng.zlib_ng import crc32

from formats.torch_files import pickle_values
from formats.torch_files.archive import LOCAL, SMALL

ALIGNMENT = 64
STREAM = "archive"
"""Name of the root folder in an archive that torch.save wrote to a stream."""


@dataclass(frozen=True)
class Archive:
    """The plan of an archive to be written: everything is known except the checksums of the storages.

    Storages are written at their offsets in any order; `headers` then yields all other bytes.
    """

    members: tuple[tuple[str, int, bytes | None, int], ...]
    """Name, offset of the local header, content (None for a storage), and size in bytes of each member."""
    directory: int

    @cached_property
    def size(self) -> int:
        """Size of the whole file, in bytes."""
        return self.directory + len(self._tail({}))

    def storages(self) -> dict[str, tuple[int, int]]:
        """Byte offset and size of each storage's data, by member name."""
        return {
            name: (start + len(_local_header(name, start, 0, size)), size)
            for name, start, content, size in self.members
            if content is None
        }

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of everything except the storages, given the CRC-32 of each storage by member name."""
        crcs = {name: crc32(content) for name, _, content, _ in self.members if content is not None}
        crcs.update(checksums)
        for name, start, content, size in self.members:
            yield start, _local_header(name, start, crcs[name], size) + (content or b"")
        yield self.directory, self._tail(crcs)

    def _tail(self, crcs: Mapping[str, int]) -> bytes:
        entries = b"".join(
            _central_header(name, start, crcs.get(name, 0), size) for name, start, _, size in self.members
        )
        count, start = len(self.members), self.directory
        tail = entries
        if count > 0xFFFE or start + len(entries) >= SMALL:
            tail += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entries), start)
            tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
        small_count, small_size = min(count, 0xFFFF), min(len(entries), SMALL)
        return tail + struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, small_count, small_count, small_size, min(start, SMALL), 0
        )


def plan_archive(value: Any, storages: Mapping[str, int], folder: str = STREAM) -> Archive:
    """Lay out an archive for an object whose tensors refer to storages of the given sizes in bytes."""
    contents: list[tuple[str, bytes | None, int]] = [
        ("data.pkl", pickle_values.dumps(value), 0),
        (".format_version", b"1", 0),
        (".storage_alignment", str(ALIGNMENT).encode(), 0),
        ("byteorder", b"little", 0),
        *((f"data/{key}", None, size) for key, size in storages.items()),
        ("version", b"3\n", 0),
    ]
    members, position = [], 0
    for name, content, nbytes in contents:
        size = nbytes if content is None else len(content)
        members.append((f"{folder}/{name}", position, content, size))
        position += len(_local_header(f"{folder}/{name}", position, 0, size)) + size
    return Archive(tuple(members), position)


def packed(value: Any, storages: Mapping[str, bytes] | None = None) -> bytes:
    """The bytes of a whole archive of an object whose tensors, if there are any, refer to small storages."""
    raw_storages = storages or {}
    archive = plan_archive(value, {key: len(raw) for key, raw in raw_storages.items()})
    content, sums = bytearray(archive.size), {}
    for (name, (start, size)), raw in zip(archive.storages().items(), raw_storages.values(), strict=True):
        content[start : start + size] = raw
        sums[name] = crc32(raw)
    for offset, part in archive.headers(sums):
        content[offset : offset + len(part)] = part
    return bytes(content)


def _local_header(name: str, start: int, crc: int, size: int) -> bytes:
    """A local header whose extra field pads the data to the alignment; sizes past 4 GiB go into a zip64 field."""
    encoded = name.encode()
    zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= SMALL else b""
    padding = -(start + LOCAL + len(encoded) + len(zip64) + 4) % ALIGNMENT
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    small = min(size, SMALL)
    fields = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45, 0, 0, 0, 0x21, crc, small, small, len(encoded), len(extra))
    return fields + encoded + extra


def _central_header(name: str, start: int, crc: int, size: int) -> bytes:
    encoded = name.encode()
    large = [number for number in (size, size, start) if number >= SMALL]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    small = min(size, SMALL)
    fields = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", 45, 45, 0, 0, 0, 0x21, crc, small, small, len(encoded), len(extra), 0, 0, 0, 0),
        min(start, SMALL),
    )
    return fields + encoded + extra
