"""Checkpoints of torch.distributed.checkpoint (DCP): the `.metadata` pickle and the items of `.distcp` files.

    DIR/.metadata              which tensors there are, which boxes of them, and in which file each box lies
    DIR/__{rank}.metadata      the same of one rank, when it was saved with use_collectives=False
    DIR/__{rank}_{n}.distcp    items back to back; a tensor's item is one complete torch.save archive

Facts: torch 2.13.0, distributed/checkpoint/metadata.py and filesystem.py; files that it wrote are in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.handle import Handle, close_handle, open_handle, opened
from formats.disk.safetensors import MAX_DIMENSIONS, Fragment, allow_files, file_size
from formats.disk.zstd_stream import Stream
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.pieces import Piece, Scattered, scattered
from formats.layout.table import Cut
from formats.torch_files.archive import TorchFile, parse_archive, read_archive
from formats.torch_files.pickle_values import DTYPES, Dtype, Opaque, TensorRef
from formats.torch_files.unpickle import DAMAGE, loads

METADATA = ".metadata"
SUFFIX = ".distcp"
DATA = re.compile(r"__(\d+)_\d+\.distcp")
CLASSES = ("Metadata", "MCoreMetadata")
"""Of torch, and of megatron-core up to 0.15, which adds a field (dist_checkpointing/strategies/torch.py)."""
BYTES = "BytesStorageMetadata"
"""What is no tensor: numbers, texts and other objects, each pickled."""
MAX_METADATA = 1 << 31
READERS = 8
"""Threads that read the heads of items, which may lie on slow storage."""


class Item(NamedTuple):
    """A stored box of a tensor: its file, its extent in bytes there, and how it was encoded."""

    box: tuple[tuple[int, int], ...]
    path: Path
    start: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: the path of its key in the saved dictionary, None when it is not recorded."""

    name: str
    path: tuple[str, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    items: tuple[Item, ...]


def is_dcp(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of this kind, complete or not."""
    return bool(metadata_files(folder)) or any(DATA.fullmatch(path.name) for path in folder.glob("__*.distcp"))


def metadata_files(folder: Path) -> list[Path]:
    """`.metadata`, or that of each rank."""
    if (folder / METADATA).is_file():
        return [folder / METADATA]
    return sorted(path for path in folder.glob("__*.metadata") if re.fullmatch(r"__\d+\.metadata", path.name))


def names(folder: Path, *wanted: str) -> bool:
    """Whether the metadata, which is not parsed for it, spells all of these names."""
    held = [file.read_bytes() for file in metadata_files(folder) if file_size(file) <= MAX_METADATA]
    return bool(held) and all(any(name.encode() in content for content in held) for name in wanted)


def entries(folder: Path) -> list[Entry]:
    """Every tensor of a checkpoint, in the order in which it was saved. Raises as `contents` does."""
    return contents(folder)[0]


def contents(folder: Path) -> tuple[list[Entry], list[str]]:
    """Every tensor of a checkpoint, in the order in which it was saved, and the names of what is no tensor.

    Raises:
        SourceError: the metadata is missing or damaged, or names files that are not here.
    """
    files = metadata_files(folder)
    if not files:
        here = sorted({int(found[1]) for path in folder.iterdir() if (found := DATA.fullmatch(path.name))})
        found_data = f"the data of ranks {_ranges(here)} but no" if here else "no data and no"
        raise SourceError(
            f"{folder} holds {found_data} {METADATA}: the save never finished, or "
            f"{METADATA} lies on the node of rank 0, which writes it last",
            f"copy {METADATA} and the other ranks' .distcp files here, or take an earlier checkpoint",
        )
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
    boxes: dict[str, list[Item]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    objects: list[str] = []
    for file in files:
        held = _metadata(file)
        _require_whole(folder, held["storage_data"])
        paths |= {name: tuple(map(str, path)) for name, path in (held.get("planner_data") or {}).items()}
        chunks: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for name, about in held["state_dict_metadata"].items():
            if about.name == BYTES:
                objects.append(name)
                continue
            state = about.state
            shape = _sizes(state["size"])
            shapes[name] = (shape, state["properties"].state[0])
            for chunk in state["chunks"]:
                chunks[name, _sizes(chunk.state["offsets"])] = _sizes(chunk.state["sizes"])
        for index, info in held["storage_data"].items():
            name, offsets = index.state["fqn"], index.state.get("offset")
            if name in shapes:
                key = (name, _sizes(offsets))
                if key not in chunks:
                    raise SourceError(f"{file} stores a piece of {short(name)} that it does not describe")
                boxes.setdefault(name, []).append(_item(folder, key[1], chunks.pop(key), info.state))
        if chunks:
            name, offsets = next(iter(chunks))
            raise SourceError(f"{file} says nothing of where the piece of {short(name)} at {list(offsets)} lies")
    order = {name: number for number, name in enumerate(paths)}
    names = sorted(shapes, key=lambda name: order.get(name, len(order)))
    return [Entry(name, paths.get(name), *shapes[name], tuple(boxes.get(name, ()))) for name in names], objects


def _require_whole(folder: Path, stored: Mapping[Any, Any]) -> None:
    """Files that are here reach as far as the metadata says, objects included. A missing one is seen where it is read.

    Raises:
        SourceError: one is cut off.
    """
    needed: dict[str, int] = {}
    for info in stored.values():
        name, end = info.state["relative_path"], info.state["offset"] + info.state["length"]
        needed[name] = max(needed.get(name, 0), end)
    for name, end in needed.items():
        path = _file(folder, name)
        if path.parent == folder and path.is_file() and file_size(path) < end:
            raise SourceError(f"{path} is cut off: it has {file_size(path)} bytes, the metadata {end}")


def read_objects(folder: Path, names: Collection[str]) -> dict[str, TorchFile]:
    """What is no tensor, opened, by name; names that are not there are left out.

    Raises:
        SourceError: a file is missing or cut off.
    """
    wanted = set(names)
    items = {
        name: _item(folder, (), (), info.state)
        for file in metadata_files(folder)
        for index, info in _metadata(file)["storage_data"].items()
        if (name := index.state["fqn"]) in wanted
    }
    _require_files(Entry(name, None, (), None, (item,)) for name, item in items.items())
    found = {}
    for name, item in items.items():
        if item.transforms:
            raise UnsupportedError(f"{item.path} holds {name} encoded as {', '.join(item.transforms)}")
        with opened(item.path) as handle:
            found[name] = read_archive(handle, item.path, item.start, item.length, name)
    return found


def _metadata(file: Path) -> Mapping[str, Any]:
    """The fields of a metadata pickle, checked for what is used of them."""
    if file_size(file) > MAX_METADATA:
        raise SourceError(f"{file} has {file_size(file)} bytes, too many for metadata")
    value = loads(file.read_bytes(), str(file))
    if not isinstance(value, Opaque) or value.name not in CLASSES or not isinstance(value.state, dict):
        raise SourceError(f"{file} holds no metadata of torch.distributed.checkpoint")
    held: dict[str, Any] = value.state
    try:
        for name, about in held["state_dict_metadata"].items():
            if not isinstance(name, str) or about.name not in (BYTES, "TensorStorageMetadata"):
                raise SourceError(f"{file} describes {short(name)} as {about!r}, which is not known")
            if about.name != BYTES:
                _ = about.state["size"], about.state["properties"].state[0]
                _ = [(chunk.state["offsets"], chunk.state["sizes"]) for chunk in about.state["chunks"]]
        for index, info in held["storage_data"].items():
            _ = [name + "" for name in info.state.get("transform_descriptors") or ()]
            _ = index.state["fqn"] + info.state["relative_path"], info.state["offset"] + info.state["length"]
        _ = [tuple(path) for path in (held.get("planner_data") or {}).values()]
    except DAMAGE:
        raise SourceError(f"{file} is damaged, or of a version that is not known") from None
    return held


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, tuple | list) else None
    if sizes is None or len(sizes) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**62 for n in sizes):
        raise SourceError(f"the metadata has {short(value)} where a shape or an offset belongs")
    return sizes


def _item(folder: Path, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Mapping[str, Any]) -> Item:
    if len(offsets) != len(sizes):
        raise SourceError(f"{folder}: a piece has {len(sizes)} dimensions and {len(offsets)} offsets")
    name, transforms = info["relative_path"], info.get("transform_descriptors") or ()
    if not DATA.fullmatch(name) and not re.fullmatch(r"\w[\w.-]{0,200}", name):
        raise SourceError(f"{folder}: the metadata names {short(name)}, which is no file name in the folder")
    start, length = _sizes([info["offset"], info["length"]])
    box = tuple((low, low + size) for low, size in zip(offsets, sizes, strict=True))
    return Item(box, _file(folder, name), start, length, tuple(transforms))


@lru_cache(maxsize=4096)
def _file(folder: Path, name: str) -> Path:
    """The path of a file: one object for all of its items."""
    return folder / name


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as text, neighbours joined: 0-3, 8."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


# --- items -----------------------------------------------------------------------------------------------------------


def load(wanted: Iterable[Entry]) -> Iterator[Scattered]:
    """Find the bytes of each tensor: the heads of its items are read and checked against the metadata.

    Raises:
        SourceError: a file is missing or cut off, or an item is not what the metadata says.
        UnsupportedError: an item is encoded in a way that is not known.
    """
    tensors = list(wanted)
    _require_files(tensors)
    allow_files()
    descriptors: dict[Path, Handle] = {}
    try:
        for entry in tensors:
            for item in entry.items:
                if item.path not in descriptors:
                    descriptors[item.path] = open_handle(item.path)
        with ThreadPoolExecutor(READERS) as pool:
            yield from pool.map(lambda entry: _tensor(entry, descriptors), tensors)
    finally:
        for fd in descriptors.values():
            close_handle(fd)


def _tensor(entry: Entry, descriptors: Mapping[Path, Handle]) -> Scattered:
    pieces = [_piece(entry, item, descriptors[item.path]) for item in entry.items]
    return scattered(entry.name, entry.shape, _dtype(entry), pieces)


def _dtype(entry: Entry) -> str:
    if not isinstance(entry.dtype, Dtype):
        raise UnsupportedError(f"{entry.name} has the element type {short(entry.dtype)}, which has no counterpart")
    return DTYPES[entry.dtype.name]


def _require_files(tensors: Iterable[Entry]) -> None:
    """Every file is here and long enough."""
    needed: dict[Path, int] = {}
    names: dict[Path, list[str]] = {}
    for entry in tensors:
        for item in entry.items:
            needed[item.path] = max(needed.get(item.path, 0), item.start + item.length)
            names.setdefault(item.path, []).append(entry.name)
    missing = [path for path in needed if not path.is_file()]
    if missing:
        first = missing[0]
        ranks = sorted({int(found[1]) for path in missing if (found := DATA.fullmatch(path.name))})
        raise SourceError(
            f"{first.parent} lacks {len(missing)} of {len(needed)} files, such as {first.name} with a part of "
            f"{names[first][0]} ({len(names[first])} tensors)",
            f"they lie on the nodes of ranks {_ranges(ranks)}" if ranks else "",
        )
    for path, size in needed.items():
        if file_size(path) < size:
            raise SourceError(
                f"{path} is cut off: it has {file_size(path)} bytes, {names[path][-1]} reaches to byte {size}"
            )


def _piece(entry: Entry, item: Item, fd: Handle) -> Piece:
    stream = Stream(item.start, item.length) if item.transforms else None
    if stream is None:
        archive = read_archive(fd, item.path, item.start, item.length, entry.name)
    else:
        _require_known(item, entry.name)
        where = f"{item.path}: {entry.name}"
        value, storages, _ = parse_archive(*stream.ends(fd, item.path), where)
        archive = TorchFile(item.path, value, storages)
    ref = archive.value
    shape = tuple(stop - start for start, stop in item.box)
    if not isinstance(ref, TensorRef):
        what = f"{ref!r}" if isinstance(ref, Opaque) else short(ref)
        raise UnsupportedError(f"{item.path} holds {entry.name} as {what}, which is no plain tensor")
    if ref.shape != shape or ref.dtype != _dtype(entry):
        raise SourceError(
            f"{item.path} holds {entry.name} as {ref.dtype}{list(ref.shape)} at byte {item.start}, the metadata says "
            f"{_dtype(entry)}{list(shape)}"
        )
    fragment: Fragment = archive.fragment(ref, entry.name)
    return Piece(Cut(item.box), fragment._replace(stream=stream) if prod(shape) else fragment)


def _require_known(item: Item, name: str) -> None:
    if item.transforms != ("stream.zstd/1",):
        raise UnsupportedError(f"{item.path} holds {name} encoded as {', '.join(item.transforms)}, only zstd is known")
