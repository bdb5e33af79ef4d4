"""Chunks of zarr arrays, in folders or in OCDBT key-value trees; tensorstore decodes each chunk as a whole.

Facts: tensorstore 0.1.86, drivers `zarr`, `zarr3`, `ocdbt`; orbax-checkpoint 0.12.8 serialization/types.py and
tensorstore_utils.py (which driver a save uses, and the names of arrays). The manifests and nodes of an OCDBT tree have
a CRC-32C, which tensorstore compares; chunks have no checksum, and neither has their zstd compression.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NODES = 64 << 20
"""The size in bytes of tensorstore's cache for OCDBT nodes and chunks."""
DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Element type in tensorstore: its name in safetensors."""


class Store(NamedTuple):
    """Where zarr arrays are stored.

    Attributes:
        folder: the folder that holds the arrays.
        driver: tensorstore's driver for their version of zarr: `zarr` (2) or `zarr3`.
        tree: whether the folder is an OCDBT tree; otherwise each array is a subfolder.
    """

    folder: Path
    driver: str
    tree: bool


class Change(NamedTuple):
    """A change of every element, computed in float64 and rounded once: times `factor`, then plus `plus`.

    Attributes:
        factor: the number that an element is multiplied by.
        plus: the number that is added to the product.
        edge: what to call the change in a plan.
    """

    factor: float
    plus: float
    edge: str


class Chunk(NamedTuple):
    """A chunk of an array. Offsets of fragments in a chunk count bytes of its decoded, row-major elements.

    Attributes:
        store: where the array is stored.
        name: the name of the array.
        start: the index of the first element, along each dimension of the array.
        shape: the number of elements along each dimension; chunks at the end of the array may be smaller.
        outer: the dimension that decoding makes the outermost one; the other dimensions follow in their order.
        change: how the elements are changed; None for not at all.
    """

    store: Store
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    outer: int = 0
    change: Change | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the decoded chunk, in elements, for each dimension of the array."""
        order = self.order
        by_dim = {dim: prod(self.shape[inner] for inner in order[place + 1 :]) for place, dim in enumerate(order)}
        return tuple(by_dim[dim] for dim in range(len(order)))

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of the array, in their order in the decoded chunk."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: dim != self.outer))


class Array(NamedTuple):
    """The metadata of an array: its shape, the shape of a chunk, and tensorstore's name of the element type."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str


def arrays(store: Store, names: Iterable[str]) -> Mapping[str, Array]:
    """Return the metadata of arrays, by name.

    Raises:
        SourceError: an array is missing, or its metadata is damaged.
        UnsupportedError: tensorstore is not installed.
    """
    pending = {name: _open(store, name) for name in names}
    arrays = dict[str, Array]()
    for name, future in pending.items():
        try:
            opened = future.result()
            shape, chunk = tuple(opened.shape), tuple(opened.chunk_layout.read_chunk.shape or ())
        except ValueError as error:
            raise _damage(store, name, error) from None
        parts = zip(chunk, shape, strict=False)
        if len(chunk) != len(shape) or not all(0 < part <= max(size, 1) for part, size in parts):
            raise SourceError(f"{store.folder}: {name} {list(shape)} has chunks of {list(chunk)}, no part of it")
        arrays[name] = Array(shape, chunk, opened.dtype.name)
    return arrays


def decoded(chunk: Chunk) -> NDArray[Any]:
    """Return the elements of a chunk as tensorstore decodes them, with a dtype of numpy or ml_dtypes.

    Raises:
        SourceError: the chunk, or a file that it is read from, is missing or damaged.
        UnsupportedError: tensorstore is not installed.
    """
    box = tuple(slice(low, low + count) for low, count in zip(chunk.start, chunk.shape, strict=True))
    try:
        values: NDArray[Any] = _opened(chunk.store, chunk.name)[box].transpose(chunk.order).read(order="C").result()
    except ValueError as error:
        raise _damage(chunk.store, chunk.name, error) from None
    return values


def whole_number(store: Store, name: str, array: Array | None) -> int | None:
    """Return the integer that is an array without dimensions; None if the array is another one, or missing.

    Raises:
        SourceError: the number, or a file that it is read from, is missing or damaged.
        UnsupportedError: tensorstore is not installed.
    """
    return int(decoded(Chunk(store, name, (), ()))) if array and not array.shape and "int" in array.dtype else None


@lru_cache(maxsize=1024)
def _opened(store: Store, name: str) -> Any:
    return _open(store, name).result()


def _open(store: Store, name: str) -> Any:
    """Return the future of an opened array, in which a missing chunk is an error instead of zeros."""
    tensorstore = _tensorstore(store.folder)
    inside = {"driver": "ocdbt", "base": _files(store.folder), "path": f"{name}/"}
    spec = {
        "driver": store.driver,
        "kvstore": inside if store.tree else _files(store.folder / name),
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(spec, open=True, read=True, context=_context())


def _files(folder: Path) -> dict[str, str]:
    """Return the store of a folder, under a path without links and `..`, which tensorstore does not take."""
    return {"driver": "file", "path": f"{os.path.realpath(folder)}/"}


@lru_cache(maxsize=1)
def _context() -> Any:
    import tensorstore

    return tensorstore.Context({"cache_pool": {"total_bytes_limit": NODES}})


def _tensorstore(folder: Path) -> Any:
    try:
        import tensorstore
    except ImportError:
        raise UnsupportedError(
            f"{folder} holds arrays of zarr, which the package tensorstore reads", "pip install 'vitruvian[orbax]'"
        ) from None
    return tensorstore


def _damage(store: Store, name: str, error: ValueError) -> SourceError:
    """Return the error for a damaged array, with tensorstore's message without the specification that it repeats."""
    message = str(error).split(" [", maxsplit=1)[0]
    return SourceError(f"{store.folder} holds no sound array {name}: {message}", "was a file not copied, or cut off?")
