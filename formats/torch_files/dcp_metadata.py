"""Reads the `.metadata` pickle of torch.distributed.checkpoint as columns: millions of pieces, not an object for each.

Facts: torch 2.13.0, distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from formats.disk.handle import is_remote
from formats.disk.safetensors import MAX_DIMENSIONS, file_size
from formats.disk.stamps import Stamp, stamp_of
from formats.errors import SourceError, short
from formats.layout.columns import Boxes, Ints
from formats.layout.columns import boxes as equal_boxes
from formats.torch_files.pickle_values import Opaque
from formats.torch_files.rows import Bytes, Reader, Rows
from formats.torch_files.unpickle import DAMAGE, loads

DATA = re.compile(r"__(\d+)_\d+\.distcp")
CLASSES = ("Metadata", "MCoreMetadata")
"""Metadata classes of torch, and of megatron-core up to 0.15, which adds a field
(dist_checkpointing/strategies/torch.py)."""
BYTES = "BytesStorageMetadata"
"""Class of entries that are no tensors: numbers, texts and other objects, each pickled."""
CHUNK, INDEX, EXTENT = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"
FIELDS = frozenset(("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "transform_descriptors"))
MAX_METADATA = 1 << 31


class Item(NamedTuple):
    """A stored piece of a tensor, or an object: its box, its file, its extent there in bytes, and its encodings."""

    box: tuple[tuple[int, int], ...]
    path: Path
    start: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Items:
    """The stored pieces of a tensor, in the order of their boxes.

    Attributes:
        boxes: the parts of the tensor that the pieces are.
        paths: files that have pieces.
        file: int32 [pieces], the index in `paths` of the file of each piece.
        start: int64 [pieces], the first byte of each piece in its file.
        length: int64 [pieces], the length of each piece in bytes.
        transforms: encodings of encoded pieces, by the piece's number.
    """

    boxes: Boxes
    paths: Sequence[Path]
    file: Ints
    start: Ints
    length: Ints
    transforms: Mapping[int, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.boxes)

    def item(self, number: int) -> Item:
        """The piece of this number."""
        extent = int(self.start[number]), int(self.length[number])
        path, box = self.paths[self.file[number]], self.boxes.cut(number).ranges
        return Item(box, path, *extent, self.transforms.get(number, ()))

    def only(self, number: int) -> Items:
        """The piece of this number, as columns."""
        rows = slice(number, number + 1)
        boxes = equal_boxes(self.boxes.ranges[rows])
        transforms = {0: self.transforms[number]} if number in self.transforms else {}
        return Items(boxes, self.paths, self.file[rows], self.start[rows], self.length[rows], transforms)

    @property
    def files(self) -> set[Path]:
        """The files that have a piece."""
        return {self.paths[number] for number in np.unique(self.file).tolist()}


def join(parts: Sequence[Items]) -> Items:
    """The pieces of a tensor that several metadata files describe.

    Raises:
        SourceError: the files describe different numbers of dimensions.
    """
    if len(parts) == 1:
        return parts[0]
    if len({items.boxes.ranges.shape[1] for items in parts}) > 1:
        raise SourceError(f"{parts[0].paths[0].parent}: the ranks save a tensor with different numbers of dimensions")
    numbers: dict[Path, int] = {}
    files, transforms, before = list[Ints](), dict[int, tuple[str, ...]](), 0
    for items in parts:
        files.append(np.array([numbers.setdefault(path, len(numbers)) for path in items.paths], np.int32)[items.file])
        transforms |= {before + number: names for number, names in items.transforms.items()}
        before += len(items)
    ranges, start, length = (
        np.concatenate(columns)
        for columns in zip(*((items.boxes.ranges, items.start, items.length) for items in parts), strict=True)
    )
    return Items(equal_boxes(ranges), [*numbers], np.concatenate(files), start, length, transforms)


class Metadata(NamedTuple):
    """The content of one metadata file.

    Attributes:
        tensors: shape and torch's element type of each tensor.
        items: the pieces of each tensor.
        objects: the names of objects that are no tensors.
        extents: the extent of each object that is no tensor.
        planner: the path of each key in the saved dictionary.
        ends: the number of bytes that each file must have.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], Any]]
    items: Mapping[str, Items]
    objects: Sequence[str]
    extents: Mapping[str, Item]
    planner: Mapping[str, tuple[str, ...]]
    ends: Mapping[Path, int]


def read(file: Path) -> Metadata:
    """Read a metadata file. Cached: a file that has not changed is not read again.

    Raises:
        SourceError: the file is damaged, or no metadata file.
    """
    if file_size(file) > MAX_METADATA:
        raise SourceError(f"{file} has {file_size(file)} bytes, too many for metadata")
    return _read(file, stamp_of(file))


