"""Files of torch.save that are to be written: slots become storages, one for each, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import OutputFile
from formats.errors import UnsupportedError
from formats.layout import Placed, Slot
from formats.pickles import STORAGE_OF, StorageRef, TensorRef
from formats.storage import DTYPES, Fragment, row_major
from formats.torchfile import STREAM, plan_archive

Held = tuple[str, Slot | None, tuple[int, ...], str]
"""Key, slot (None for a tensor of zeros), shape and element type of a tensor."""


def archived(
    path: Path, held: Sequence[Held], value: Callable[[Mapping[str, TensorRef]], Any], folder: str = STREAM
) -> OutputFile:
    """Lay out one file.

    Args:
        path: where it is written.
        held: its tensors.
        value: the object to pickle, given the reference of each tensor by key.
        folder: what the folder in the archive is called.

    Raises:
        UnsupportedError: torch.save has no storage of an element type.
    """
    refs: dict[str, TensorRef] = {}
    storages: dict[str, int] = {}
    for key, _, shape, dtype in held:
        if dtype not in STORAGE_OF:
            raise UnsupportedError(
                f"{key} would be {dtype}, for which torch.save has no storage", "cast it with --dtype"
            )
        storage = StorageRef(dtype, str(len(storages)), prod(shape))
        refs[key] = TensorRef(storage, 0, shape, row_major(shape), dtype)
        storages[storage.key] = prod(shape) * DTYPES[dtype]
    archive = plan_archive(value(refs), storages, folder)
    extents = archive.storages()
    placed = tuple(
        Placed(
            key,
            slot,
            Fragment(path, extents[f"{folder}/data/{refs[key].storage.key}"][0], dtype, shape, row_major(shape)),
        )
        for key, slot, shape, dtype in held
        if slot is not None
    )
    return OutputFile(path, archive.size, placed, extents, archive.headers)
