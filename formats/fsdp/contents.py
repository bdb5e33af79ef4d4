"""What the files of an FSDP checkpoint hold, before a config says which model it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.safetensors import DTYPES
from formats.fsdp import FSDP
from formats.layout.pieces import Scattered
from formats.torch_files.archive import TorchFile


class Listing(NamedTuple):
    """What a checkpoint holds: the path of each tensor in the saved dictionary, and how their bytes are found.

    It is `unbounded` where the files do not tell how many there were: a shape is then as far as the pieces reach.
    """

    paths: Sequence[tuple[str, ...]]
    load: Callable[[Sequence[int]], Iterable[Scattered]]
    files: tuple[Path, ...]
    flat: Mapping[int, TorchFile] | None = None
    unbounded: bool = False


def contents(path: Path, listing: Listing) -> dict[str, Any]:
    """What `inspect` can say without a config: all tensors of the files, states of an optimizer among them."""
    tensors = list(listing.load(range(len(listing.paths))))
    ranks = {path for tensor in tensors for path in tensor.files}
    containers = Counter(names[0] if len(names) > 1 else "" for names in listing.paths)
    return {
        "path": str(path),
        "format": FSDP.name,
        "topology": {"ranks": len(ranks)},
        "containers": dict(containers),
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors)),
        "tensors": len(tensors),
        "files": len(listing.files),
        "bytes": sum(prod(tensor.shape) * DTYPES[tensor.dtype] for tensor in tensors),
    }
