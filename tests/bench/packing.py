"""Packing, counting and their peers, in turns: python -m tests.bench.packing ROUNDS; prints JSON.

Peers: TRL's best-fit decreasing, by its own segment tree (the loop alone, and its packer as shipped, on tokens of one
byte); `k_bin` and `overflow` of GPT-NeoX as written here.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from train.data.look.counts import count
from train.data.packing.k_bin import k_bin
from train.data.packing.packing import best_fit, next_fit
from train.data.tokens.indexed import open_indexed, write_index

CAPACITY = 8192
DOCUMENTS = 200_000
MANY = 1_000_000
COUNTED = 20_000_000


def lengths(kind: str, number: int) -> np.ndarray:
    random = np.random.default_rng(7)
    if kind == "chat":
        sizes = random.lognormal(5.7, 0.9, number)
    elif kind == "translation":
        sizes = random.lognormal(4.1, 0.6, number)
    else:
        sizes = np.where(random.random(number) < 0.5, random.normal(1700, 500, number), random.normal(250, 80, number))
    return np.clip(sizes, 4, CAPACITY).astype(np.int32)


def trl_loop(sizes: np.ndarray) -> int:
    """Rows of TRL's algorithm: its tree of free spaces, asked once for each document."""
    from trl.data_utils import _SegmentTree

    tree, spaces, rows = _SegmentTree(CAPACITY), defaultdict(deque), []
    tree.add(CAPACITY)
    order = np.argsort(-sizes, kind="stable")
    for length, document in zip(sizes[order], order, strict=True):
        space = tree.search(length)
        if space < CAPACITY:
            row = spaces[space].popleft()
        else:
            row = {"ids": [], "length": 0}
            rows.append(row)
        row["ids"].append(document)
        row["length"] += length
        if space < CAPACITY and not spaces[space]:
            tree.remove(space)
        left = space - length
        spaces[left].append(row)
        if left > 0:
            tree.add(left)
    return len(rows)


def trl_shipped(sizes: np.ndarray) -> int:
    import pyarrow
    from trl.data_utils import _pack_bfd

    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tokens = pyarrow.LargeListArray.from_arrays(ends, pyarrow.array(np.zeros(ends[-1], np.int8)))
    return len(_pack_bfd(pyarrow.table({"input_ids": tokens}), CAPACITY))


def main() -> None:
    rounds = int(sys.argv[1])
    packers: dict[str, Callable[[np.ndarray], int]] = {
        "ours": lambda sizes: len(best_fit(sizes, CAPACITY, 1).offsets) - 1,
        "k_bin": lambda sizes: len(k_bin(sizes, CAPACITY, 1).offsets) - 1,
        "overflow": lambda sizes: len(next_fit(sizes, CAPACITY, 1).offsets) - 1,
    }
    if find_spec("trl"):
        packers |= {"TRL, loop": trl_loop, "TRL, shipped": trl_shipped}
    result: dict[str, dict[str, dict[str, list[float]]]] = {}
    for kind in ("chat", "translation", "bimodal"):
        sizes = lengths(kind, DOCUMENTS)
        result[kind] = {name: {"cpu": [], "fill": []} for name in packers}
        for number in range(rounds + 1):
            for name, pack in packers.items():
                began = time.process_time()
                rows = pack(sizes)
                if number:
                    result[kind][name]["cpu"].append(time.process_time() - began)
                    result[kind][name]["fill"].append(float(sizes.sum()) / (rows * CAPACITY))
    many = lengths("chat", MANY)
    result["million"] = {"ours": {"cpu": [], "fill": []}}
    for number in range(rounds + 1):
        began = time.process_time()
        rows = packers["ours"](many)
        if number:
            result["million"]["ours"]["cpu"].append(time.process_time() - began)
            result["million"]["ours"]["fill"].append(float(many.sum()) / (rows * CAPACITY))
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "P"
        write_index(prefix.with_suffix(".idx"), np.dtype("<u2"), lengths("chat", COUNTED))
        walls = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            count(open_indexed(prefix, tokens=False), CAPACITY)
            walls.append(time.perf_counter() - began)
        result["count"] = {"ours": {"cpu": walls[1:], "fill": []}}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
