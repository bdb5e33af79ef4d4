"""Plans files of torch.save that are to be written: each slot becomes a storage, in the order of the slots."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import OutputFile
from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.pieces import Scattered
from formats.layout.placed import OnRank, Placed
from formats.layout.ranks import Files
from formats.layout.slots import Slot
from formats.torch_files.archive import TorchFile, read_small
from formats.torch_files.archive_plan import STREAM, packed, plan_archive
from formats.torch_files.pickle_values import STORAGE_OF, StorageRef, TensorRef, is_plain

NUMBERS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}


class Small(NamedTuple):
    """A whole tensor of a few numbers: element type, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes

    @property
    def number(self) -> Any:
        """The value of a tensor of one number."""
        return struct.unpack(NUMBERS[self.dtype], self.raw)[0]


TensorEntry = tuple[str, Slot | None, tuple[int, ...], str]
"""Key, slot (None for a tensor of zeros), shape and element type of a tensor."""

NOWHERE = Path()

UNWRITTEN = "a Hugging Face folder holds it as it is (`convert hf2hf`); or dequantize it with what made it"
"""Hint for an element type without a typed storage in torch, for which torch.save has another form."""
MOST_BYTES = 64
"""Maximum size of a small tensor, in bytes."""


def archived(
    path: Path,
    module: Sequence[TensorEntry],
    value: Callable[[Mapping[str, TensorRef]], Any],
    folder: str = STREAM,
    states: Mapping[str, Sequence[TensorEntry]] | None = None,
) -> OutputFile:
    """Plan one file.

    Args:
        path: path of the file.
        module: the tensors of the model in the file.
        value: returns the object to pickle, given the reference of each tensor by key; the object may have small
            tensors.
        folder: name of the root folder in the archive.
        states: the tensors of an optimizer, by the name of the state.

    Raises:
        UnsupportedError: an element type cannot be written.
    """
    laid_out = _laid_out({"": module, **(states or {})}, value, folder)
    tensors = {
        state: tuple(Placed(key, slot, fragment._replace(path=path)) for key, slot, fragment in every)
        for state, every in laid_out.tensors.items()
    }
    return OutputFile(path, laid_out.size, tensors.pop(""), laid_out.counted, laid_out.headers, tensors)


