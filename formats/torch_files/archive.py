"""Reads the zip archives of `torch.save` without torch; `archive_plan.py` lays out archives that are written.

An archive is a zip of stored members: `PREFIX/data.pkl` is the pickled object, `PREFIX/data/KEY` the bytes of each
storage, aligned to 64 bytes (torch/csrc and caffe2/serialize/inline_container.cc, torch 2.13). Members are not
compressed, so each tensor is a byte range of the file. A file is one archive, or, in a `.distcp`, many archives back to
back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from formats.disk.handle import Handle, opened, pread
from formats.disk.safetensors import DTYPES, Fragment, Member, file_size, read_into
from formats.disk.zstd_stream import Reader
from formats.errors import DamagedError, SourceError, UnsupportedError, short
from formats.torch_files import pickle_values
from formats.torch_files.saved_names import require_own_name
from formats.torch_files.unpickle import loads

MAX_PICKLE = 1 << 30
MAX_DIRECTORY = 1 << 28
MAX_SMALL = 1 << 24
"""Size in bytes above which a storage is not read as a whole for a small tensor in it."""
NEWEST = 63
"""The version of the zip format that APPNOTE 6.3 describes."""
AGAIN = "copy the file again, or take another checkpoint"
PICKLE = b"\x80"
"""The first byte of a pickle (protocol 2 and newer)."""
PACKED = {
    "zstd": b"\x28\xb5\x2f\xfd",
    "gzip": b"\x1f\x8b",
    "xz": b"\xfd7zXZ\x00",
    "bzip2": b"BZh",
    "lz4": b"\x04\x22\x4d\x18",
}
"""Program: the first bytes of what it compresses."""
LONGEST = max(map(len, PACKED.values()))
IDENTITY = "/.data/serialization_id"
"""Ending of the name of the member that has the hash of the saved object."""
MAX_OUTLINE = 1 << 14
LOCAL = 30
"""Size of the local header of a member before the name, in bytes."""
SMALL = 0xFFFFFFFF
"""Placeholder for a number that is at least as large and is in a zip64 field."""
_TAIL = 2048
"""Number of bytes at the end of an archive that are read at once: enough for the directory of one tensor."""
_HEAD = 1024
"""Number of bytes at the beginning of an archive that are read at once: enough for the pickle of one tensor."""

Read = Callable[[int, int], bytes]
"""Function that returns bytes of an archive, given offset and count; fewer at the end."""


@dataclass(frozen=True)
class TorchFile:
    """An opened archive: the inert object, and where each storage is (byte offset in the archive, size, CRC-32).

    `name` is the root folder in the archive: the file's name without suffix at the time when torch.save wrote the file,
    or `archive` when torch.save wrote to a stream (`PyTorchStreamWriter` in caffe2/serialize/inline_container.cc, torch
    2.13).
    """

    path: Path
    value: Any
    storages: Mapping[str, Member]
    start: int = 0
    name: str = ""

    def fragment(self, ref: pickle_values.TensorRef, name: str) -> Fragment:
        """The fragment of the file where a tensor is.

        Raises:
            SourceError: the tensor reaches past its storage, or the storage is missing.
        """
        if ref.storage.key not in self.storages:
            raise SourceError(f"{self.path}: {name} is in the storage {ref.storage.key!r}, which the archive lacks")
        start, size, crc = self.storages[ref.storage.key]
        item = DTYPES[ref.dtype]
        last = sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
        if prod(ref.shape) and (ref.offset + last + 1) * item > size:
            raise SourceError(
                f"{self.path}: {name} reaches to byte {(ref.offset + last + 1) * item} of a storage of {size} bytes"
            )
        member = Member(self.start + start, size, crc)
        offset = member.start + ref.offset * item
        return Fragment(self.path, offset, ref.dtype, ref.shape, ref.strides, member=member)


def read_torch(path: Path) -> TorchFile:
    """Open a `torch.save` file and unpickle its object inertly.

    Raises:
        SourceError: the archive is damaged or truncated, or was saved under the name of another rank.
        UnsupportedError: the archive is compressed, big-endian, or older than torch 1.6.
    """
    size = file_size(path)
    with opened(path) as handle:
        _require_zip(pread(handle, LONGEST, 0), path)
        file = read_archive(handle, path, 0, size)
    require_own_name(path, file.name)
    return file


def _require_zip(head: bytes, path: Path) -> None:
    """Refuse a file that begins as one of another kind.

    Raises:
        UnsupportedError: it does.
    """
    if head.startswith(PICKLE):
        raise UnsupportedError(
            f"{path} is a pickle without a zip archive, as torch saved before its version 1.6, or with "
            "_use_new_zipfile_serialization=False",
            "if you trust it, load it with torch and save it again",
        )
    if packed := next((how for how, sign in PACKED.items() if head.startswith(sign)), None):
        raise UnsupportedError(f"{path} is compressed as a whole, with {packed}", f"decompress it with {packed} first")


def read_archive(fd: Handle, path: Path, start: int, size: int, name: str = "") -> TorchFile:
    """Open one archive of a file, given its extent in bytes. Raises what `read_torch` raises.

    Args:
        fd: the open file.
        path: path of the file.
        start: byte in the file where the archive begins.
        size: size of the archive in bytes.
        name: name of the archive for errors, besides the path.
    """
    head, tail = pread(fd, min(_HEAD, size), start), pread(fd, min(_TAIL, size), start + size - min(_TAIL, size))
    where = f"{path}: {name}" if name else str(path)

    def read(offset: int, count: int) -> bytes:
        if offset + count <= len(head):
            return head[offset : offset + count]
        if offset >= size - len(tail):
            return tail[offset - size + len(tail) :][:count]
        return pread(fd, min(count, size - offset), start + offset)

    value, storages, folder = parse_archive(read, size, where)
    return TorchFile(path, value, storages, start, folder)


def parse_archive(read: Read, size: int, where: str) -> tuple[Any, dict[str, Member], str]:
    """The object of an archive, the extent of each storage, and the root folder's name. What is read is checked."""
    try:
        members, directory = _directory(read, size)
        extents = dict(_extents(read, members, directory))
    except struct.error:
        raise SourceError(f"{where} is not a complete torch.save archive: its directory is damaged", AGAIN) from None
    except (SourceError, UnsupportedError) as error:
        hint = AGAIN if isinstance(error, SourceError) else ""
        raise type(error)(f"{where} is not a sound torch.save archive: {error}", hint) from None
    pickled = [name for name in extents if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickled) != 1:
        raise SourceError(f"{where}: a torch.save archive has one data.pkl, this one has {len(pickled)}")
    prefix = pickled[0].removesuffix("data.pkl")
    if prefix + "byteorder" in extents and _checked(read, extents, prefix + "byteorder", where) != b"little":
        raise UnsupportedError(f"{where}: written on a big-endian machine")
    if extents[pickled[0]].size > MAX_PICKLE:
        raise SourceError(f"{where}: its pickle claims {extents[pickled[0]].size} bytes")
    raw = _checked(read, extents, pickled[0], where)
    value = _tensor_of(raw) if len(raw) < _HEAD else None
    value = loads(raw, where) if value is None else value
    folder = prefix + "data/"
    storages = {name.removeprefix(folder): extent for name, extent in extents.items() if name.startswith(folder)}
    return value, storages, prefix.removesuffix("/")


