"""Statistics of the lengths of documents, read from the index only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converters.common.atomic import named
from train.data.tokens.indexed import Indexed, chunks

MOST = 1 << 20
"""Number of tokens at which lengths are capped, in quantiles and bars only."""
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Counts:
    """Statistics of the lengths of documents.

    Attributes:
        documents: number of documents.
        tokens: number of tokens of all documents.
        shortest: number of tokens of the shortest document.
        longest: number of tokens of the longest document.
        quantiles: number of tokens by share of documents.
        bars: (from, to, documents) in powers of two; the last bar, from 2^20 on, has all longer documents.
        over: number of documents longer than a limit, and their tokens.
    """

    documents: int
    tokens: int
    shortest: int
    longest: int
    quantiles: dict[str, int]
    bars: list[tuple[int, int, int]]
    over: tuple[int, int]


def count(indexed: Indexed, limit: int | None = None) -> Counts:
    """Count the tokens of documents.

    Args:
        indexed: the token file; its `.bin` is not read.
        limit: number of tokens of the longest document that fits a row; None for no limit.
    """
    histogram = np.zeros(MOST + 1, np.int64)
    tokens, longest, over, over_tokens = 0, 0, 0, 0
    for _, sizes in chunks(indexed.sizes):
        most = int(sizes.max())
        longest = max(longest, most)
        tokens += int(sizes.sum(dtype=np.int64))
        counted = np.bincount(np.minimum(sizes, MOST) if most > MOST else sizes)
        histogram[: len(counted)] += counted
        if limit is not None and most > limit:
            long = sizes[sizes > limit]
            over, over_tokens = over + len(long), over_tokens + int(long.sum(dtype=np.int64))
    number = len(indexed)
    lengths = np.flatnonzero(histogram)
    below = np.cumsum(histogram)
    quantiles = {f"{share:g}": int(np.searchsorted(below, max(1, np.ceil(share * number)))) for share in SHARES}
    bars = list(_bars(below, longest))
    return Counts(
        number,
        tokens,
        int(lengths[0]) if number else 0,
        longest,
        quantiles if number else {},
        bars,
        (over, over_tokens),
    )


def _bars(below: NDArray[Any], longest: int) -> Iterator[tuple[int, int, int]]:
    low = 0
    while low <= MOST:
        high = max(1, 2 * low)
        many = int(below[min(high - 1, MOST)]) - (int(below[low - 1]) if low else 0)
        if many:
            yield low, high - 1 if low < MOST else longest, many
        low = high


def write_counts(indexed: Indexed, out: Path) -> None:
    """Write the length of each document, one number per line, in order; the file is complete or absent."""
    if out.is_symlink() or (out.exists() and not out.is_file()):  # /dev/stdout must not be replaced
        _write(indexed, out)
        return
    staged = out.with_name(out.name + ".tmp")
    try:
        _write(indexed, staged)
        staged.rename(out)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _write(indexed: Indexed, path: Path) -> None:
    with named(path), path.open("w") as file:
        for _, sizes in chunks(indexed.sizes):
            file.write("\n".join(map(str, sizes.tolist())) + "\n")
        file.flush()
        if path.is_file():
            os.fsync(file.fileno())