def archived_alike(
    files: Files,
    module: Sequence[TensorEntry],
    value: Callable[[Mapping[str, TensorRef], int], Any],
    states: Mapping[str, Sequence[TensorEntry]] | None = None,
) -> list[OutputFile]:
    """Plan the files of ranks that have the same tensors, and differ only in a number that is pickled beside them.

    Args:
        files: the files of the ranks.
        module: the tensors of the model in the first file.
        value: returns the object to pickle, given the reference of each tensor by key and the number of the rank.
        states: as for `archived`, whose errors are raised.
    """
    by_state = {"": module, **(states or {})}
    first = _laid_out(by_state, lambda refs: value(refs, 0))
    tensors = {
        state: tuple(
            Placed(key, slot, fragment._replace(path=files.paths[0]), files=files) for key, slot, fragment in every
        )
        for state, every in first.tensors.items()
    }

    def headers(rank: int, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        of_rank = _laid_out(by_state, lambda refs: value(refs, rank))
        if (of_rank.size, of_rank.counted) != (first.size, first.counted):
            raise ValueError(f"{files.paths[rank]} has other places for its tensors than {files.paths[0]}")
        return of_rank.headers(checksums)

    return [
        OutputFile(
            path, first.size, OnRank(tensors[""], rank), first.counted, partial(headers, rank),
            {state: OnRank(tensors[state], rank) for state in states or {}},
        )
        for rank, path in enumerate(files.paths)
    ]  # fmt: skip


class _LaidOut(NamedTuple):
    """The plan of a file without its path: `tensors` by state; `counted` and `headers` are those of `OutputFile`."""

    size: int
    tensors: dict[str, list[tuple[str, Slot, Fragment]]]
    counted: dict[str, tuple[int, int]]
    headers: Callable[[Mapping[str, int]], Iterator[tuple[int, bytes]]]


def _laid_out(
    by_state: Mapping[str, Sequence[TensorEntry]], value: Callable[[Mapping[str, TensorRef]], Any], folder: str = STREAM
) -> _LaidOut:
    refs: dict[str, TensorRef] = {}
    storages: dict[str, int] = {}
    for key, _, shape, dtype in (tensor for every in by_state.values() for tensor in every):
        if dtype not in STORAGE_OF:
            raise UnsupportedError(f"{key} is {dtype}, which is not written into files of torch.save", UNWRITTEN)
        refs[key] = _reference(dtype, shape, str(len(storages)))
        storages[refs[key].storage.key] = prod(shape) * DTYPES[dtype]
    small: dict[str, bytes] = {}
    content = _settled(value(refs), small, len(storages))
    archive = plan_archive(content, {**storages, **{key: len(raw) for key, raw in small.items()}}, folder)
    extents = archive.storages()
    constants = {f"{folder}/data/{key}": raw for key, raw in small.items()}

    starts = {key: extents[f"{folder}/data/{ref.storage.key}"][0] for key, ref in refs.items()}
    tensors = {
        state: [
            (key, slot, Fragment(NOWHERE, starts[key], dtype, shape, row_major(shape)))
            for key, slot, shape, dtype in every
            if slot is not None
        ]
        for state, every in by_state.items()
    }

    def headers(checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        yield from archive.headers({**checksums, **{name: zlib.crc32(raw) for name, raw in constants.items()}})
        yield from ((extents[name][0], raw) for name, raw in constants.items())

    counted = {name: extent for name, extent in extents.items() if name not in constants}
    return _LaidOut(archive.size, tensors, counted, headers)


def _reference(dtype: str, shape: tuple[int, ...], storage: str) -> TensorRef:
    return TensorRef(StorageRef(dtype, storage, prod(shape)), 0, shape, row_major(shape), dtype)


# --- what is small enough to travel as it is -------------------------------------------------------------------------


def small_of(tensor: Scattered) -> Small:
    """Read a tensor of one number, which has to be the same on all ranks that have it.

    Raises:
        SourceError: ranks have different numbers.
        UnsupportedError: the tensor is not one number.
    """
    where = tensor.whole.path
    if prod(tensor.shape) != 1 or tensor.dtype not in NUMBERS:
        raise UnsupportedError(f"{where} holds {tensor.dtype}{list(tensor.shape)} where a number should be")
    first, *others = (read_small(piece.fragment) for copy in tensor.copies for piece in copy)
    if any(raw != first for raw in others):
        raise SourceError(f"{where} and the files of other ranks hold optimizers of different steps")
    return Small(tensor.dtype, tensor.shape, first)


def plain(file: TorchFile, value: Any, name: str, depth: int = 8) -> Any:
    """A value of a file, with its small tensors read as `Small`.

    Args:
        file: the file.
        value: the value to read.
        name: name of the value, for errors.
        depth: how deep maps and lists may be nested.

    Raises:
        UnsupportedError: the value has more than plain data and small tensors.
    """
    match value:
        case TensorRef():
            fragment = file.fragment(value, name)
            if fragment.nbytes > MOST_BYTES or not fragment.row_major:
                raise UnsupportedError(f"{file.path}: {name} holds a tensor {list(value.shape)}, which is not known")
            return Small(value.dtype, value.shape, read_small(fragment))
        case dict() if depth and is_plain([*value]):
            return {key: plain(file, item, name, depth - 1) for key, item in value.items()}
        case list() if depth:
            return [plain(file, item, name, depth - 1) for item in value]
        case _ if is_plain(value):
            return value
    raise UnsupportedError(f"{file.path}: {name} holds {short(value)}, which is no plain data")


def packed_plain(value: Any) -> bytes:
    """The bytes of a whole archive of plain data with small tensors."""
    small: dict[str, bytes] = {}
    content = _settled(value, small, 0)
    return packed(content, small)


def _settled(value: Any, small: dict[str, bytes], before: int) -> Any:
    """A value with references in place of its small tensors, whose storages are numbered from `before` on."""
    match value:
        case Small():
            key = str(before + len(small))
            small[key] = value.raw
            return _reference(value.dtype, value.shape, key)
        case dict():
            return type(value)((key, _settled(item, small, before)) for key, item in value.items())
        case list():
            return [_settled(item, small, before) for item in value]
    return value