def _checked(read: Read, extents: Mapping[str, Member], name: str, where: str) -> bytes:
    """The content of a small entry of an archive.

    Raises:
        SourceError: the entry does not have the CRC-32 that the archive records.
    """
    start, size, crc = extents[name]
    raw = read(start, size)
    require_crc(crc32(raw), crc, f"{where}: {name}")
    return raw


def require_crc(computed: int, recorded: int, what: str) -> None:
    """Compare a CRC-32 with the recorded one, which is 0 if none was recorded.

    Raises:
        DamagedError: the checksums differ.
    """
    if recorded and computed != recorded:
        raise DamagedError(
            f"{what} is damaged: its bytes have the CRC-32 {computed:08x}, the file says {recorded:08x}", AGAIN
        )


def read_small(fragment: Fragment) -> bytes:
    """The bytes of a small tensor; its whole storage is read and checked.

    Raises:
        DamagedError: the storage does not have the CRC-32 that its archive records.
        SourceError: the file is truncated.
    """
    extent = fragment.member
    if extent is None or extent.size > MAX_SMALL:
        extent = Member(fragment.offset, fragment.nbytes, 0)
    raw = bytearray(extent.size)
    with opened(fragment.path) as handle:
        if fragment.stream is None:
            read_into(handle, memoryview(raw), extent.start, fragment.path)
        else:
            Reader(handle, fragment.path, fragment.stream).read_into(memoryview(raw), extent.start)
    require_crc(crc32(raw), extent.crc, f"{fragment.path}: the {extent.size} bytes at byte {extent.start}")
    return bytes(raw[fragment.offset - extent.start :][: fragment.nbytes])


