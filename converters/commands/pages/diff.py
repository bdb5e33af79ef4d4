"""`convert diff --html`: the tensors in which two checkpoints differ, and how, as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, prod
from pathlib import Path
from typing import Any

from converters.commands.diff_text import key_of_kind, kinds, numbers
from converters.commands.pages.template import render
from converters.library.proving import Differences
from converters.prove.diff import Difference
from converters.prove.distances import DECADES, Distances

LAYER = "layer"
BARS = 64
"""Most bars of an axis: of a longer axis each bar stands for several places."""


def page(differences: Differences, one: Path, two: Path) -> str:
    """The differences of two checkpoints as HTML."""
    return render("diff.html", facts(differences, one, two))


def facts(differences: Differences, one: Path, two: Path) -> dict[str, Any]:
    """The data of the page, as JSON values."""
    return {
        "one": str(one), "two": str(two),
        "compared": differences.compared, "differing": len(differences.tensors), "settings": list(differences.settings),
        "kinds": [
            {"name": tensor, "key": key_of_kind(differences, kind), "what": what,
             "numbers": f"{len(kind)} tensor{'s' * (len(kind) > 1)}",
             "tensors": [_tensor(differences, each) for each in kind]}
            for what, tensor, kind in kinds(differences)
        ],
    }  # fmt: skip


def _tensor(differences: Differences, each: Difference) -> dict[str, Any]:
    _, layer = differences.place_of(each.name)
    text = ", ".join(filter(None, (differences.key_of(each.name), each.what, numbers([each]))))
    distances = _distances(each.distances) if each.distances and each.count else None
    return {"layer": layer or None, "text": text, "count": each.count, "distances": distances}


def _distances(distances: Distances) -> dict[str, Any]:
    used = [n for n, count in enumerate(distances.sizes) if count]
    shown = [number for number, axis in enumerate(distances.axes) if axis != LAYER]
    edges = [None, *(f"1e{decade}" for decade in DECADES), None]
    return {
        "elements": prod(distances.shape),
        "rms": _number(distances.rms),
        "sizes": [
            [edges[n], edges[n + 1], int(distances.sizes[n])] for n in range(min(used), max(used) + 1)
        ] if used else [],
        "axes": list(_axes(distances)),
        "farthest": [
            [[place[number] for number in shown], f"{left:.9g}", f"{right:.9g}", _number(distance)]
            for distance, place, left, right in distances.farthest
        ],
    }  # fmt: skip


def _axes(distances: Distances) -> Iterator[dict[str, Any]]:
    """The bars of each axis except the layer's: how many elements differ at its places, and by how much at most."""
    for name, length, counts, largest in zip(
        distances.axes, distances.shape, distances.counts, distances.largest, strict=True
    ):
        if name == LAYER:
            continue  # a tensor is of one layer
        step = -(-length // BARS)
        starts = range(0, length, step)
        yield {
            "name": name, "length": length, "step": step,
            "counts": [int(counts[start : start + step].sum()) for start in starts],
            "largest": [_number(float(largest[start : start + step].max())) for start in starts],
        }  # fmt: skip


def _number(number: float) -> float | None:
    """A number for JSON; None for NaN and infinity, which JSON lacks."""
    return number if isfinite(number) else None
