"""Token files of Megatron and GPT-NeoX: `PREFIX.bin` has only tokens, `PREFIX.idx` the position of each sequence.

An index is little-endian and has no gaps: 9 bytes of magic, uint64 version, uint8 code of the token type, uint64 n,
uint64 m, int32 sizes[n] in tokens, int64 pointers[n] in bytes, int64 documents[m].

Facts: GPT-NeoX megatron/data/indexed_dataset.py at ea7aefd8 (`MMapIndexedDataset.Index`), Megatron-LM
megatron/core/datasets/indexed_dataset.py of core 0.16.1 (`_IndexWriter`, `_IndexReader`, `DType`). The two disagree on
the codes of float types only, which texts never have. Megatron may append n bytes of modes for multimodal data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from converters.common.atomic import synced
from formats.errors import SourceError, UnsupportedError, UsageError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = 34
AGAIN = "copy it again, or tokenize again"
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SMALL_VOCABULARY = 65_500
"""Vocabulary size from which a token takes four bytes (`__best_fitting_dtype` of NeoX, `DType.optimal_dtype` of
Megatron)."""
CHUNK = 1 << 20
"""Count of numbers that are read or written at a time."""

Sizes = NDArray[np.int32]


class Column(Protocol):
    """A sequence of numbers that is read a piece at a time: an array, or something larger than memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> NDArray[Any]: ...


def best_dtype(vocabulary: int) -> np.dtype[Any]:
    """The token dtype that NeoX and Megatron choose for a vocabulary of this size."""
    return np.dtype("<u2" if vocabulary < SMALL_VOCABULARY else "<i4")


@dataclass(frozen=True)
class Indexed:
    """A pair of token files. All arrays are memory maps.

    Attributes:
        prefix: path without `.bin` and `.idx`.
        dtype: type of a token.
        sizes: number of tokens of each sequence, int32[n].
        pointers: byte in the `.bin` where each sequence begins, int64[n].
        documents: first sequence of each document, and n at the end, int64[m], as the file has it.
    """

    prefix: Path
    dtype: np.dtype[Any]
    sizes: Sizes = field(repr=False)
    pointers: NDArray[np.int64] = field(repr=False)
    documents: NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, in the order of the file."""
        path = bin_path(self.prefix)
        if not path.stat().st_size:
            return np.empty(0, self.dtype)
        return np.memmap(path, self.dtype, "r")

    @cached_property
    def total(self) -> int:
        """Number of tokens."""
        return sum(int(part.sum(dtype=np.int64)) for _, part in chunks(self.sizes))

    @property
    def whole(self) -> bool:
        """Whether the index records each sequence as a document."""
        return len(self.documents) == len(self) + 1

    def __getitem__(self, number: int) -> NDArray[Any]:
        """The tokens of one sequence."""
        begin = int(self.pointers[number]) // self.dtype.itemsize
        return self.tokens[begin : begin + int(self.sizes[number])]


def bin_path(prefix: Path) -> Path:
    """The path of the tokens of a prefix."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The path of the index of a prefix."""
    return prefix.with_name(prefix.name + ".idx")


