"""A file of torch that was saved again under the name of another rank or parameter: both hold the same elements.

Of a universal checkpoint the files are those of one optimizer state of the trained matrices. Of ZeRO the parts are
those of the optimizer states, or in stage 3 of the frozen parameters in the model files; of nanotron the states of the
parameters that are cut over the ranks.

torch.save keeps a CRC-32 of each storage, so the files are compared without reading them. What is alike on two ranks by
itself has one value throughout: a group that begins at zeros or ones, or has no elements on a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from formats.disk.handle import opened, pread
from formats.disk.safetensors import DTYPES, Fragment
from formats.errors import SourceError

CHUNK = 1 << 20


def require_own(partitions: Iterable[tuple[Path, Sequence[Fragment]]]) -> None:
    """No two ranks or parameters hold the same elements.

    Args:
        partitions: the file of each rank or parameter, and its part of each flat group, of each state; or of each
            frozen or cut parameter.

    Raises:
        SourceError: two do, and not one value throughout.
    """
    first: dict[tuple[tuple[int, int], ...], Path] = {}
    for path, flats in partitions:
        sums = tuple((flat.member.size, flat.member.crc) for flat in flats if flat.member and flat.nbytes)
        other = first.setdefault(sums, path)
        if sums and all(crc for _, crc in sums) and other is not path and not all(map(_is_constant, flats)):
            raise SourceError(
                f"{path} and {other} hold the same elements: one is a copy of the other",
                "copy the files again, each under its own name",
            )


def _is_constant(flat: Fragment) -> bool:
    """Whether all elements on disk are the same; what differs is mostly seen in the first bytes."""
    step = DTYPES[flat.dtype]
    with opened(flat.path) as handle:
        value = pread(handle, step, flat.offset)
        sizes = (min(CHUNK, flat.nbytes - start) for start in range(0, flat.nbytes, CHUNK))
        chunks = (pread(handle, size, flat.offset + at * CHUNK) for at, size in enumerate(sizes))
        return all(chunk == value * (len(chunk) // step) for chunk in chunks)
