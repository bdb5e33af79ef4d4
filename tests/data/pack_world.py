"""Token files for the tests of data packs: every token tells which data set and which document it is of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from train.data.facts import Facts, facts_path, facts_text, mask_path
from train.data.indexed import bin_path, write_index

GOLDEN = Path(__file__).parents[1] / "golden/data/packs"
PHASES = ("U1", "U2", "N", "U3", "Ext")


def make(
    prefix: Path,
    sizes: Sequence[int],
    dtype: str = "<u2",
    seed: int = 0,
    marks: Sequence[int] | None = None,
    mask: bool = False,
    facts: Facts | None = None,
) -> Path:
    """Write token files with random tokens below 1000, and return their prefix."""
    dice = np.random.default_rng([seed, len(sizes)])
    total = int(np.sum(sizes, dtype=np.int64))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    dice.integers(0, 1000, total).astype(dtype).tofile(bin_path(prefix))
    documents = None if marks is None else np.array(marks, np.int64)
    write_index(bin_path(prefix).with_suffix(".idx"), np.dtype(dtype), np.array(sizes, np.int32), documents)
    if mask:
        dice.integers(0, 2, total).astype("u1").tofile(mask_path(prefix))
    if facts:
        facts_path(prefix).write_text(facts_text(facts))
    return prefix


def slices_json(path: Path, totals: Mapping[str, Sequence[float]]) -> Path:
    """A slices json: for each data set its tokens in U1, U2, N, U3 and Ext."""
    content = {phase: {"total": [row[i] for row in totals.values()]} for i, phase in enumerate(PHASES)}
    path.write_text(json.dumps({"names": list(totals), **content}))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