@lru_cache(maxsize=2)
def _read(file: Path, _: Stamp) -> Metadata:
    rows = Reader({CHUNK: CHUNK, EXTENT: INDEX}, FIELDS)
    value = loads(_content(file), str(file), rows)
    if not isinstance(value, Opaque) or value.name not in CLASSES or not isinstance(value.state, dict):
        raise SourceError(f"{file} holds no metadata of torch.distributed.checkpoint")
    state: dict[str, Any] = value.state
    try:
        planner = _paths(file, state.get("planner_data") or {})
        stored = _stored(file, state.pop("storage_data"), rows.texts.strings)
        return _joined(file, state["state_dict_metadata"], stored, planner)
    except DAMAGE:
        raise SourceError(f"{file} is damaged, or of a version that is not known") from None


def _paths(file: Path, planner_data: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """The path of each key. Torch joins it to the key, numbers of lists too (_nested_dict.py `flatten_state_dict`).

    Raises:
        SourceError: a path is that of another key.
    """
    paths = {name: tuple(map(str, path)) for name, path in planner_data.items()}
    for name, path in paths.items():
        if ".".join(path) != name:
            raise SourceError(f"{file} contradicts itself: {short(name)} has the path of {short('.'.join(path))}")
    return paths


def _content(file: Path) -> Bytes:
    """The content of a file; a file of the disk is memory-mapped."""
    if is_remote(file):
        return file.read_bytes()
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) if file_size(file) else b""


class _Stored(NamedTuple):
    """The extents of all stored items: the columns of `Items`, and the name and the offsets of each item."""

    names: Sequence[str]
    paths: Sequence[Path]
    name: Ints
    file: Ints
    start: Ints
    length: Ints
    offsets: Sequence[Ints]
    transforms: Mapping[int, tuple[str, ...]]


def _stored(file: Path, storage_data: Mapping[Any, Any], texts: Sequence[str]) -> _Stored:
    """The columns of the `storage_data` of a metadata file."""
    numbers = {text: number for number, text in enumerate(texts)}
    blocks: list[tuple[Any, ...]] = []
    transforms: dict[int, tuple[str, ...]] = {}
    count = 0
    for index, info in storage_data.items():
        if isinstance(index, Rows):
            columns = index.columns
            (name,), (path,) = columns[f"{INDEX}.fqn"], columns[f"{EXTENT}.relative_path"]
            (start,), (length,) = columns[f"{EXTENT}.offset"], columns[f"{EXTENT}.length"]
            blocks.append((name, path, start, length, columns.get(f"{INDEX}.offset", ())))
            count += len(name)
            continue
        about, where = index.state, info.state
        name, path = about["fqn"] + "", where["relative_path"] + ""
        named = [[numbers.setdefault(text, len(numbers))] for text in (name, path)]
        extent = [[number] for number in sizes([where["offset"], where["length"]])]
        offsets = about.get("offset")
        blocks.append((*named, *extent, [[n] for n in sizes(() if offsets is None else offsets)]))
        if coded := where.get("transform_descriptors"):
            transforms[count] = tuple(transform + "" for transform in coded)
        count += 1
    codes, files, starts, lengths = (_column([block[i] for block in blocks]) for i in range(4))
    most = max((len(block[4]) for block in blocks), default=0)
    offsets = [
        _column([block[4][d] if d < len(block[4]) else [0] * len(block[0]) for block in blocks]) for d in range(most)
    ]
    if any(column.size and (column.min() < 0 or column.max() >= 2**62) for column in (starts, lengths, *offsets)):
        raise SourceError(f"{file} has a number where no offset and no length belongs")
    names, used = list(numbers), np.unique(files)
    paths = [_path(file.parent, names[number]) for number in used.tolist()]
    return _Stored(
        names, paths, codes.astype(np.int32), np.searchsorted(used, files).astype(np.int32), starts, lengths, offsets,
        transforms,
    )  # fmt: skip


def _column(parts: Sequence[Sequence[int]]) -> Ints:
    return np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.empty(0, np.int64)


def _path(folder: Path, name: str) -> Path:
    if not DATA.fullmatch(name) and not re.fullmatch(r"\w[\w.-]{0,200}", name):
        raise SourceError(f"{folder}: the metadata names {short(name)}, which is not a file name in the folder")
    return folder / name


def _joined(file: Path, described: dict[str, Any], stored: _Stored, planner: Mapping[str, tuple[str, ...]]) -> Metadata:
    """The metadata, made of the described tensors and objects and of their extents."""
    _require_apart(file, stored)
    ends = np.zeros(len(stored.paths), np.int64)
    np.maximum.at(ends, stored.file, stored.start + stored.length)
    order = np.argsort(stored.name, kind="stable")
    codes, firsts = np.unique(stored.name[order], return_index=True)
    groups = {stored.names[code]: rows for code, rows in zip(codes.tolist(), np.split(order, firsts[1:]), strict=False)}
    tensors, items, objects = dict[str, tuple[tuple[int, ...], Any]](), dict[str, Items](), list[str]()
    for name in list(described):
        entry = described.pop(name)
        if not isinstance(name, str) or entry.name not in (BYTES, "TensorStorageMetadata"):
            raise SourceError(f"{file} describes {short(name)} as {entry!r}, which is not known")
        if entry.name == BYTES:
            objects.append(name)
            continue
        tensors[name] = sizes(entry.state["size"]), entry.state["properties"].state[0]
        rows = groups.pop(name, np.empty(0, np.int64))
        items[name] = _items(file, name, _boxes(file, entry.state["chunks"]), stored, rows)
    extents = {}
    for name, rows in groups.items():
        at = int(rows[-1])
        path, transforms = stored.paths[stored.file[at]], stored.transforms.get(at, ())
        extents[name] = Item((), path, int(stored.start[at]), int(stored.length[at]), transforms)
    return Metadata(tensors, items, objects, extents, planner, dict(zip(stored.paths, ends.tolist(), strict=True)))


