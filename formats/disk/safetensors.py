"""Fragments (where tensors are on disk), the safetensors format, and reading and writing of bytes.

Facts about safetensors: its format description and `tensor.rs` (safetensors 0.8.0): u64 little-endian header length,
JSON header of at most 100 MB that starts with '{', data offsets relative to the header's end, contiguous, without
overlap, holes or trailing bytes.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.chunks import Chunk
from formats.disk.handle import Handle, dangling, opened, read_at
from formats.disk.stamps import note
from formats.disk.zstd_stream import Stream
from formats.errors import SourceError, short

DTYPES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Element type: its size in bytes. The order is that in which the official serializer writes the types of a file."""

FLOATS = ("F64", "F32", "BF16", "F16")
"""The element types that a cast may convert into each other."""

MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 64


class Member(NamedTuple):
    """An entry of a zip archive: byte offset and size of its data, and its CRC-32, 0 when that was not recorded."""

    start: int
    size: int
    crc: int


class Fragment(NamedTuple):
    """A physical tensor on disk: `offset` in bytes (of the file, or of a stream in it), shape and strides in elements.

    With `scales` the elements on disk are quantized, and `dtype` is the type that they are read as. `member` is the
    entry of a zip archive that has the bytes. With a `product` the elements are not on disk, but computed from other
    tensors. With `pieces` the elements are intervals of other tensors, each with the element where it begins. With
    `coded` the elements are those of another tensor converted to FP8, or the scales of that conversion. With a `chunk`
    the elements are in a decoded chunk of an array, and the path is that of a file of its store.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stream: Stream | None = None
    scales: Scales | None = None
    member: Member | None = None
    product: Product | None = None
    pieces: tuple[tuple[int, Fragment], ...] = ()
    coded: Coded | None = None
    chunk: Chunk | None = None

    @property
    def origin(self) -> tuple[Path, Stream | None, Chunk | None, int]:
        """Where its first byte is: what lies elsewhere has another one."""
        return self.path, self.stream, self.chunk, self.offset

    @property
    def nbytes(self) -> int:
        """Size of the elements, in bytes."""
        return prod(self.shape) * DTYPES[self.dtype]

    @property
    def row_major(self) -> bool:
        """Whether the elements are row-major without gaps."""
        return self.strides == row_major(self.shape)

    @property
    def inputs(self) -> tuple[Fragment, ...]:
        """The fragments that are read with this one, or instead of it."""
        factors = (self.scales.factors, self.scales.whole, self.scales.values) if self.scales else ()
        fragments = [each for each in factors if each]
        fragments += [self.scales.stated[0]] if self.scales and self.scales.stated else []
        fragments += [self.product.left, self.product.right] if self.product else []
        fragments += [piece for _, piece in self.pieces]
        fragments += [self.coded.matrix] if self.coded else []
        return tuple(each for fragment in fragments for each in (fragment, *fragment.inputs))


class Scales(NamedTuple):
    """The factors of quantized elements: one for each block of a matrix, or of each of several consecutive matrices.

    Attributes:
        method: the encoding of elements, such as MXFP4 or FP8 (`METHODS` of converters/move/dequantize.py).
        factors: a matrix of factors for each matrix, row-major.
        block: rows and columns of a block; the last blocks of a matrix may be smaller.
        rows: number of rows of a matrix.
        columns: number of columns of a matrix.
        name: the key of the factors, for messages.
        whole: a number that all factors are divided by; None for none.
        stated: integers in a file that record rows and columns, the values that they have to have, and the key of the
            elements; None if no file has them.
        values: the value of each code, where a file has these values.
    """

    method: str
    factors: Fragment
    block: tuple[int, int]
    rows: int
    columns: int
    name: str
    whole: Fragment | None = None
    stated: tuple[Fragment, tuple[int, ...], str] | None = None
    values: Fragment | None = None


class Coded(NamedTuple):
    """The matrix that a tensor is an FP8 conversion of, or the scales of such a conversion.

    Attributes:
        matrix: [rows, columns] in floats, row-major; both are multiples of the rows and columns of a block.
        block: rows and columns of a block, which shares a scale.
        scales: whether the tensor has the scales, not the elements.
    """

    matrix: Fragment
    block: tuple[int, int]
    scales: bool


class Product(NamedTuple):
    """The product that a tensor is: scale * left @ right, or its transpose; for several matrices, one after the other.

    Attributes:
        left: [out, rank]; for several matrices [out, rank * matrices], those of a rank next to each other.
        right: [rank, in]; for several matrices [matrices * rank, in].
        scale: factor of the product.
        transposed: whether the tensor is [in, out].
        name: name of the tensor, for errors.
        matrices: number of matrices.
    """

    left: Fragment
    right: Fragment
    scale: float
    transposed: bool
    name: str
    matrices: int = 1


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Entry(NamedTuple):
    """A tensor that is to be written: its name, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def file_size(path: Path) -> int:
    """Size of a file in bytes, before its header is read: its stamp is noted (`stamps.noted`).

    Raises:
        SourceError: the file does not exist, or is not a regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise SourceError(dangling(path) or f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path} is not a regular file")
    note(path, status)
    return status.st_size


# --- safetensors -----------------------------------------------------------------------------------------------------


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object; json.loads alone silently takes the last of two members with one name.

    Raises:
        ValueError: two members have one name.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{short(next(name for name in names if names.count(name) > 1))} appears twice")
    return members


def read_safetensors(path: Path) -> tuple[dict[str, Fragment], dict[str, str]]:
    """Read a safetensors header and check every rule of the format.

    Returns:
        The tensors by name, and the file's `__metadata__`.

    Raises:
        SourceError: the file breaks a rule; the message names the rule.
    """
    size = file_size(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise SourceError(
                f"{path}: no safetensors file, or cut off: {size} bytes, header of {length} bytes",
                "it is a pointer of Git LFS: git lfs pull" if prefix == b"version " else "",
            )
        raw = file.read(length)
    try:
        if raw[:1] != b"{":
            raise ValueError("it does not start with '{'")
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ is not a map of strings")
        tensors = {name: _fragment(path, 8 + length, name, entry) for name, entry in header.items()}
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: the safetensors header is invalid: {error}") from None
    position = 8 + length
    for name, fragment in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if fragment.offset != position:
            problem = "overlaps the tensor before it" if fragment.offset < position else "leaves a hole before it"
            raise SourceError(f"{path}: {name} {problem}: it starts at byte {fragment.offset}, expected {position}")
        position += fragment.nbytes
    if position != size:
        problem = "is cut off" if position > size else "has bytes after its last tensor"
        raise SourceError(f"{path}: the file {problem}: {size} bytes, the header describes {position}")
    return tensors, metadata


def _fragment(path: Path, data: int, name: str, entry: Any) -> Fragment:
    match entry:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(start), int(stop)], **rest} if not rest:
            pass
        case _:
            raise ValueError(f"the entry of {short(name)} is malformed")
    if dtype not in DTYPES:
        raise ValueError(f"{short(name)} has the unknown dtype {short(dtype)}")
    if len(dims) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in (*dims, start, stop)):
        raise ValueError(f"{short(name)} has a size or offset that is no natural number, or too many dimensions")
    shape = tuple(dims)
    if stop - start != prod(shape) * DTYPES[dtype]:
        raise ValueError(f"{short(name)} is {dtype}{dims}, but has {stop - start} bytes")
    return Fragment(path, data + start, dtype, shape, row_major(shape))


def safetensors_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, with the same bytes as the official serializer writes.

    Returns:
        The header with its length prefix, and the byte offset of each tensor in the file.
    """
    ranks = list(DTYPES)
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for entry in sorted(entries, key=lambda entry: (ranks.index(entry.dtype), entry.name)):
        end = position + prod(entry.shape) * DTYPES[entry.dtype]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    offsets = {
        name: 8 + len(raw) + value["data_offsets"][0] for name, value in header.items() if name != "__metadata__"
    }
    return struct.pack("<Q", len(raw)) + raw, offsets


# --- bytes -----------------------------------------------------------------------------------------------------------


def read_into(handle: Handle, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer from a file.

    Raises:
        SourceError: the file ends before the buffer is full.
    """
    done = 0
    while done < len(buffer):
        try:
            count = read_at(handle, buffer[done:], offset + done)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror} at byte {offset + done}") from None
        if count == 0:
            raise SourceError(f"{path}: the file ends at byte {offset + done}, {len(buffer) - done} bytes are missing")
        done += count


def read_bytes(path: Path, offset: int, count: int) -> bytes:
    """A few bytes of a file. Raises what `read_into` raises."""
    raw = bytearray(count)
    with opened(path) as handle:
        read_into(handle, memoryview(raw), offset, path)
    return bytes(raw)


WRITE = 1 << 17
"""Number of bytes of one write. Larger writes make ext4 take fresh pages for large folios: twice the time on a virtual
machine."""


def write_from(fd: Handle, buffer: memoryview, offset: int) -> None:
    """Write a whole buffer to a file of the disk."""
    assert isinstance(fd, int)
    done = 0
    while done < len(buffer):
        done += os.pwrite(fd, buffer[done : done + WRITE], offset + done)
