"""The text that `inspect`, `plan` and `formats` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

from converters.common.progress import size, table
from formats.errors import some
from formats.model.settings import shown
from formats.optimizer import MOMENTUM

if TYPE_CHECKING:
    from converters.plan.plan import Plan

MOST_FILES = 64
"""Most files of a plan that are listed."""
HEADS = {
    "huggingface": "HF",
    "fsdp": "DCP",
    "zero": "DS",
    "megatron": "Meg.",
    "megatron_dist": "dist",
    "megatron_fsdp": "mFS",
    "neox": "Neo",
    "megatron_deepspeed": "MDS",
    "mistral": "Mis",
    "nanotron": "NT",
    "maxtext": "MT",
    "megatron-llm": "LLM",
}
"""Format: the head of its column, where that is shorter than the name."""
MOST_DRIFTED = 10
"""Most lines of the table of averaged tensors."""


def inspect_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `inspect`. Without a config, settings are absent, and tensors of all containers are counted."""
    yield f"{record['path']}"
    yield table(inspect_rows(record))
    for note in record["notes"]:
        yield f"note: {note}"
    for entry in record.get("list", ()):
        yield f"{entry['file']}  {entry['key']}  {entry['dtype']}{entry['shape']}  {entry['pattern']}"


def inspect_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts of a checkpoint as (name, value) pairs."""
    kind = (record.get("kind") or record["format"]) + "".join(f", {name} {n}" for name, n in record["topology"].items())
    dtypes = ", ".join(f"{n} {d}" for d, n in record["dtypes"].items())
    return [
        ("format", kind + (f", {record['folder']}" if "folder" in record else "")),
        *([("parameters", f"{record['parameters']:,}")] if "parameters" in record else []),
        ("weights" if "parameters" in record else "all tensors",
         f"{size(record['bytes'])} in {record['files']} files, {record['tensors']} tensors, {dtypes}"),
        *([("containers", ", ".join(f"{name or 'top level'} {n}" for name, n in record["containers"].items()))]
          if "containers" in record else []),
        *((name, shown(value)) for name, value in record.get("settings", {}).items()),
        *([("padded vocab", record["padded_vocab"])] if "padded_vocab" in record else []),
        *([("optimizer", _optimizer_line(record["optimizer"]))] if record.get("optimizer") else []),
        *([("other files", ", ".join(record["assets"]) or "nothing")] if "assets" in record else []),
    ]  # fmt: skip


def _optimizer_line(about: Mapping[str, Any]) -> str:
    if not about["states"]:
        return f"cannot be converted: {about['why']}"
    if "left" in about:
        return f"{', '.join(about['states'])} of {about['optimizer']!r}; {', '.join(about['left'])} are not converted"
    if "step" in about:
        step = "" if about["step"] is None else f", step {about['step']}"
        return f"{', '.join(about['states'])}{step}; `convert hf2fsdp --with-optimizer` converts it too"
    kind = "distributed optimizer" if about["distributed"] else "plain"
    kind += ", Muon beside Adam" if MOMENTUM in about["states"] else ""
    return f"{', '.join(about['states'])} ({kind}); `convert reshard --with-optimizer` converts it too"


def plan_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `plan`, from the record of a plan (`plan_record`)."""
    source, target = record["source"], record["target"]
    topology = "".join(f", {name} {n}" for name, n in source["topology"].items())
    yield f"read   {source['path']}: {source['format']}{topology}, {source['files']} files"
    for entry in record.get("sources", ()):
        about = ", ".join(f"{name} {entry[name]}" for name in entry if name not in ("path", "name", "topology"))
        yield f"of     {entry['path']}: {about}"
    yield f"move   {record['jobs']} tensors, {size(record['bytes'])} in {record['blocks']} blocks"
    yield "prove  every element has one source and one place"
    for edge, count in record["edges"].items():
        yield f"change {edge} in {count} tensors"
    if record["masters_compared"]:
        yield f"check  {record['masters_compared']} FP32 master weights against what the model computes with"
    if target["filled_elements"]:
        yield f"fill   {target['filled_elements']} elements of vocabulary padding with {target['filled_with']}"
    if not record["edges"]:
        yield "change nothing: all bits are kept"
    yield f"write  {len(target['files'])} files, {size(target['bytes'])}"
    yield table((name, size(nbytes)) for name, nbytes in list(target["files"].items())[:MOST_FILES])
    if len(target["files"]) > MOST_FILES:
        yield f"  … and {len(target['files']) - MOST_FILES} more"
    yield f"       and {some(target['small_files'], MOST_FILES)}"
    yield f"room   {size(target['needs']['bytes'])} in {target['needs']['files']} files and folders"
    for name, keys in record["residue"].items():
        names = some(keys, 12)
        kept = "kept as they are" if name == "config.json" else "kept by reshard, a config cannot hold them"
        yield f"keep   settings of {name} that are in no table ({kept}): {names}"
    for note in record["notes"]:
        yield f"note   {note}"


def formats_lines(about: Mapping[str, str]) -> Iterator[str]:
    """The lines of `formats`, in 80 columns: formats, which of them hold each family, and why Megatron does not."""
    from converters.commands.explain import HOLDERS, held_by
    from formats.families import FAMILIES

    yield "formats (each is read and written, but where it says otherwise)"
    width = max(map(len, about)) + 1
    for name, text in about.items():
        indent = " " * (width + 2)
        yield fill(text, 80, break_on_hyphens=False, initial_indent=f"  {name:<{width}}", subsequent_indent=indent)
    yield ""
    yield "families, and the formats that hold at least some of their models"
    reasons: dict[str, int] = {}
    rows: list[tuple[str, ...]] = [("family", *(HEADS.get(name, name) for name in HOLDERS))]
    for family in FAMILIES.values():
        number = reasons.setdefault(family.only_here, len(reasons) + 1) if family.only_here else 0
        formats = held_by(family)
        none = f"- ({number})" if number else "-"
        marks = ("yes" if name in formats else none if name == "megatron" else "-" for name in HOLDERS)
        rows.append((family.name, *marks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield f"  {' '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()}"
    yield ""
    for reason, number in reasons.items():
        yield fill(f"not in Megatron: {reason}", 80, initial_indent=f"  ({number}) ", subsequent_indent=" " * 6)


def drift_lines(drifted: Mapping[str, float]) -> Iterator[str]:
    """The lines on tensors whose copies were averaged, those farthest apart first."""
    if drifted:
        yield f"note: the copies of {len(drifted)} tensors differed, their mean in float32 was taken; farthest apart:"
        farthest = sorted(drifted.items(), key=lambda pair: -pair[1])[:MOST_DRIFTED]
        yield table((name, f"{distance:g}") for name, distance in farthest)


def block_lines(plan: Plan) -> Iterator[str]:
    """The lines of each block of a plan: a leaf of a source or a target, as box and strides."""
    for job in plan.jobs:
        yield f"{job.name} {job.source_dtype}{list(job.shape)}"
        for side, parts in (("from", job.sources), ("to", job.targets)):
            for part in parts:
                box = " ".join(f"{span.axis}[{span.start}:{span.stop}]*{span.stride}" for span in part.leaf.spans)
                yield f"  {side:<4} {part.fragment.path} +{part.fragment.offset} [{part.leaf.base}] {box}"
