"""Plans checkpoints of torch.distributed.checkpoint, as `dcp.save` would write them.

Facts: torch 2.13.0, distributed/checkpoint/metadata.py and filesystem.py; `dcp.load` reads the result in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import OutputFile, slot_dtype
from formats.disk.safetensors import DTYPES as SIZES
from formats.disk.safetensors import Fragment, row_major
from formats.errors import UnsupportedError
from formats.layout.columns import Cut
from formats.layout.pieces import whole_part
from formats.layout.placed import Placed
from formats.layout.slots import Slot
from formats.torch_files import dcp
from formats.torch_files.archive_plan import Archive, plan_archive
from formats.torch_files.archive_writer import UNWRITTEN, Small, packed_plain
from formats.torch_files.pickle_values import DCP, DTYPES, STORAGE_OF, Dtype, Opaque, StorageRef, TensorRef, dumps

VERSION = "1.0.0"
CONTAINER = "model"
Keys = tuple[str | int, ...]
"""The path of a value in the saved dictionary: keys, and numbers of list items."""
TORCH_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


class SlotPart(NamedTuple):
    """A part of a slot that goes into a rank's file: the box `box` of the tensor `name` of shape `shape`.

    `state` is the name of an optimizer state, and `dtype` its element type; the element type of a weight follows from
    the slot.
    """

    slot: Slot
    part: Cut
    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    state: str = ""
    dtype: str = ""


class _Item(NamedTuple):
    """A stored part as an archive of its own."""

    stored: SlotPart
    dtype: str
    archive: Archive


def by_rows(parts: Iterable[SlotPart], ranks: int) -> list[list[SlotPart]]:
    """The parts of each rank: each tensor cut along its first dimension into chunks of ceil(n / ranks), as by FSDP2."""
    stored_by_rank: list[list[SlotPart]] = [[] for _ in range(ranks)]
    for stored in parts:
        for rank, box in _boxes(stored.shape, ranks):
            stored_by_rank[rank].append(stored._replace(part=Cut(box), box=box))
    return stored_by_rank


def whole_slot(slot: Slot, name: str, state: str = "", dtype: str = "") -> SlotPart:
    """A whole slot, as the tensor `name`."""
    part = whole_part(slot.shape)
    return SlotPart(slot, part, name, slot.shape, part.ranges, state, dtype)


def layout(
    root: Path,
    ranks: Sequence[Sequence[SlotPart]],
    dtypes: Mapping[tuple[str, int | None], str],
    paths: Mapping[str, Keys] | None = None,
    objects: Mapping[str, bytes | Small] | None = None,
) -> tuple[list[OutputFile], bytes]:
    """Plan the files of a checkpoint.

    Args:
        root: the folder of the checkpoint.
        ranks: the parts that go into each rank's file.
        dtypes: the element type of each logical tensor.
        paths: path of each key in the saved dictionary; None to record no paths.
        objects: pickled objects that are no tensors, and numbers, which are tensors; they are written after the first
            rank's tensors.

    Returns:
        The files, and the content of `.metadata`.
    """
    items = [
        [_item(stored, stored.dtype or slot_dtype(stored.slot, dtypes)) for stored in rank_items]
        for rank_items in ranks
    ]
    pickled = {
        name: (value, packed_plain(value) if isinstance(value, Small) else value)
        for name, value in (objects or {}).items()
    }
    tail = b"".join(content for _, content in pickled.values())
    files = [
        _file(root / f"__{rank}_0{dcp.SUFFIX}", rank_items, b"" if rank else tail)
        for rank, rank_items in enumerate(items)
        if rank_items
    ]
    return files, dumps(_metadata(items, paths, pickled))


def _item(stored: SlotPart, dtype: str) -> _Item:
    if dtype not in STORAGE_OF:
        raise UnsupportedError(f"{stored.name} is {dtype}, which is not written into files of torch.save", UNWRITTEN)
    return _Item(stored, dtype, _archive(dtype, Cut(stored.box).shape))


@lru_cache(maxsize=4096)
def _archive(dtype: str, shape: tuple[int, ...]) -> Archive:
    """The archive of one tensor. Cached: pieces of one shape have equal archives."""
    ref = TensorRef(StorageRef(dtype, "0", prod(shape)), 0, shape, row_major(shape), dtype)
    return plan_archive(ref, {"0": prod(shape) * SIZES[dtype]})


def _boxes(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """The rank and the box of each chunk of a tensor."""
    if not prod(shape) or not shape:
        yield 0, tuple((0, n) for n in shape)
        return
    step = -(-shape[0] // ranks)
    for rank, start in enumerate(range(0, shape[0], step)):
        yield rank, ((start, min(start + step, shape[0])), *((0, n) for n in shape[1:]))


def _starts(items: Iterable[_Item]) -> list[int]:
    """The byte where each item of a file begins, and after them the size of the file."""
    return list(accumulate((item.archive.size for item in items), initial=0))


def _file(path: Path, items: list[_Item], objects: bytes) -> OutputFile:
    starts, extents = _starts(items), {}
    placed: dict[str, list[Placed]] = {"": []}
    for number, (item, start) in enumerate(zip(items, starts, strict=False)):
        ((name, (offset, size)),) = item.archive.storages().items()
        slot, part = item.stored.slot, item.stored.part
        fragment = Fragment(path, start + offset, item.dtype, part.shape, row_major(part.shape))
        placed.setdefault(item.stored.state, []).append(Placed(slot.keys[0], slot, fragment, part))
        extents[f"{number} {name}"] = (start + offset, size)

    def headers(checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        for number, (item, start) in enumerate(zip(items, starts, strict=False)):
            (name,) = item.archive.storages()
            for offset, content in item.archive.headers({name: checksums[f"{number} {name}"]}):
                yield start + offset, content
        yield starts[-1], objects

    tensors = {state: tuple(every) for state, every in placed.items()}
    return OutputFile(path, starts[-1] + len(objects), tensors.pop(""), extents, headers, tensors)


# --- metadata --------------------------------------------------------------------------------------------------------


def _object(module: str, name: str, **state: Any) -> Opaque:
    return Opaque(module, name, state=state)


def _size(sizes: Iterable[int]) -> Opaque:
    return Opaque("torch", "Size", (tuple(sizes),))


def _metadata(
    items: Sequence[Sequence[_Item]],
    paths: Mapping[str, Keys] | None,
    objects: Mapping[str, tuple[bytes | Small, bytes]],
) -> Opaque:
    tensors: dict[str, Opaque] = {}
    chunks: dict[str, list[Opaque]] = {}
    stored: dict[Opaque, Opaque] = {}
    for rank, rank_items in enumerate(items):
        for item, start in zip(rank_items, _starts(rank_items), strict=False):
            name, shape, box = item.stored.name, item.stored.shape, item.stored.box
            chunk_list = chunks.setdefault(name, [])
            offsets = _size(low for low, _ in box)
            index = _object(DCP, "MetadataIndex", fqn=name, offset=offsets, index=len(chunk_list))
            stored[index] = _extent(rank, start, item.archive.size)
            chunk_list.append(_object(DCP, "ChunkStorageMetadata", offsets=offsets, sizes=_size(Cut(box).shape)))
            about = {"properties": _properties(item.dtype), "size": _size(shape), "chunks": chunk_list}
            tensors[name] = _object(DCP, "TensorStorageMetadata", **about)
    start = _starts(items[0])[-1]
    for name, (value, content) in objects.items():
        at: Opaque | None = None
        tensors[name] = _object(DCP, "BytesStorageMetadata")
        if isinstance(value, Small):
            at = _size([0] * len(value.shape))
            chunk_list = [_object(DCP, "ChunkStorageMetadata", offsets=at, sizes=_size(value.shape))]
            about = {"properties": _properties(value.dtype), "size": _size(value.shape), "chunks": chunk_list}
            tensors[name] = _object(DCP, "TensorStorageMetadata", **about)
        stored[_object(DCP, "MetadataIndex", fqn=name, offset=at, index=None)] = _extent(0, start, len(content))
        start += len(content)
    return _object(
        DCP, "Metadata", state_dict_metadata=tensors, planner_data=paths, storage_data=stored, storage_meta=None,
        version=VERSION,
    )  # fmt: skip


def _extent(rank: int, start: int, length: int) -> Opaque:
    module, name = "torch.distributed.checkpoint.filesystem", "_StorageInfo"
    return _object(module, name, relative_path=f"__{rank}_0{dcp.SUFFIX}", offset=start, length=length)


def _properties(dtype: str) -> Opaque:
    """The tensor properties: dtype, layout, requires_grad, memory format, pin_memory."""
    strided = Opaque("torch.serialization", "_get_layout", ("torch.strided",))
    contiguous = Opaque(DCP, "_MEM_FORMAT_ENCODING", (0,))
    state = (Dtype(TORCH_NAMES[dtype]), strided, False, contiguous, False)
    return Opaque(DCP, "TensorProperties", state=state)
