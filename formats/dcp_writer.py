"""Writing checkpoints of torch.distributed.checkpoint: what `dcp.save({"model": state_dict})` would leave.

Facts: torch 2.13.0, distributed/checkpoint/metadata.py and filesystem.py; `dcp.load` reads it in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats import dcp
from formats.checkpoint import OutputFile, slot_dtype
from formats.errors import UnsupportedError
from formats.layout import Cut, Placed, Slot
from formats.pickles import DCP, DTYPES, STORAGE_OF, Dtype, Opaque, StorageRef, TensorRef, dumps
from formats.storage import DTYPES as SIZES
from formats.storage import Fragment, row_major
from formats.torchfile import Archive, plan_archive

VERSION = "1.0.0"
CONTAINER = "model"
TORCH_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


class _Item(NamedTuple):
    """A box of a tensor that a rank's file holds, as an archive of its own."""

    slot: Slot
    dtype: str
    box: tuple[tuple[int, int], ...]
    archive: Archive


def layout(
    root: Path, wanted: Iterable[Slot], dtypes: Mapping[tuple[str, int | None], str], ranks: int
) -> tuple[list[OutputFile], bytes]:
    """Lay out the files of a checkpoint.

    Each tensor is cut along its first dimension into chunks of ceil(n / ranks), as FSDP2 does.

    Args:
        root: the folder.
        wanted: the tensors, under the keys of the model.
        dtypes: the element type of each logical tensor.
        ranks: how many files.

    Returns:
        The files, and the `.metadata` that belongs to them.
    """
    items: list[list[_Item]] = [[] for _ in range(ranks)]
    slots = list(wanted)
    for slot in slots:
        dtype = slot_dtype(slot, dtypes)
        if dtype not in STORAGE_OF:
            raise UnsupportedError(f"{slot.keys[0]} is {dtype}, for which torch.save has no storage")
        for rank, box in _boxes(slot.shape, ranks):
            shape = Cut(box).shape
            ref = TensorRef(StorageRef(dtype, "0", prod(shape)), 0, shape, row_major(shape), dtype)
            archive = plan_archive(ref, {"0": prod(shape) * SIZES[dtype]})
            items[rank].append(_Item(slot, dtype, box, archive))
    files = [_file(root / f"__{rank}_0.distcp", held) for rank, held in enumerate(items) if held]
    return files, dumps(_metadata(slots, dtypes, items))


def _boxes(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Which rank holds which box of a tensor."""
    if not prod(shape) or not shape:
        yield 0, tuple((0, n) for n in shape)
        return
    step = -(-shape[0] // ranks)
    for rank, start in enumerate(range(0, shape[0], step)):
        yield rank, ((start, min(start + step, shape[0])), *((0, n) for n in shape[1:]))


def _starts(items: Iterable[_Item]) -> list[int]:
    """Where each item of a file begins; behind them its size."""
    return list(accumulate((item.archive.size for item in items), initial=0))


def _file(path: Path, items: list[_Item]) -> OutputFile:
    starts = _starts(items)
    placed, extents = [], {}
    for number, (item, start) in enumerate(zip(items, starts, strict=False)):
        ((name, (offset, size)),) = item.archive.storages().items()
        part = Cut(item.box)
        fragment = Fragment(path, start + offset, item.dtype, part.shape, row_major(part.shape))
        placed.append(Placed(item.slot.keys[0], item.slot, fragment, part))
        extents[f"{number} {name}"] = (start + offset, size)

    def headers(checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        for number, (item, start) in enumerate(zip(items, starts, strict=False)):
            (name,) = item.archive.storages()
            for offset, content in item.archive.headers({name: checksums[f"{number} {name}"]}):
                yield start + offset, content

    return OutputFile(path, starts[-1], tuple(placed), extents, headers)


# --- metadata --------------------------------------------------------------------------------------------------------


def _object(module: str, name: str, **state: Any) -> Opaque:
    return Opaque(module, name, state=state)


def _size(sizes: Iterable[int]) -> Opaque:
    return Opaque("torch", "Size", (tuple(sizes),))


def _metadata(slots: list[Slot], dtypes: Mapping[tuple[str, int | None], str], items: list[list[_Item]]) -> Opaque:
    chunks: dict[str, list[Opaque]] = {}
    stored: dict[Opaque, Opaque] = {}
    for rank, held in enumerate(items):
        starts = _starts(held)
        for item, start in zip(held, starts, strict=False):
            name, offsets = f"{CONTAINER}.{item.slot.keys[0]}", [low for low, _ in item.box]
            here = chunks.setdefault(name, [])
            index = _object(DCP, "MetadataIndex", fqn=name, offset=_size(offsets), index=len(here))
            stored[index] = _object(
                "torch.distributed.checkpoint.filesystem",
                "_StorageInfo",
                relative_path=f"__{rank}_0{dcp.SUFFIX}",
                offset=start,
                length=item.archive.size,
            )
            here.append(_object(DCP, "ChunkStorageMetadata", offsets=_size(offsets), sizes=_size(Cut(item.box).shape)))
    tensors = {}
    for slot in slots:
        name = f"{CONTAINER}.{slot.keys[0]}"
        about = _properties(slot_dtype(slot, dtypes))
        tensors[name] = _object(
            DCP, "TensorStorageMetadata", properties=about, size=_size(slot.shape), chunks=chunks[name]
        )
    paths = {f"{CONTAINER}.{slot.keys[0]}": (CONTAINER, slot.keys[0]) for slot in slots}
    return _object(
        DCP, "Metadata", state_dict_metadata=tensors, planner_data=paths, storage_data=stored, storage_meta=None,
        version=VERSION,
    )  # fmt: skip


def _properties(dtype: str) -> Opaque:
    """dtype, layout, requires_grad, memory format, pin_memory."""
    strided = Opaque("torch.serialization", "_get_layout", ("torch.strided",))
    contiguous = Opaque(DCP, "_MEM_FORMAT_ENCODING", (0,))
    state = (Dtype(TORCH_NAMES[dtype]), strided, False, contiguous, False)
    return Opaque(DCP, "TensorProperties", state=state)
