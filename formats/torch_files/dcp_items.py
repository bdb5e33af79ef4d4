"""The items of `.distcp` files: locates the bytes of each piece, and checks the piece against the metadata.

An item is one complete torch.save archive. Items of pieces of one shape and length are equal except for checksums and
`.data/serialization_id` (torch/serialization.py and caffe2/serialize/inline_container.cc, 2.13): the first item is read
as any archive is, the others are compared with the first, byte for byte, in numpy. Items that differ are read as any
archive is.

The end of an item and the beginning of the next are adjacent and are read by one call. A file is open only while it is
read, so that any number of ranks needs no more descriptors than there are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from formats.disk.handle import Handle, opened, pread, preadv
from formats.disk.safetensors import Fragment, file_size
from formats.disk.threads import Threads
from formats.disk.zstd_stream import Stream
from formats.errors import SourceError, UnsupportedError, ranges, short
from formats.layout.columns import Columns, Cut, Ints, Piece
from formats.torch_files.archive import Outline, TorchFile, outline, parse_archive, read_archive
from formats.torch_files.dcp_metadata import DATA, Item, Items
from formats.torch_files.pickle_values import DTYPES, Dtype, Opaque, TensorRef

READERS = 8
"""Number of threads that read the heads of items, which may be on slow storage."""

Tensor = tuple[str, Any, Items]
"""A tensor: its name, torch's element type, and its items."""


class _Kind(NamedTuple):
    """The form of items that may be equal except for checksums.

    Attributes:
        offset: byte where the tensor begins, counted from the item's start.
        member: start of the archive entry, counted from the item's start, and its size.
        outline: the bytes around the tensor.
    """

    offset: int
    member: tuple[int, int]
    outline: Outline


class _ItemTable(NamedTuple):
    """All items that are to be located, as columns, tensor after tensor; `bounds` has the first of each, and the end.

    Results go into `crc`, the checksum of each item, and into `differing`, the pieces that differ from the first of
    their kind.
    """

    tensors: Sequence[Tensor]
    bounds: Ints
    paths: Sequence[Path]
    file: Ints
    start: Ints
    length: Ints
    kind: Ints
    kinds: dict[int, _Kind | None]
    crc: Ints
    differing: dict[int, Piece]
    lock: Lock

    def kind_of(self, kind: int, row: int, fd: Handle) -> _Kind | None:
        """The form of the items of a kind, taken from the same item for the threads of all files."""
        with self.lock:
            if kind not in self.kinds:
                self.kinds[kind] = _kind(self, row, fd)
            return self.kinds[kind]

    def piece(self, row: int, fd: Handle) -> Piece:
        """The piece of a row, read as any archive is."""
        number = int(np.searchsorted(self.bounds, row, side="right")) - 1
        name, dtype, items = self.tensors[number]
        return _piece(name, dtype_of(name, dtype), items.item(row - int(self.bounds[number])), fd)


def locate_pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Sequence[Piece]]]:
    """The element type of each tensor, and its pieces.

    Raises:
        SourceError: a file is missing or truncated, or an item differs from the metadata.
        UnsupportedError: an item is encoded in a way that is not known.
    """
    dtypes = [dtype_of(name, dtype) for name, dtype, _ in tensors]
    table = _columns(tensors)
    ends = np.zeros(len(table.paths), np.int64)
    np.maximum.at(ends, table.file, table.start + table.length)
    named = np.repeat(np.arange(len(tensors)), np.diff(table.bounds))
    require_files(
        {path: end for path, end in zip(table.paths, ends.tolist(), strict=True) if end},
        lambda path: [tensors[i][0] for i in named[table.file == table.paths.index(path)].tolist()],
    )
    order = np.lexsort((table.start, table.file))
    files, firsts = np.unique(table.file[order], return_index=True)
    with Threads(READERS) as pool:
        for _ in pool.map(lambda rows: _read(table, rows), np.split(order, firsts[1:]) if len(files) else ()):
            pass
    odd = np.array(sorted(table.differing), np.int64)
    for number, (dtype, (_, _, items)) in enumerate(zip(dtypes, tensors, strict=True)):
        rows = slice(*table.bounds[number : number + 2].tolist())
        single = rows.start < rows.stop and not len(odd[(odd >= rows.start) & (odd < rows.stop)])
        yield (
            dtype,
            _uniform_pieces(table, rows, dtype, items) if single else _separate_pieces(table, rows, dtype, items),
        )


