"""`convert plan --html`: a plan as one self-contained page, aggregated by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from converters.commands.pages.template import render, with_stars
from converters.library.records import plan_record, rank_text
from converters.plan.parts import Part
from converters.plan.plan import Job, Plan
from formats.disk.safetensors import Fragment
from formats.errors import ranges
from formats.layout.placed import Placed
from formats.layout.tensors import TENSORS

MOST_PARTS = 60_000
"""Most parts that a page lists one by one; of a plan with more, only those of the first layer of each kind."""
MOST_OF_ONE = 256
"""Most parts of one tensor that are listed."""

Where = Mapping[object, tuple[str, str]]
"""(file, offset) of a physical tensor: its key, and the rank that it is for."""


def page(plan: Plan, target: str) -> str:
    """A plan as HTML; `target` names format and topology of what is written."""
    return render("plan.html", facts(plan, target))


def facts(plan: Plan, name: str) -> dict[str, Any]:
    """The data of the page, as JSON values: the plan's record, its files, and its tensors by kind."""
    record = plan_record(plan)
    sources = _where(plan.source.tensors)
    targets = _where(placed for file in plan.target.files for placed in file.tensors) if plan.target else {}
    read, written = _Names(plan.source.root), _Names(None)
    parts_in = dict[str, int]()
    for job in plan.jobs:
        for part in job.targets:
            parts_in[written.shown(part.fragment.path)] = parts_in.get(written.shown(part.fragment.path), 0) + 1
    for file in plan.target.files if plan.target else ():
        written.number(file.path)
    brief = sum(len(job.sources) + len(job.targets) for job in plan.jobs) > MOST_PARTS
    kinds = []
    for (tensor, state, shape, dtype, edges), jobs in _by_kind(plan.jobs).items():
        shown = jobs[:1] if brief else jobs
        kinds.append({
            "tensor": f"{state}.{tensor}" if state else tensor,
            "layers": ranges(job.layer for job in jobs if job.layer is not None),
            "count": len(jobs),
            "shape": _axes(tensor, shape),
            "dtype": dtype,
            "edges": list(edges),
            "bytes": sum(job.nbytes for job in jobs),
            "keys": list(dict.fromkeys(map(with_stars, _keys(jobs[0], sources, targets)))),
            "jobs": [
                {
                    "layer": job.layer, "copies": len(job.replicas),
                    "from": _parts(job.sources, sources, read), "to": _parts(job.targets, targets, written),
                }
                for job in shown
            ],
        })  # fmt: skip
    target = record.get("target", {"files": {}, "bytes": 0, "small_files": []})
    return {
        "source": record["source"] | {"bytes": record["bytes"], "names": read.names},
        "target": {"name": name, "names": written.names, "bytes": target["bytes"], "small": target["small_files"],
                   "files": [[name, size, parts_in.get(name, 0)] for name, size in target["files"].items()]},
        "tensors": record["jobs"], "edges": record["edges"], "notes": record["notes"], "kinds": kinds,
        "brief": brief,
    }  # fmt: skip


class _Names:
    """The displayed names of files, which are referred to by number."""

    def __init__(self, root: Path | None) -> None:
        self.root, self.names, self.numbers = root, list[str](), dict[str, int]()

    def shown(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if self.root else str(path).split(".partial/out/")[-1]

    def number(self, path: Path) -> int:
        name = self.shown(path)
        if name not in self.numbers:
            self.numbers[name] = len(self.names)
            self.names.append(name)
        return self.numbers[name]


def _axes(tensor: str, shape: tuple[int, ...]) -> list[str]:
    """The lengths of a tensor's axes, named where the tensor is in the catalogue, without the layer's axis."""
    if tensor not in TENSORS:
        return [str(length) for length in shape]
    return [f"{axis} {length}" for axis, length in zip(TENSORS[tensor], shape, strict=True) if axis != "layer"]


def _by_kind(jobs: Iterable[Job]) -> dict[tuple[str, str, tuple[int, ...], str, tuple[str, ...]], list[Job]]:
    """The jobs that differ only in their layer, in the order of the plan."""
    by_kind: dict[tuple[str, str, tuple[int, ...], str, tuple[str, ...]], list[Job]] = {}
    for job in jobs:
        by_kind.setdefault((job.tensor, job.state, job.shape, job.dtype, job.edges), []).append(job)
    return by_kind


def _where(tensors: Iterable[Placed]) -> Where:
    return {
        tensor.fragment.origin: (
            tensor.key,
            rank_text(tensor.slot.mesh),
        )
        for placed in tensors
        for tensor in placed.each()
    }


def _key(fragment: Fragment, where: Where) -> tuple[str, str]:
    return where.get(fragment.origin, ("", ""))


def _keys(job: Job, *sides: Where) -> Iterator[str]:
    for parts, where in zip((job.sources, job.targets), sides, strict=True):
        for part in parts[:1]:
            yield _key(part.fragment, where)[0]


def _parts(parts: Iterable[Part], where: Where, names: _Names) -> list[list[Any]]:
    """[number of the file, key, rank, elements] of each part."""
    rows = [[names.number(part.fragment.path), *_key(part.fragment, where), part.leaf.numel] for part in parts]
    return rows if len(rows) <= MOST_OF_ONE else [*rows[:MOST_OF_ONE], [-1, f"{len(rows) - MOST_OF_ONE} more", "", 0]]
