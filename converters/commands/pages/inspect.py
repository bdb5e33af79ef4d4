"""`convert inspect --html`: a checkpoint as one self-contained page: settings, tensors by kind, files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.commands.inspect_text import inspect_rows
from converters.commands.pages.template import render, with_stars

MOST_PLACES = 40_000
"""Most tensors that a page lists one by one; of a checkpoint with more, only the first of each kind."""
MOST_OF_KIND = 64


def page(record: Mapping[str, Any]) -> str:
    """A checkpoint as HTML, from its record with the list of its tensors."""
    return render("inspect.html", facts(record))


def facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the page, as JSON values."""
    entries = record.get("list", [])
    files: dict[str, list[int]] = {}
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        totals = files.setdefault(entry["file"], [0, 0])
        totals[0] += entry["bytes"]
        totals[1] += 1
        kinds.setdefault((with_stars(entry["key"]), entry["dtype"]), []).append(entry)
    numbers = {name: number for number, name in enumerate(files)}
    brief = len(entries) > MOST_PLACES
    return {
        "path": record["path"], "parameters": record.get("parameters"), "tensors": record["tensors"],
        "bytes": record["bytes"], "count": record["files"],
        "rows": [[name, str(value)] for name, value in inspect_rows(record)],
        "notes": record["notes"], "files": [[name, *totals] for name, totals in files.items()], "brief": brief,
        "kinds": [
            {"key": key, "dtype": dtype, "shapes": " ".join(dict.fromkeys(str(tensor["shape"]) for tensor in kind)),
             "holds": " ".join(dict.fromkeys(tensor["pattern"] for tensor in kind)), "count": len(kind),
             "bytes": sum(tensor["bytes"] for tensor in kind),
             "places": [
                 [tensor["key"], numbers[tensor["file"]], tensor["rank"], str(tensor["shape"]), tensor["replica"]]
                 for tensor in (kind[:MOST_OF_KIND] if brief else kind)
             ]}
            for (key, dtype), kind in kinds.items()
        ],
    }  # fmt: skip
