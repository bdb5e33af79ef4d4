"""Rows that are computed by several ranks: each has a part of the tokens, and needs keys of the documents it is in."""

from __future__ import annotations

import numpy as np

from train.data.rows import IGNORED, Flat, Keys
from train.distributed import World


def own(flat: Flat, world: World) -> Flat:
    """The part of flattened rows that a rank computes: all of them without context parallelism."""
    return cut(flat, world.part, world.context) if world.context > 1 else flat


def cut(flat: Flat, part: int, parts: int) -> Flat:
    """One of equal parts of flattened rows, consecutive tokens; padding at the end is a document of its own.

    Args:
        flat: the rows.
        part: its number.
        parts: how many there are.
    """
    count = len(flat.input_ids)
    size = -(-count // parts)
    low, stop, more = part * size, (part + 1) * size, size * parts - count
    ends = np.array([*flat.cu_seqlens, count + more] if more else flat.cu_seqlens)
    inside = ends[(ends > low) & (ends < stop)]
    begin = int(ends[ends <= low].max())
    labels = np.concatenate([flat.labels, np.full(more, IGNORED)])[low:stop]
    bounds, of_keys = (np.array([first, *inside, stop], np.int32) - first for first in (low, begin))
    return Flat(
        np.concatenate([flat.input_ids, np.zeros(more, np.int64)])[low:stop],
        labels,
        np.concatenate([flat.position_ids, np.arange(more)])[low:stop],
        bounds,
        int(np.diff(bounds).max()) if flat.longest else 0,
        int((labels != IGNORED).sum()),
        padding=min(size, max(0, stop - count)),
        keys=Keys(begin, stop, of_keys, int(np.diff(of_keys).max())),
    )
