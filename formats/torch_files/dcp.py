"""Reads checkpoints of torch.distributed.checkpoint (DCP): the `.metadata` pickle and the items of `.distcp` files.

    DIR/.metadata              which tensors there are, which boxes of them, and in which file each box is
    DIR/__{rank}.metadata      the same for one rank, when it was saved with use_collectives=False
    DIR/__{rank}_{n}.distcp    items back to back; a tensor's item is one complete torch.save archive

Facts: torch 2.13.0, distributed/checkpoint/metadata.py and filesystem.py; files that it wrote are in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.disk.handle import opened
from formats.disk.safetensors import file_size
from formats.errors import SourceError, UnsupportedError, ranges, short
from formats.layout.pieces import Scattered, from_pieces
from formats.torch_files import dcp_items, dcp_metadata
from formats.torch_files.archive import TorchFile, read_archive
from formats.torch_files.dcp_metadata import DATA, Items

METADATA = ".metadata"
SUFFIX = ".distcp"
BLOCK = 1 << 22
"""Number of bytes that are searched at a time."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    `path` is the path of its key in the saved dictionary, None when that is not recorded.
    """

    name: str
    path: tuple[str, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    items: Items


def is_dcp(folder: Path) -> bool:
    """Whether a folder has a checkpoint of torch.distributed.checkpoint, complete or not."""
    return bool(metadata_files(folder)) or any(DATA.fullmatch(path.name) for path in folder.glob("__*.distcp"))


def metadata_files(folder: Path) -> list[Path]:
    """The path of `.metadata`, or the metadata files of all ranks."""
    if (folder / METADATA).is_file():
        return [folder / METADATA]
    return sorted(path for path in folder.glob("__*.metadata") if re.fullmatch(r"__\d+\.metadata", path.name))


def names(folder: Path, *texts: str) -> bool:
    """Whether the metadata, which is not parsed for this, contains all of these names."""
    missing = set(texts)
    for file in metadata_files(folder):
        overlap, before = max(map(len, texts)), b""
        with file.open("rb") as opened:
            while missing and (block := opened.read(BLOCK)):
                missing -= {name for name in missing if name.encode() in before + block}
                before = block[-overlap:]
    return not missing and bool(metadata_files(folder))


def entries(folder: Path) -> list[Entry]:
    """Every tensor of a checkpoint, in the order in which it was saved. Raises what `contents` raises."""
    return contents(folder)[0]


def contents(folder: Path) -> tuple[list[Entry], list[str]]:
    """Every tensor of a checkpoint, in the order in which it was saved, and the names of objects that are no tensors.

    Raises:
        SourceError: the metadata is missing or damaged, or a file is truncated.
    """
    files = metadata_files(folder)
    if not files:
        data_ranks = sorted({int(match[1]) for path in folder.iterdir() if (match := DATA.fullmatch(path.name))})
        found_data = f"the data of ranks {ranges(data_ranks)} but no" if data_ranks else "no data and no"
        raise SourceError(
            f"{folder} holds {found_data} {METADATA}: the save never finished, or "
            f"{METADATA} is on the node of rank 0, which writes it last",
            f"copy {METADATA} and the other ranks' .distcp files here, or take an earlier checkpoint",
        )
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
    items: dict[str, list[Items]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    objects: list[str] = []
    for file in files:
        metadata = dcp_metadata.read(file)
        _require_whole(metadata)
        paths |= metadata.planner
        shapes |= metadata.tensors
        objects += metadata.objects
        for name, own in metadata.items.items():
            items.setdefault(name, []).append(own)
    order = {name: number for number, name in enumerate(paths)}
    names = sorted(shapes, key=lambda name: order.get(name, len(order)))
    return [Entry(name, paths.get(name), *shapes[name], dcp_metadata.join(items[name])) for name in names], objects


def _require_whole(metadata: dcp_metadata.Metadata) -> None:
    """Check that files are as long as the metadata records, objects included. Reading reports missing files.

    Raises:
        SourceError: a file is truncated.
    """
    for path, end in metadata.ends.items():
        if path.is_file() and file_size(path) < end:
            raise SourceError(f"{path} is cut off: it has {file_size(path)} bytes, the metadata {end}")


def read_objects(folder: Path, names: Collection[str]) -> dict[str, TorchFile]:
    """The opened archives of objects that are no tensors, by name; names that are not in the checkpoint are left out.

    Raises:
        SourceError: a file is missing or truncated, or ranks with a metadata file each saved different objects.
        UnsupportedError: an object is encoded.
    """
    asked = set(names)
    items = [
        (name, item)
        for metadata in map(dcp_metadata.read, metadata_files(folder))
        for name, item in metadata.extents.items()
        if name in asked
    ]
    needed: dict[Path, int] = {}
    for _, item in items:
        needed[item.path] = max(needed.get(item.path, 0), item.start + item.length)
    dcp_items.require_files(needed, lambda path: [name for name, item in items if item.path == path])
    files = dict[str, TorchFile]()
    for name, item in items:
        if item.transforms:
            raise UnsupportedError(f"{item.path} holds {name} encoded as {', '.join(item.transforms)}")
        with opened(item.path) as handle:
            file = read_archive(handle, item.path, item.start, item.length, name)
        first = files.setdefault(name, file)
        if first is not file and file.value != first.value:
            said = f"{name} = {short(first.value)} | {short(file.value)}"
            raise SourceError(f"{first.path} and {file.path} contradict each other: {said}")
    return files


def load(entries: Iterable[Entry]) -> Iterator[Scattered]:
    """Locate the bytes of each tensor: the heads of its items are read and checked against the metadata.

    Raises:
        SourceError: a file is missing or truncated, or an item differs from the metadata.
        UnsupportedError: an item is encoded in a way that is not known.
    """
    tensors = list(entries)
    pieces_of = dcp_items.locate_pieces([(tensor.name, tensor.dtype, tensor.items) for tensor in tensors])
    for entry, (dtype, pieces) in zip(tensors, pieces_of, strict=True):
        yield from_pieces(entry.name, entry.shape, dtype, pieces)