def _columns(tensors: Sequence[Tensor]) -> _ItemTable:
    every = [items for _, _, items in tensors]
    numbers: dict[Path, int] = {}
    files = list[Ints]()
    tables: dict[int, Ints] = {}
    kinds: dict[tuple[object, ...], int] = {}
    kind = list[Ints]()
    for (_, dtype, _), items in zip(tensors, every, strict=True):
        if id(items.paths) not in tables:
            numbered = [numbers.setdefault(path, len(numbers)) for path in items.paths]
            tables[id(items.paths)] = np.array(numbered, np.int32)
        files.append(tables[id(items.paths)][items.file])
        ranges = items.boxes.ranges
        about, which = np.unique(
            np.column_stack((items.length, ranges[:, :, 1] - ranges[:, :, 0])), axis=0, return_inverse=True
        )
        codes = [kinds.setdefault((dtype, *length_and_shape), len(kinds)) for length_and_shape in about.tolist()]
        kind.append(np.array(codes, np.int32)[which.reshape(-1)] if codes else np.empty(0, np.int32))
    bounds = np.cumsum([0, *map(len, every)])
    start, length = (_joined([getattr(items, what) for items in every], np.int64) for what in ("start", "length"))
    file, of = _joined(files, np.int32), _joined(kind, np.int32)
    for number, items in enumerate(every):
        for row in items.transforms:
            of[bounds[number] + row] = -1
    crc = np.zeros(len(start), np.uint32)
    return _ItemTable(tensors, bounds, [*numbers], file, start, length, of, {-1: None}, crc, {}, Lock())


def _joined(parts: Sequence[Ints], dtype: type) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _read(table: _ItemTable, rows: Ints) -> None:
    """Read the heads of the items of one file, in the order of their position in the file."""
    path = table.paths[table.file[rows[0]]]
    with opened(path) as fd:
        alike = dict[int, list[int]]()
        for row, kind in zip(rows.tolist(), table.kind[rows].tolist(), strict=True):
            if table.kind_of(kind, row, fd) is None:
                table.differing[row] = table.piece(row, fd)
            else:
                alike.setdefault(kind, []).append(row)
        buffers = {kind: _Buffers(len(alike_rows), table.kinds[kind]) for kind, alike_rows in alike.items()}
        _fill(table, rows, fd, buffers)
        for kind, alike_rows in alike.items():
            sound, crc = buffers[kind].compare()
            table.crc[alike_rows] = crc
            for row in np.array(alike_rows)[~sound].tolist():
                table.differing[row] = table.piece(row, fd)


def _fill(table: _ItemTable, rows: Ints, fd: Handle, buffers: Mapping[int, _Buffers]) -> None:
    """Read the bytes around the items: the end of one item together with the beginning of the next."""
    columns = (table.start[rows], table.length[rows], table.kind[rows])
    waiting, at, end = list[memoryview](), 0, 0
    for start, length, kind in zip(*(column.tolist() for column in columns), strict=True):
        buffer = buffers.get(kind)
        if buffer is None:
            continue
        if waiting and start != end:
            preadv(fd, waiting, at)
            waiting, at = [], start
        head, tail = buffer.next()
        preadv(fd, [*waiting, head], at if waiting else start)
        end = start + length
        waiting, at = [tail], end - len(tail)
    if waiting:
        preadv(fd, waiting, at)


class _Buffers:
    """The bytes around some items of one kind."""

    def __init__(self, count: int, kind: _Kind | None) -> None:
        assert kind is not None
        self.outline, self.count = kind.outline, 0
        self.raw = [np.zeros((count, len(part)), np.uint8) for part in self.outline.parts]
        self.views = [memoryview(raw.reshape(-1).data) for raw in self.raw]

    def next(self) -> list[memoryview]:
        """The buffers for the bytes before and after the tensor of the next item."""
        self.count += 1
        return [
            view[(self.count - 1) * len(part) : self.count * len(part)]
            for view, part in zip(self.views, self.outline.parts, strict=True)
        ]

    def compare(self) -> tuple[Any, Ints]:
        """Whether each item is like the first, and the CRC-32 of each item's tensor."""
        sound = np.ones(self.count, bool)
        for raw, part, same in zip(self.raw, self.outline.parts, self.outline.same, strict=True):
            sound &= ~((raw ^ part) & same).any(axis=1)
        crc = self.raw[1][:, self.outline.crc : self.outline.crc + 4]
        return sound, np.ascontiguousarray(crc).view("<u4").reshape(-1)