def _require_apart(file: Path, stored: _Stored) -> None:
    """Check that no two items share bytes: torch writes each by itself (filesystem.py `_write_files_from_queue`).

    Raises:
        SourceError: two items share bytes.
    """
    order = np.lexsort((stored.start, stored.file))
    order = order[stored.length[order] > 0]
    files, starts = stored.file[order], stored.start[order]
    shared = (files[1:] == files[:-1]) & (starts[1:] < (starts + stored.length[order])[:-1])
    if shared.any():
        at = int(shared.argmax())
        first, second = (short(stored.names[stored.name[order[i]]]) for i in (at, at + 1))
        place = f"from byte {starts[at + 1]} of {stored.paths[files[at]]} on"
        raise SourceError(f"{file} contradicts itself: {first} and {second} share bytes, {place}")


def _boxes(file: Path, chunks: Sequence[Any]) -> Ints:
    """The boxes of a tensor, int64 [pieces, dimensions, 2]."""
    columns: list[Ints] = []
    for chunk in chunks:
        low: Sequence[Sequence[int]]
        size: Sequence[Sequence[int]]
        if isinstance(chunk, Rows):
            low, size = (chunk.columns.get(f"{CHUNK}.{what}", ()) for what in ("offsets", "sizes"))
        else:
            low, size = ([[n] for n in sizes(chunk.state[what])] for what in ("offsets", "sizes"))
        if len(low) != len(size):
            raise SourceError(f"{file}: a piece has {len(size)} dimensions and {len(low)} offsets")
        if not low:
            columns.append(np.empty((1, 0, 2), np.int64))
            continue
        starts, lengths = np.array(low, np.int64), np.array(size, np.int64)
        columns.append(np.stack((starts, starts + lengths)).transpose(2, 1, 0))
    if len({box.shape[1] for box in columns}) > 1:
        raise SourceError(f"{file}: the pieces of a tensor have different numbers of dimensions")
    boxes = np.concatenate(columns) if columns else np.empty((0, 0, 2), np.int64)
    if (boxes < 0).any() or (boxes[:, :, 1] < boxes[:, :, 0]).any():
        raise SourceError(f"{file} has a number where no shape and no offset belongs")
    return boxes


def _items(file: Path, name: str, boxes: Ints, stored: _Stored, rows: Ints) -> Items:
    """The described boxes of a tensor with their extents; both are sorted by their offsets.

    Raises:
        SourceError: a described box is not stored, or a stored box is not described.
    """
    dims = boxes.shape[1]
    where = [column[rows] for column in stored.offsets]
    if any(column.any() for column in where[dims:]):
        raise SourceError(f"{file} stores a piece of {short(name)} that it does not describe")
    at = np.stack(where[:dims], axis=1) if dims and len(where) >= dims else np.zeros((len(rows), dims), np.int64)
    boxes, at_order = boxes[_order(boxes[:, :, 0])], _order(at)
    low, at, rows = boxes[:, :, 0], at[at_order], rows[at_order]
    last = np.append((low[1:] != low[:-1]).any(axis=1), True)[: len(low)]  # of boxes that are described twice
    boxes, low = boxes[last], low[last]
    if low.shape != at.shape or (low != at).any():
        described, stored_at = set(map(tuple, low.tolist())), set(map(tuple, at.tolist()))
        missing = sorted(described - stored_at)
        if stored_at - described or not missing:
            raise SourceError(f"{file} stores a piece of {short(name)} that it does not describe")
        raise SourceError(f"{file} says nothing of where the piece of {short(name)} at {list(missing[0])} lies")
    transforms = {}
    if stored.transforms:
        transforms = {i: stored.transforms[row] for i, row in enumerate(rows.tolist()) if row in stored.transforms}
    return Items(
        equal_boxes(boxes), stored.paths, stored.file[rows], stored.start[rows], stored.length[rows], transforms
    )


def _order(offsets: Ints) -> Ints:
    """Indices that sort some offsets; the given order if there are no dimensions."""
    return np.lexsort(offsets.T[::-1]) if offsets.shape[1] else np.arange(len(offsets))


def sizes(value: Any) -> tuple[int, ...]:
    """A shape or an offset as a tuple of integers.

    Raises:
        SourceError: the value is neither.
    """
    numbers = tuple(value) if isinstance(value, tuple | list) else None
    if numbers is None or len(numbers) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise SourceError(f"the metadata has {short(value)} where a shape or an offset belongs")
    return numbers
