"""What `inspect` and `plan` print, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from converters.common.progress import size, table
from converters.library.records import inspect_record, plan_record
from converters.plan.plan import Plan
from formats.checkpoint import Checkpoint
from formats.errors import some

MOST_FILES = 64
"""Files of a plan that are listed."""
MOST_DRIFTED = 10
"""Lines of the table of averaged tensors."""


def inspect_lines(source: Checkpoint, tensors: bool) -> Iterator[str]:
    """`inspect` for people."""
    record = inspect_record(source, tensors)
    yield f"{record['path']}"
    yield table(
        (
            (
                "format",
                (source.details.kind or source.format)
                + "".join(f", {name} {n}" for name, n in source.topology.items())
                + (f", {record['folder']}" if "folder" in record else ""),
            ),
            ("parameters", f"{record['parameters']:,}"),
            (
                "weights",
                f"{size(record['bytes'])} in {record['files']} files, {record['tensors']} tensors, "
                + ", ".join(f"{n} {d}" for d, n in record["dtypes"].items()),
            ),
            *((name, value) for name, value in record["settings"].items()),
            *([("padded vocab", record["padded_vocab"])] if "padded_vocab" in record else []),
            *([("optimizer", _optimizer_line(record["optimizer"]))] if record["optimizer"] else []),
            ("travels along", ", ".join(record["assets"]) or "nothing"),
        )
    )
    for note in record["notes"]:
        yield f"note: {note}"
    for entry in record.get("list", ()):
        yield f"{entry['file']}  {entry['key']}  {entry['dtype']}{entry['shape']}  {entry['pattern']}"


def _optimizer_line(about: Mapping[str, Any]) -> str:
    if not about["states"]:
        return f"cannot be taken along: {about['why']}"
    if "step" in about:
        return f"{', '.join(about['states'])}, step {about['step']}; `convert hf2fsdp --with-optimizer` takes it along"
    kind = "distributed optimizer" if about["distributed"] else "plain"
    return f"{', '.join(about['states'])} ({kind}); `convert reshard --with-optimizer` takes it along"


def plan_lines(plan: Plan) -> Iterator[str]:
    """A plan for people."""
    record = plan_record(plan)
    source, target = record["source"], record["target"]
    topology = "".join(f", {name} {n}" for name, n in source["topology"].items())
    yield f"read   {source['path']}: {source['format']}{topology}, {source['files']} files"
    for one in record.get("sources", ()):
        about = ", ".join(f"{name} {one[name]}" for name in one if name not in ("path", "name", "topology"))
        yield f"of     {one['path']}: {about}"
    yield f"move   {record['jobs']} tensors, {size(record['bytes'])} in {record['blocks']} blocks"
    yield "prove  every element has one source and one place"
    for edge, count in record["edges"].items():
        yield f"change {edge} in {count} tensors"
    if record["masters compared"]:
        yield f"check  {record['masters compared']} float32 masters against what the model computes with"
    if target["filled elements"]:
        yield f"fill   {target['filled elements']} elements of vocabulary padding with {target['filled with']}"
    if not record["edges"]:
        yield "change nothing: all bits are kept"
    yield f"write  {len(target['files'])} files, {size(target['bytes'])}"
    yield table((name, size(nbytes)) for name, nbytes in list(target["files"].items())[:MOST_FILES])
    if len(target["files"]) > MOST_FILES:
        yield f"  … and {len(target['files']) - MOST_FILES} more"
    yield f"       and {some(target['small files'], MOST_FILES)}"
    for name, keys in record["residue"].items():
        names = some(keys, 12)
        kept = "kept as they are" if name == "config.json" else "kept by reshard, a config cannot hold them"
        yield f"keep   settings of {name} that are in no table ({kept}): {names}"
    for note in record["notes"]:
        yield f"note   {note}"


def drift_lines(drifted: Mapping[str, float]) -> Iterator[str]:
    """The tensors whose copies were averaged, the farthest apart first."""
    if drifted:
        yield f"note: the copies of {len(drifted)} tensors differed, their mean in float32 was taken; farthest apart:"
        farthest = sorted(drifted.items(), key=lambda pair: -pair[1])[:MOST_DRIFTED]
        yield table((name, f"{distance:g}") for name, distance in farthest)


def block_lines(plan: Plan) -> Iterator[str]:
    """Each block of a plan: a leaf of one side, as box and strides."""
    for job in plan.jobs:
        yield f"{job.name} {job.source_dtype}{list(job.shape)}"
        for side, parts in (("from", job.sources), ("to", job.targets)):
            for part in parts:
                box = " ".join(f"{span.axis}[{span.start}:{span.stop}]*{span.stride}" for span in part.leaf.spans)
                yield f"  {side:<4} {part.fragment.path} +{part.fragment.offset} [{part.leaf.base}] {box}"
