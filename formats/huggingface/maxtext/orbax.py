"""The arrays of an Orbax checkpoint: their names, where they are stored, and their chunks.

    items/_METADATA             JSON: the names of all arrays, and how they are stored
    items/manifest.ocdbt, d/    with `use_ocdbt` one key-value tree of all arrays, merged from the processes' trees:
    items/ocdbt.process_N/      the tree of each process, whose data the merged tree refers to
    items/NAME/                 otherwise a folder for each array

Facts: orbax-checkpoint 0.12.8, metadata/tree.py (`InternalTreeMetadata`), serialization/tensorstore_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from formats.disk.chunks import DTYPES, Array, Chunk, Store
from formats.disk.json_file import read_json
from formats.disk.safetensors import Fragment
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces

METADATA, MANIFEST = "_METADATA", "manifest.ocdbt"
NO_ARRAY = ("None", "Dict", "List", "Tuple", "NamedTuple")
"""Value types that are not arrays (orbax-checkpoint type_handler_registry.py, empty_values.py)."""
MOST_CHUNKS = 1 << 20
"""The most chunks of one array that are accepted: more than any training has devices."""


@dataclass(frozen=True)
class Tree:
    """The content of a `_METADATA` file.

    Attributes:
        names: the path of names of each array, outermost first.
        store: where the arrays are stored.
        files: every file of the checkpoint.
    """

    names: tuple[tuple[str, ...], ...]
    store: Store
    files: tuple[Path, ...]


def read_tree(folder: Path) -> Tree:
    """Read the names of the arrays of a checkpoint.

    Raises:
        SourceError: the metadata is damaged, or the tree of its arrays is missing.
        UnsupportedError: the save left out chunks that are all zero, which cannot be told from chunks that are missing.
    """
    path = folder / METADATA
    metadata = read_json(path)
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict) or not entries:
        raise SourceError(f"{path} names no arrays: it has no tree_metadata")
    names = tuple(_names(entry, path) for entry in entries.values() if _is_array(entry, path))
    tree = metadata.get("use_ocdbt", (folder / MANIFEST).is_file())
    zarr3 = metadata.get("use_zarr3", False)
    if not isinstance(tree, bool) or not isinstance(zarr3, bool):
        raise SourceError(f"{path} says use_ocdbt = {short(tree)}, use_zarr3 = {short(zarr3)}")
    if tree and not (folder / MANIFEST).is_file():
        raise SourceError(f"{folder} lacks {MANIFEST}, the tree of its arrays", "was the save interrupted?")
    if metadata.get("store_array_data_equal_to_fill_value") is not True:
        raise UnsupportedError(
            f"{path} is of an Orbax that left out chunks of zeros: nobody can tell them from chunks that are missing",
            "load and save it with orbax-checkpoint 0.11 or later",
        )
    files = tuple(sorted(file for file in folder.rglob("*") if file.is_file()))
    return Tree(names, Store(folder, "zarr3" if zarr3 else "zarr", tree), files)


def _is_array(entry: Any, path: Path) -> bool:
    match entry:
        case {"value_metadata": {"value_type": str(kind)}}:
            return kind not in NO_ARRAY
    raise SourceError(f"{path} has an entry without a value_type: {short(entry)}")


def _names(entry: Any, path: Path) -> tuple[str, ...]:
    """Return the path of names of an array; names that could leave the checkpoint's folder are refused.

    Without OCDBT the names are folders of the checkpoint.
    """
    match entry:
        case {"key_metadata": [*keys]} if keys and all(isinstance(key, dict) for key in keys):
            names = tuple(str(key.get("key")) for key in keys)
            if not any(name in ("", ".", "..") or "/" in name or not name.isprintable() for name in names):
                return names
    raise SourceError(f"{path} has an entry without sound names: {short(entry)}")


def tensor_of(store: Store, name: str, array: Array, outer: int = 0) -> Scattered:
    """Return an array as a tensor with a piece for each chunk.

    Args:
        store: where the array is stored.
        name: the name of the array in the store.
        array: the metadata of the array.
        outer: the dimension along which the tensor will be split; it is made the outermost one of a decoded chunk.

    Raises:
        SourceError: the array has more than `MOST_CHUNKS` chunks.
        UnsupportedError: the element type has no counterpart in safetensors.
    """
    if array.dtype not in DTYPES:
        raise UnsupportedError(f"{store.folder} holds {name} as {array.dtype}, which has no counterpart")
    count = prod(-(-size // part) for size, part in zip(array.shape, array.chunk, strict=True))
    if count > MOST_CHUNKS:
        raise SourceError(f"{store.folder}: {name} {list(array.shape)} is in {count} chunks of {list(array.chunk)}")
    return from_pieces(name, array.shape, DTYPES[array.dtype], _pieces(store, name, array, outer))


def _pieces(store: Store, name: str, array: Array, outer: int) -> Iterator[Piece]:
    path = store.folder / MANIFEST if store.tree else store.folder / METADATA
    starts = (range(0, size, part) for size, part in zip(array.shape, array.chunk, strict=True))
    for start in product(*starts):
        box = tuple(
            (low, min(low + part, size)) for low, part, size in zip(start, array.chunk, array.shape, strict=True)
        )
        chunk = Chunk(store, name, start, Cut(box).shape, outer)
        yield Piece(Cut(box), Fragment(path, 0, DTYPES[array.dtype], chunk.shape, chunk.strides, chunk=chunk))