@lru_cache(maxsize=1024)
def _tensor_of(raw: bytes) -> pickle_values.TensorRef | None:
    """The tensor in a small pickle, None for any other content. Cached: pieces of a tensor have equal pickles."""
    try:
        value = loads(raw, "")
    except SourceError:
        return None
    return value if isinstance(value, pickle_values.TensorRef) else None


class _Entry(NamedTuple):
    """An entry of a zip directory."""

    name: str
    raw: bytes
    start: int
    size: int
    crc: int
    entry: int


def _directory(read: Read, size: int) -> tuple[list[_Entry], int]:
    """The members of a zip by position in the file, and the offset of its directory (APPNOTE 6.3, 4.3.12-16)."""
    end = read(size - 22, 22) if size >= 22 else b""
    if end[:4] != b"PK\x05\x06":
        raise SourceError(f"{size} bytes without a directory at their end: cut off, or another kind of file")
    count, length, start = struct.unpack_from("<HII", end, 10)
    if SMALL in (length, start) or count == 0xFFFF:
        locator = read(size - 42, 20)
        if locator[:4] != b"PK\x06\x07":
            raise SourceError("the directory of a large archive is missing")
        record = read(struct.unpack_from("<Q", locator, 8)[0], 56)
        count, length, start = struct.unpack_from("<QQQ", record, 32)
    if length > MAX_DIRECTORY or start + length > size or count * 46 > length:
        raise SourceError(f"a directory of {count} members in {length} bytes at byte {start} of {size}")
    raw, at, members = read(start, length), 0, []
    for _ in range(count):
        if raw[at : at + 4] != b"PK\x01\x02":
            raise SourceError("an entry of the directory is damaged")
        version, flags, method = struct.unpack_from("<HHH", raw, at + 6)
        crc, packed, unpacked, names, extras, comments = struct.unpack_from("<IIIHHH", raw, at + 16)
        (offset,) = struct.unpack_from("<I", raw, at + 42)
        encoded = raw[at + 46 : at + 46 + names]
        name = encoded.decode("utf-8", "backslashreplace")
        if SMALL in (packed, unpacked, offset):
            unpacked, packed, offset = _large(raw[at + 46 + names :][:extras], unpacked, packed, offset)
        if method or flags & 1 or version > NEWEST:
            raise UnsupportedError(f"the member {short(name)} is compressed or encrypted")
        if packed != unpacked:
            raise SourceError(f"the member {short(name)} has two sizes")
        members.append(_Entry(name, encoded, offset, unpacked, crc, start + at))
        at += 46 + names + extras + comments
    return sorted(members, key=lambda member: member.start), start


