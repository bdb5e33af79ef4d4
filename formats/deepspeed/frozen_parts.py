"""Whose frozen parts a model file of ZeRO-3 holds: nothing in it says the rank, and the values of the base model do.

Two files saved again under each other's names have each half of every frozen parameter in the place of the other. All
parts of a file are of one rank, so that a sample of one parameter tells. Frozen values are those of the base, rounded
to the type of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.disk.safetensors import DTYPES, Fragment, read_bytes
from formats.errors import SourceError
from formats.huggingface import folder as huggingface
from formats.layout.columns import Piece
from formats.layout.pieces import Scattered
from formats.model import adapters
from formats.torch_files.wrappers import unwrapped

SAMPLE = 4096
"""Elements of each part that are compared."""
TRIED = 8
"""Parameters that are compared, until one tells."""
ROUNDED = 2.0**-8
"""The largest relative distance of a value from what bfloat16 has for it."""
SMALLEST = 2.0**-24
"""The smallest number of float16: values below it are rounded to zero."""
READ_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def require_own(frozen: Mapping[str, Scattered], base: Path | None) -> list[str]:
    """Refuse frozen parts that are of another rank than their file's name says.

    Args:
        frozen: the frozen parameters, in parts of ranks, by the names of the training.
        base: the folder of the model that the training began with, None if it is not known.

    Returns:
        A note if nothing tells whose parts they are.

    Raises:
        SourceError: the part of a rank is that of another one in the base.
    """
    ranks = max((len(tensor.copies[0]) for tensor in frozen.values()), default=0)
    if ranks < 2:
        return []
    trust = "nothing in the model files of ZeRO-3 says whose parts of the frozen parameters they hold"
    if base is None or not huggingface.has_weights(base):
        return [f"{trust}: they are taken on trust; --config BASE, with its weights, compares them"]
    weights, largest = huggingface.read_files(base), sorted(frozen, key=lambda name: -_elements(frozen[name]))
    pairs = [(name, weights.get(adapters.base_name(unwrapped(name)))) for name in largest]
    known = [(name, own) for name, own in pairs if own is not None and _is_comparable(frozen[name], own, ranks)]
    if any(_is_told(name, frozen[name].copies[0], own) for name, own in known[:TRIED]):
        return []
    return [f"{trust}, and they are not those of {base}: they are taken on trust"]


def _elements(tensor: Scattered) -> int:
    return sum(piece.part.shape[0] for piece in tensor.copies[0] if piece.part.flat)


def _is_comparable(tensor: Scattered, own: Fragment, ranks: int) -> bool:
    """Whether each rank has a part of a parameter, which the base has in the same shape, both as plain floats."""
    plain = own.row_major and not (own.stream or own.scales or own.product or own.pieces or own.coded or own.chunk)
    known = {own.dtype, tensor.dtype} <= READ_AS.keys()
    return plain and known and own.shape == tensor.shape and len(tensor.copies[0]) == ranks


def _is_told(name: str, parts: Any, own: Fragment) -> bool:
    """Whether the parts of a parameter differ, and are those of the base in their order.

    Raises:
        SourceError: they are those of the base in another order.
    """
    samples = [_values(piece.fragment, 0, _count(piece)) for piece in parts]
    there = [_values(own, piece.part.ranges[0][0], _count(piece)) for piece in parts]
    wrong = [number for number, sample in enumerate(samples) if not _are_same(sample, there[number])]
    for number in wrong:
        path = parts[number].fragment.path
        for other, of_base in enumerate(there):
            if other != number and _are_same(samples[number], of_base):
                raise SourceError(
                    f"{path} holds the part of {name} that {parts[other].fragment.path.name} should hold: its values "
                    f"are those of {own.path} there",
                    "two files have each other's names: copy the files of all ranks again, each under its own",
                )
    return not wrong and len({sample.tobytes() for sample in samples}) == len(samples)


def _count(piece: Piece) -> int:
    low, high = piece.part.ranges[0]
    return min(SAMPLE, high - low)


def _values(fragment: Fragment, start: int, count: int) -> Any:
    """Elements of a row-major fragment, as float32."""
    import numpy as np

    size = DTYPES[fragment.dtype]
    words = np.frombuffer(
        read_bytes(fragment.path, fragment.offset + start * size, count * size), READ_AS[fragment.dtype]
    )
    return (words.astype("<u4") << 16).view("<f4") if fragment.dtype == "BF16" else words.astype("<f4")


def _are_same(values: Any, of_base: Any) -> bool:
    """Whether values are those of the base, or what they are rounded to."""
    import numpy as np

    count = min(len(values), len(of_base))
    near = np.abs(values[:count] - of_base[:count]) <= ROUNDED * np.abs(of_base[:count]) + SMALLEST
    return bool(near.all())
