"""The zip archives of `torch.save`, read and written without torch.

A file is a zip of stored members: `PREFIX/data.pkl` holds the object, `PREFIX/data/KEY` the bytes of each storage,
aligned to 64 bytes (torch/csrc and caffe2/serialize/inline_container.cc, torch 2.13). Nothing in it is compressed, so
each tensor is a byte range of the file.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from formats import pickles
from formats.errors import SourceError, UnsupportedError, short
from formats.storage import DTYPES, Fragment, file_size
from formats.unpickle import loads

MAX_PICKLE = 1 << 30
ALIGNMENT = 64
_LOCAL = 30
_SMALL = 0xFFFFFFFF


@dataclass(frozen=True)
class TorchFile:
    """An opened archive: the inert object, and where each storage lies (byte offset and size)."""

    path: Path
    value: Any
    storages: Mapping[str, tuple[int, int]]

    def fragment(self, ref: pickles.TensorRef, name: str) -> Fragment:
        """Where a tensor lies on disk.

        Raises:
            SourceError: it reaches past its storage, or the storage is missing.
        """
        if ref.storage.key not in self.storages:
            raise SourceError(f"{self.path}: {name} lies in the storage {ref.storage.key!r}, which the archive lacks")
        start, size = self.storages[ref.storage.key]
        item = DTYPES[ref.dtype]
        last = sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
        if prod(ref.shape) and (ref.offset + last + 1) * item > size:
            raise SourceError(
                f"{self.path}: {name} reaches to byte {(ref.offset + last + 1) * item} of a storage of {size} bytes"
            )
        return Fragment(self.path, start + ref.offset * item, ref.dtype, ref.shape, ref.strides)


_DAMAGE = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError, struct.error)


def read_torch(path: Path) -> TorchFile:
    """Open a `torch.save` archive and unpickle its object inertly.

    Raises:
        SourceError: the archive is damaged or cut off.
        UnsupportedError: it is compressed, big-endian, or older than torch 1.6.
    """
    file_size(path)
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            members = archive.infolist()
        except _DAMAGE as error:
            file.seek(0)
            if file.read(1) == b"\x80":
                raise UnsupportedError(f"{path}: written before torch 1.6, which used no zip archive") from None
            raise SourceError(f"{path}: no complete torch.save archive: {error}") from None
        extents = dict(_extents(path, file, members, archive.start_dir))
        pickled = [name for name in extents if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickled) != 1:
            raise SourceError(f"{path}: a torch.save archive has one data.pkl, this one has {len(pickled)}")
        prefix = pickled[0].removesuffix("data.pkl")
        if prefix + "byteorder" in extents and _read(file, extents[prefix + "byteorder"]) != b"little":
            raise UnsupportedError(f"{path}: written on a big-endian machine")
        if extents[pickled[0]][1] > MAX_PICKLE:
            raise SourceError(f"{path}: its pickle claims {extents[pickled[0]][1]} bytes")
        value = loads(_read(file, extents[pickled[0]]), str(path))
    storages = {
        name.removeprefix(prefix + "data/"): extent
        for name, extent in extents.items()
        if name.startswith(prefix + "data/")
    }
    return TorchFile(path, value, storages)


def _read(file: BinaryIO, extent: tuple[int, int]) -> bytes:
    file.seek(extent[0])
    return file.read(extent[1])


def _extents(
    path: Path, file: BinaryIO, members: list[zipfile.ZipInfo], directory: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, byte offset and size of each member; none may be compressed, doubled or overlap another."""
    position, seen = 0, set()
    for member in sorted(members, key=lambda member: member.header_offset):
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UnsupportedError(f"{path}: the member {short(member.filename)} is compressed or encrypted")
        if not position <= member.header_offset < directory:
            raise SourceError(f"{path}: the member {short(member.filename)} lies outside the archive or in another one")
        file.seek(member.header_offset)
        local = file.read(_LOCAL + len(member.orig_filename.encode()))
        if len(local) < _LOCAL or local[:4] != b"PK\x03\x04" or local[_LOCAL:] != member.orig_filename.encode():
            raise SourceError(f"{path}: the member {short(member.filename)} has no header of its own")
        names, extra = struct.unpack_from("<HH", local, 26)
        start = member.header_offset + _LOCAL + names + extra
        position = start + member.file_size
        if member.filename in seen or member.file_size != member.compress_size or position > directory:
            raise SourceError(f"{path}: the member {short(member.filename)} is doubled, cut off or has two sizes")
        seen.add(member.filename)
        yield member.filename, (start, member.file_size)


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Archive:
    """The plan of an archive to be written: everything is known but the storages' checksums.

    Storages are written at their offsets in any order; `headers` then gives every other byte.
    """

    members: tuple[tuple[str, int, bytes | None, int], ...]
    """Name, offset of the local header, content (None for a storage), size."""
    directory: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.directory + len(self._tail({}))

    def storages(self) -> dict[str, tuple[int, int]]:
        """Byte offset and size of each storage's data, by member name."""
        return {
            name: (start + len(_local_header(name, start, 0, size)), size)
            for name, start, content, size in self.members
            if content is None
        }

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of everything but the storages, given the CRC-32 of each storage by member name."""
        crcs = {name: zlib.crc32(content) for name, _, content, _ in self.members if content is not None}
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
        if count > 0xFFFE or start + len(entries) >= _SMALL:
            tail += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entries), start)
            tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
        small_count, small_size = min(count, 0xFFFF), min(len(entries), _SMALL)
        return tail + struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, small_count, small_count, small_size, min(start, _SMALL), 0
        )


def plan_archive(value: Any, storages: Mapping[str, int]) -> Archive:
    """Lay out an archive for an object whose tensors refer to storages of the given sizes in bytes."""
    contents: list[tuple[str, bytes | None, int]] = [
        ("data.pkl", pickles.dumps(value), 0),
        (".format_version", b"1", 0),
        (".storage_alignment", str(ALIGNMENT).encode(), 0),
        ("byteorder", b"little", 0),
        *((f"data/{key}", None, size) for key, size in storages.items()),
        ("version", b"3\n", 0),
    ]
    members, position = [], 0
    for name, content, nbytes in contents:
        size = nbytes if content is None else len(content)
        members.append((f"archive/{name}", position, content, size))
        position += len(_local_header(f"archive/{name}", position, 0, size)) + size
    return Archive(tuple(members), position)


def _local_header(name: str, start: int, crc: int, size: int) -> bytes:
    """A local header whose extra field pads the data to the alignment; sizes past 4 GiB go into a zip64 field."""
    encoded = name.encode()
    zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _SMALL else b""
    padding = -(start + _LOCAL + len(encoded) + len(zip64) + 4) % ALIGNMENT
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    small = min(size, _SMALL)
    fields = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45, 0, 0, 0, 0x21, crc, small, small, len(encoded), len(extra))
    return fields + encoded + extra


def _central_header(name: str, start: int, crc: int, size: int) -> bytes:
    encoded = name.encode()
    large = [number for number in (size, size, start) if number >= _SMALL]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    small = min(size, _SMALL)
    fields = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", 45, 45, 0, 0, 0, 0x21, crc, small, small, len(encoded), len(extra), 0, 0, 0, 0),
        min(start, _SMALL),
    )
    return fields + encoded + extra
