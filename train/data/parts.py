"""Divides rows over ranks: each rank has a part of the tokens, and needs the keys of the documents of its part."""

from __future__ import annotations

import numpy as np

from train.data.rows import IGNORED, Flat, Keys
from train.distributed import World

MULTIPLE = 128
"""Sizes of rows for compiled layers are multiples of this: kernels differ for sizes with and without a remainder."""


def rank_part(flat: Flat, world: World, compiled: bool = False) -> Flat:
    """This rank's part of flattened rows, which is all of them without context parallelism."""
    multiple = MULTIPLE if compiled else 1
    if world.context > 1:
        return cut(flat, world.part, world.context, multiple)
    return padded(flat, -(-len(flat.input_ids) // multiple) * multiple)


def padded(flat: Flat, size: int) -> Flat:
    """Flattened rows, padded to `size` tokens; the padding at the end is a document of its own."""
    padding = size - len(flat.input_ids)
    if not padding:
        return flat
    return flat._replace(
        input_ids=np.concatenate([flat.input_ids, np.zeros(padding, np.int64)]),
        labels=np.concatenate([flat.labels, np.full(padding, IGNORED)]),
        position_ids=np.concatenate([flat.position_ids, np.arange(padding)]),
        cu_seqlens=np.append(flat.cu_seqlens, np.int32(size)),
        longest=max(flat.longest, padding),
        padding=size - flat.tokens,
    )


def cut(flat: Flat, part: int, parts: int, multiple: int = 1) -> Flat:
    """One of equal parts of flattened rows, consecutive tokens.

    Args:
        flat: the rows.
        part: number of the part.
        parts: number of parts.
        multiple: the size of a part is a multiple of this number.
    """
    count = flat.tokens
    size = -(-len(flat.input_ids) // (parts * multiple)) * multiple
    flat, low, stop = padded(flat, size * parts), part * size, (part + 1) * size
    inside = flat.cu_seqlens[(flat.cu_seqlens > low) & (flat.cu_seqlens < stop)]
    begin = int(flat.cu_seqlens[flat.cu_seqlens <= low].max())
    labels = flat.labels[low:stop]
    bounds, of_keys = (np.array([first, *inside, stop], np.int32) - first for first in (low, begin))
    return Flat(
        flat.input_ids[low:stop],
        labels,
        flat.position_ids[low:stop],
        bounds,
        int(np.diff(bounds).max()) if flat.longest else 0,
        int((labels != IGNORED).sum()),
        padding=min(size, max(0, stop - count)),
        keys=Keys(begin, stop, of_keys, int(np.diff(of_keys).max())),
    )
