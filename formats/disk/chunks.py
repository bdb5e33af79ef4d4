"""Chunks of zarr arrays, in folders or in the key-value trees of OCDBT: what tensorstore decodes, each as a whole.

Facts: tensorstore 0.1.86, drivers `zarr`, `zarr3`, `ocdbt`; orbax-checkpoint 0.12.8 serialization/types.py and
tensorstore_utils.py (which of them a save is of, and how arrays are called). Of an OCDBT tree manifests and nodes have
CRC-32C, which tensorstore compares; the chunks themselves have none, and neither has the zstd around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NODES = 64 << 20
"""Bytes of OCDBT's nodes and chunks that tensorstore keeps."""
DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""tensorstore's name of an element type: that of safetensors."""


class Store(NamedTuple):
    """Where arrays lie.

    Attributes:
        folder: the folder that holds them.
        driver: the version of zarr that they are of: `zarr` (2) or `zarr3`.
        tree: whether the folder is an OCDBT tree; otherwise each array is a folder in it.
    """

    folder: Path
    driver: str
    tree: bool


class Chunk(NamedTuple):
    """A chunk of an array. Offsets of fragments in it count bytes of its elements as they are decoded: row-major.

    Attributes:
        store: where the array lies.
        name: of the array.
        start: the first element, along each dimension of the array.
        shape: in elements; at the end of the array less than that of the others.
        outer: the dimension that is the outermost one of what is decoded; the others follow in their order.
        factor: what its elements are multiplied by, in float64, and then rounded once.
    """

    store: Store
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    outer: int = 0
    factor: float = 1.0

    @property
    def strides(self) -> tuple[int, ...]:
        """Those of what is decoded, in elements, for each dimension of the array."""
        order = self.order
        by_dim = {dim: prod(self.shape[inner] for inner in order[place + 1 :]) for place, dim in enumerate(order)}
        return tuple(by_dim[dim] for dim in range(len(order)))

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of what is decoded, as those of the array."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: dim != self.outer))


class Array(NamedTuple):
    """An array as its metadata describes it: its shape, that of a chunk, and its element type by tensorstore's name."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str


def arrays(store: Store, names: Iterable[str]) -> Mapping[str, Array]:
    """What the metadata of arrays says.

    Raises:
        SourceError: an array is missing, or its metadata is damaged.
        UnsupportedError: tensorstore is not installed.
    """
    pending = {name: _open(store, name) for name in names}
    found = dict[str, Array]()
    for name, future in pending.items():
        try:
            opened = future.result()
            shape, chunk = tuple(opened.shape), tuple(opened.chunk_layout.read_chunk.shape or ())
        except ValueError as error:
            raise _damage(store, name, error) from None
        parts = zip(chunk, shape, strict=False)
        if len(chunk) != len(shape) or not all(0 < part <= max(size, 1) for part, size in parts):
            raise SourceError(f"{store.folder}: {name} {list(shape)} has chunks of {list(chunk)}, no part of it")
        found[name] = Array(shape, chunk, opened.dtype.name)
    return found


def decoded(chunk: Chunk) -> NDArray[Any]:
    """The elements of a chunk, as tensorstore gives them: a number of numpy or of ml_dtypes each.

    Raises:
        SourceError: what it is read from is missing or damaged.
        UnsupportedError: tensorstore is not installed.
    """
    box = tuple(slice(low, low + count) for low, count in zip(chunk.start, chunk.shape, strict=True))
    try:
        values: NDArray[Any] = _opened(chunk.store, chunk.name)[box].transpose(chunk.order).read(order="C").result()
    except ValueError as error:
        raise _damage(chunk.store, chunk.name, error) from None
    return values


@lru_cache(maxsize=1024)
def _opened(store: Store, name: str) -> Any:
    return _open(store, name).result()


def _open(store: Store, name: str) -> Any:
    """The future of an opened array, in which a chunk that is not there is damage, and no zeros."""
    tensorstore = _tensorstore(store.folder)
    inside = {"driver": "ocdbt", "base": _files(store.folder), "path": f"{name}/"}
    spec = {
        "driver": store.driver,
        "kvstore": inside if store.tree else _files(store.folder / name),
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(spec, open=True, read=True, context=_context())


def _files(folder: Path) -> dict[str, str]:
    return {"driver": "file", "path": f"{folder.resolve()}/"}


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
    """What tensorstore says of an array, without the specification that it repeats."""
    said = str(error).split(" [", maxsplit=1)[0]
    return SourceError(f"{store.folder} holds no sound array {name}: {said}", "was a file not copied, or cut off?")