def _kind(table: _ItemTable, row: int, fd: Handle) -> _Kind | None:
    """The form of the items of a kind, from the first of them; None if that item is not suitable for comparison."""
    fragment, start, length = table.piece(row, fd).fragment, int(table.start[row]), int(table.length[row])
    if fragment.member is None or not fragment.row_major:
        return None
    member = (fragment.member.start - start, fragment.member.size)
    like = outline(lambda at, count: pread(fd, min(count, length - at), start + at), length, member[0])
    return like and _Kind(fragment.offset - start, member, like)


def _uniform_pieces(table: _ItemTable, rows: slice, dtype: str, items: Items) -> Columns:
    """The pieces of a tensor whose items are all like the first of their kind."""
    start, codes = table.start[rows], table.kind[rows]
    offset, member = np.empty_like(start), np.empty((len(start), 3), np.int64)
    for code in np.unique(codes).tolist():
        kind, own = table.kinds[code], codes == code
        assert kind is not None
        offset[own] = start[own] + kind.offset
        member[own, 0], member[own, 1] = start[own] + kind.member[0], kind.member[1]
    member[:, 2] = table.crc[rows]
    return Columns(dtype, items.boxes, items.paths, items.file, offset, member)


def _separate_pieces(table: _ItemTable, rows: slice, dtype: str, items: Items) -> list[Piece]:
    """The pieces of a tensor some of whose items differ from the first of their kind."""
    pieces = list[Piece]()
    for row, cut in zip(range(rows.start, rows.stop), items.boxes.cuts(), strict=True):
        if row in table.differing:
            pieces.append(table.differing[row])
            continue
        items_of_row = _uniform_pieces(table, slice(row, row + 1), dtype, items.only(row - rows.start))
        pieces.append(Piece(cut, items_of_row.fragment(0, cut.shape)))
    return pieces


def dtype_of(name: str, dtype: Any) -> str:
    """The element type of a tensor.

    Raises:
        UnsupportedError: safetensors has no such element type.
    """
    if not isinstance(dtype, Dtype):
        spelled = f"{dtype.module}.{dtype.name}" if isinstance(dtype, Opaque) else short(dtype)
        raise UnsupportedError(f"{name} has the element type {spelled}, which has no counterpart")
    return DTYPES[dtype.name]


def require_files(needed: Mapping[Path, int], names: Callable[[Path], Sequence[str]]) -> None:
    """Check that every file exists and is long enough.

    Args:
        needed: number of bytes that each file must have.
        names: returns the names of the tensors in a file.

    Raises:
        SourceError: a file is missing or too short.
    """
    missing = [path for path in needed if not path.is_file()]
    if missing:
        first = missing[0]
        ranks = sorted({int(match[1]) for path in missing if (match := DATA.fullmatch(path.name))})
        raise SourceError(
            f"{first.parent} lacks {len(missing)} of {len(needed)} files, such as {first.name} with a part of "
            f"{names(first)[0]} ({len(names(first))} tensors)",
            f"they are on the nodes of ranks {ranges(ranks)}" if ranks else "",
        )
    for path, size in needed.items():
        if file_size(path) < size:
            raise SourceError(
                f"{path} is cut off: it has {file_size(path)} bytes, {names(path)[-1]} reaches to byte {size}"
            )


def _piece(name: str, dtype: str, item: Item, fd: Handle) -> Piece:
    stream = Stream(item.start, item.length) if item.transforms else None
    if stream is None:
        archive = read_archive(fd, item.path, item.start, item.length, name)
    else:
        if item.transforms != ("stream.zstd/1",):
            raise UnsupportedError(
                f"{item.path} holds {name} encoded as {', '.join(item.transforms)}, only zstd is known"
            )
        value, storages, _ = parse_archive(*stream.ends(fd, item.path), f"{item.path}: {name}")
        archive = TorchFile(item.path, value, storages)
    ref = archive.value
    shape = tuple(stop - start for start, stop in item.box)
    if not isinstance(ref, TensorRef):
        what = f"{ref!r}" if isinstance(ref, Opaque) else short(ref)
        raise UnsupportedError(f"{item.path} holds {name} as {what}, which is no plain tensor")
    if ref.shape != shape or ref.dtype != dtype:
        raise SourceError(
            f"{item.path} holds {name} as {ref.dtype}{list(ref.shape)} at byte {item.start}, the metadata says "
            f"{dtype}{list(shape)}"
        )
    fragment: Fragment = archive.fragment(ref, name)
    return Piece(Cut(item.box), fragment._replace(stream=stream) if prod(shape) else fragment)
