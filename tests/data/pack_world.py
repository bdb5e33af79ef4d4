"""Token files for the tests of data packs: every token tells which data set and which document it is of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from train.data.tokens.indexed import bin_path, open_indexed, write_index
from train.data.tokens.sidecar import Facts, facts_path, facts_text, mask_path

GOLDEN = Path(__file__).parents[1] / "golden/data"
FLAGS = ("--tokens-per-iter", 64, "--warmup-iters", 2, "--cd_phase", 20, "--max_tokens_per_pack", 900)
TOTALS = {"lv": [700.4, 500, 1500.7, 900.25, 300], "en name": [300, 300, 900, 600.5, 99.5], "ķīna": [0, 0, 50, 0, 7]}
FACTS = Facts("aa", 1000, {"user": 7}, 3, None, {"documents": 1})
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


def world(folder: Path, train, totals=TOTALS, **changes) -> tuple[list[object], dict[str, Path]]:
    """Data sets, a state file and a slices json: the words of a slicing, and the prefixes of the data sets."""
    dice = np.random.default_rng(5)
    prefixes = {
        name: make(folder / "in" / name, dice.integers(0, 40, 260), seed=i, **changes) for i, name in enumerate(totals)
    }
    slices_json(folder / "slices.json", totals)
    assert train("packs", "state", folder / "in", folder / "state.0.yaml").code == 0
    argv = [*FLAGS, "--out_dir", folder / "out", "--slices_json", folder / "slices.json"]
    return ["packs", "slice", *argv, "--state_file", folder / "state.0.yaml", "-q"], prefixes


def check_cuts(out: Path, prefixes: dict[str, Path], begin: int = 0) -> None:
    """Every slice against its source, by brute force: no gap, no overlap, and the crossing document belongs to it."""
    record = json.loads((out / "packs.json").read_text())
    for name, prefix in prefixes.items():
        source = open_indexed(prefix)
        rows = zip(record["packs"], yaml.safe_load((out / f"states/{name}/tokens.yaml").read_text())[name], strict=True)
        document, requested = begin, 0
        for k, (pack, target) in enumerate(rows):
            number = k if record["packs"][0]["name"] == "warmup_0" else k + 1
            requested += target
            behind = document
            while source.sizes[begin:behind].sum() < requested:
                behind += 1
            entry = pack["slices"].get(name)
            assert (entry is None) == (behind == document)
            if entry is None:
                continue
            slice_ = open_indexed(out / pack["name"] / entry["files"])
            assert entry["documents"] == [document, behind]
            assert entry["files"].startswith(f"{name}_slice{number}_{document}_")
            assert slice_.whole
            assert np.array_equal(slice_.sizes, source.sizes[document:behind])
            tokens = [source[i] for i in range(document, behind)]
            assert np.array_equal(slice_.tokens, np.concatenate(tokens))
            document = behind