def prefix_of(path: Path) -> Path:
    """The prefix of a path, which may name one of the two files.

    Raises:
        UsageError: the path has no file name.
    """
    path = named_prefix(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def named_prefix(path: Path) -> Path:
    """A prefix, checked to have a name that `.bin` can be appended to.

    Raises:
        UsageError: the prefix has no file name.
    """
    if path.name in ("", ".."):
        raise UsageError(f"{path} is a folder, not a prefix", "name the files in it, without .bin and .idx")
    return path


def open_indexed(path: Path, tokens: bool = True) -> Indexed:
    """Open a pair of token files.

    Args:
        path: the prefix, with or without `.bin` or `.idx`.
        tokens: whether the `.bin` must be there.

    Raises:
        SourceError: a file is missing, truncated, damaged, or does not fit the other one.
        UnsupportedError: the index is of another format.
    """
    prefix = prefix_of(path)
    index = idx_path(prefix)
    if not index.is_file():
        hint = "leave out _text_document only if the files do" if not bin_path(prefix).is_file() else ""
        raise SourceError(
            f"{index.absolute()} is not there", hint or f"only {bin_path(prefix).name} is: its index got lost"
        )
    dtype, n, m = _header(index)
    raw = np.memmap(index, np.uint8, "r")
    cuts = np.cumsum([HEADER, 4 * n, 8 * n, 8 * m])
    sizes, pointers, documents = (
        raw[low:high].view(kind) for low, high, kind in zip(cuts, cuts[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    indexed = Indexed(prefix, dtype, sizes, pointers, documents)
    least = min((int(part.min()) for _, part in chunks(sizes)), default=0)
    if least < 0:
        raise SourceError(f"{index} has a sequence of {least} tokens")
    if tokens or bin_path(prefix).is_file():
        _check_length(indexed)
    _check_pointers(indexed)
    return indexed


def _header(path: Path) -> tuple[np.dtype[Any], int, int]:
    with path.open("rb") as file:
        head = file.read(HEADER)
    if head.startswith(OLD_MAGIC):
        raise UnsupportedError(
            f"{path} is an index of the old kind (lazy or cached)", "tokenize again with --dataset-impl mmap"
        )
    if len(head) < HEADER and (MAGIC.startswith(head) or head.startswith(MAGIC)):
        raise SourceError(f"{path} is cut short: it has {len(head)} bytes, its header has {HEADER}", AGAIN)
    if not head.startswith(MAGIC):
        raise SourceError(f"{path} is no index of token files: it begins with {head[:9]!r}")
    version, code, n, m = struct.unpack("<QBQQ", head[len(MAGIC) :])
    if version != 1:
        raise UnsupportedError(f"{path} is an index of version {version}, only 1 is known")
    if code not in CODES:
        raise UnsupportedError(f"{path} has tokens of the type {code}, which is no type of integers")
    length, expected = path.stat().st_size, HEADER + 12 * n + 8 * m
    if length not in (expected, expected + n):
        what = "is cut short" if length < expected else "has bytes that are not accounted for"
        raise SourceError(
            f"{path} {what}: it has {length} bytes; {n} sequences and {m} document marks take {expected}", AGAIN
        )
    return np.dtype(CODES[code]), n, m


def _check_length(indexed: Indexed) -> None:
    path = bin_path(indexed.prefix)
    if not path.is_file():
        raise SourceError(f"{path} is not there, but its index is")
    nbytes, expected = path.stat().st_size, indexed.total * indexed.dtype.itemsize
    if nbytes != expected:
        raise SourceError(
            f"{path} has {nbytes} bytes, its index has {indexed.total} tokens of {indexed.dtype.itemsize}: {expected}"
        )


def _check_pointers(indexed: Indexed) -> None:
    position = 0
    for low, sizes in chunks(indexed.sizes):
        ends = position + np.cumsum(sizes, dtype=np.int64) * indexed.dtype.itemsize
        pointers = indexed.pointers[low : low + len(sizes)]
        if pointers[0] != position or not np.array_equal(pointers[1:], ends[:-1]):
            raise SourceError(f"{idx_path(indexed.prefix)} points to other places than its sizes tell")
        position = int(ends[-1])


def chunks(array: Column) -> Iterator[tuple[int, NDArray[Any]]]:
    """An array in small pieces, each with its first index.

    Pages of a memory map that were read stay in the page cache, but no longer count as memory of this process.
    """
    mapped = getattr(array, "_mmap", None)
    for low in range(0, len(array), CHUNK):
        yield low, array[low : low + CHUNK]
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def write_index(path: Path, dtype: np.dtype[Any], sizes: Column, documents: Column | None = None) -> None:
    """Write an index and fsync the file. Memory does not depend on the number of sequences.

    Args:
        path: the file to create.
        dtype: type of a token, one of `CODES`.
        sizes: number of tokens of each sequence, int32[n].
        documents: first sequence of each document and n, int64[m]; None where each sequence is a document.

    Raises:
        UsageError: the type has no code.
    """
    code = next((code for code, kind in CODES.items() if np.dtype(kind) == dtype), None)
    if code is None:
        raise UsageError(f"tokens of the type {dtype} have no code in an index")
    n = len(sizes)
    m = n + 1 if documents is None else len(documents)
    with synced(path) as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, code, n, m))
        for _, part in chunks(sizes):
            file.write(np.ascontiguousarray(part, "<i4").data)
        position = 0
        for _, part in chunks(sizes):
            ends = position + np.cumsum(part, dtype="<i8") * dtype.itemsize
            file.write(np.concatenate([[position], ends[:-1]]).astype("<i8").data)
            position = int(ends[-1])
        if documents is None:
            for low in range(0, m, CHUNK):
                file.write(np.arange(low, min(m, low + CHUNK), dtype="<i8").data)
        else:
            for _, part in chunks(documents):
                file.write(np.ascontiguousarray(part, "<i8").data)