def _large(extra: bytes, *small: int) -> list[int]:
    """Sizes and offset of a member, from its zip64 field where a number is past 4 GiB."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            body = iter(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            return [next(body, value) if value == SMALL else value for value in small]
        at += 4 + length
    return list(small)


def _extents(read: Read, members: list[_Entry], directory: int) -> Iterator[tuple[str, Member]]:
    """Name and extent of each member, checked: no member may occur twice or overlap another."""
    position, seen = 0, set()
    for member in members:
        if not position <= member.start < directory:
            raise SourceError(f"the member {short(member.name)} lies outside the archive or in another one")
        local = read(member.start, LOCAL + len(member.raw))
        if len(local) < LOCAL or local[:4] != b"PK\x03\x04" or local[LOCAL:] != member.raw:
            raise SourceError(f"the member {short(member.name)} has no header of its own")
        names, extra = struct.unpack_from("<HH", local, 26)
        start = member.start + LOCAL + names + extra
        position = start + member.size
        if member.name in seen or position > directory:
            raise SourceError(f"the member {short(member.name)} is doubled or cut off")
        seen.add(member.name)
        yield member.name, Member(start, member.size, member.crc)


# --- checking --------------------------------------------------------------------------------------------------------


class StoredMember(NamedTuple):
    """A member of an archive: its byte offset in the file, its size, and its CRC-32, 0 when that was not recorded.

    `noted` are the offsets where the checksum may be: in the local header, in the directory, and after the data.
    """

    name: str
    start: int
    size: int
    crc: int
    noted: tuple[int, ...]


def members_of(fd: Handle, path: Path) -> Iterator[StoredMember]:
    """Every member of the archives in a file, which are back to back; the members of the last archive come first.

    Raises:
        SourceError: the file has something other than archives, or is truncated.
    """
    for start, _, end in _archives(fd, path):

        def read(offset: int, count: int, start: int = start, end: int = end) -> bytes:
            return pread(fd, min(count, end - start - offset), start + offset) if offset >= 0 else b""

        try:
            yield from list(_noted(read, end - start, start))
        except (SourceError, UnsupportedError, struct.error) as error:
            raise SourceError(f"{path}: the archive at byte {start} is damaged: {error}") from None


def _noted(read: Read, size: int, start: int = 0) -> Iterator[StoredMember]:
    """Every member of an archive that begins at byte `start` of a file."""
    members, directory = _directory(read, size)
    for member, (name, (offset, length, crc)) in zip(members, _extents(read, members, directory), strict=True):
        noted = (start + member.start + 14, start + member.entry + 16, start + offset + length + 4)
        yield StoredMember(name, start + offset, length, crc, noted)


class Outline(NamedTuple):
    """The bytes around those of the only tensor of an archive.

    Attributes:
        parts: the bytes before and after those of the tensor, uint8.
        same: masks of these parts: 255 where similar archives have the same byte, 0 in checksums and hashes that
            differ.
        crc: position in the second part of the CRC-32 of the tensor.
    """

    parts: tuple[Any, Any]
    same: tuple[Any, Any]
    crc: int


def outline(read: Read, size: int, data: int) -> Outline | None:
    """The bytes around a tensor that begins at byte `data` of an archive; None if they are more than a few kB."""
    import numpy as np

    members = list(_noted(read, size))
    tensors = [member for member in members if "/data/" in member.name]
    end = sum(tensors[0][1:3]) if tensors else 0
    if len(tensors) != 1 or tensors[0].start != data or data > MAX_OUTLINE or size - end > MAX_OUTLINE:
        return None
    tensor = tensors[0]
    same = np.full(size - tensor.size, 255, np.uint8)
    around = np.frombuffer(read(0, data) + read(end, size - end), np.uint8)

    def differs(at: int, count: int) -> None:
        at -= tensor.size if at >= end else 0
        same[at : at + count] = 0

    for member in (tensor, *(other for other in members if other.name.endswith(IDENTITY))):
        header, entry, after = member.noted
        differs(header, 4)
        differs(entry, 4)
        if read(after - 4, 4) == b"PK\x07\x08":
            differs(after, 4)
        if member is not tensor:
            differs(member.start, member.size)
    return Outline((around[:data], around[data:]), (same[:data], same[data:]), tensor.noted[1] - end)


def directories(fd: Handle, path: Path) -> Iterator[bytes]:
    """The bytes of the directory of each archive in a file, up to the archive's end; those of the last archive first.

    Raises:
        SourceError: the file has something other than archives, or is truncated.
    """
    for _, directory, end in _archives(fd, path):
        yield pread(fd, min(end - directory, MAX_DIRECTORY), directory)


def _archives(fd: Handle, path: Path) -> Iterator[tuple[int, int, int]]:
    """Start, start of the directory, and end of each archive in a file; the last archive first."""
    end = file_size(path)
    while end:
        start, directory = _archive_start(pread(fd, min(end, 98), max(0, end - 98)), end)
        if not 0 <= start <= directory < end:
            raise SourceError(f"{path}: no torch.save archive ends at byte {end}: cut off, or another kind of file")
        yield start, directory, end
        end = start


def _archive_start(tail: bytes, end: int) -> tuple[int, int]:
    """Start of an archive and of its directory, if one ends with the bytes `tail` at byte `end`; -1 otherwise."""
    if tail[-22:-18] != b"PK\x05\x06":
        return -1, -1
    length, offset = struct.unpack_from("<II", tail, len(tail) - 10)
    if tail[-42:-38] == b"PK\x06\x07" and len(tail) == 98:
        (large,) = struct.unpack_from("<Q", tail, len(tail) - 58)
        return end - 98 - int(struct.unpack_from("<Q", tail, len(tail) - 34)[0]), end - 98 - int(large)
    return end - 22 - int(length) - int(offset), end - 22 - int(length)
