"""What `inspect` and `plan` print, as lines for people and as records for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from converters.assets import files as assets
from converters.common.progress import size, table
from converters.plan.plan import PADDING, Plan, filled
from formats.checkpoint import MANIFEST, Checkpoint
from formats.errors import VitruvianError, some
from formats.huggingface import config as hf_config
from formats.registry import format_of

FILL = {"zeros": "zeros", "last": "copies of the last row"}
MOST_FILES = 64
"""Files of a plan that are listed."""
MOST_DRIFTED = 10
"""Lines of the table of averaged tensors."""


def inspect_record(source: Checkpoint, tensors: bool) -> dict[str, Any]:
    """Everything that `inspect` knows."""
    counted = Counter(placed.fragment.dtype for placed in source.tensors)
    weights = sum(placed.fragment.nbytes for placed in source.tensors)
    record: dict[str, Any] = {
        "path": str(source.root),
        "format": source.format,
        "topology": dict(source.topology),
        "settings": source.spec.settings(),
        "parameters": _parameters(source),
        "dtypes": dict(counted),
        "tensors": len(source.tensors),
        "files": len(source.files),
        "bytes": weights,
        "dropped": len(source.dropped),
        "assets": [name for name, _ in assets.files(source.assets)] if source.assets else [],
        "optimizer": _optimizer(source),
        "manifest": (source.home / MANIFEST).is_file(),
        "notes": _notes(source),
    }
    record |= source.details.shown
    if tensors:
        record["list"] = [
            {"key": placed.key, "dtype": placed.fragment.dtype, "shape": list(placed.fragment.shape),
             "file": str(placed.fragment.path.relative_to(source.root)), "offset": placed.fragment.offset,
             "pattern": placed.slot.rule.pattern.text, "replica": str(placed.slot.replica)}
            for placed in source.tensors
        ]  # fmt: skip
    return record


def _optimizer(source: Checkpoint) -> dict[str, Any] | None:
    """The states of a training's optimizer, or why it cannot be taken along; None without one."""
    training = format_of(source).training
    if training is None:
        return None
    try:
        if not training.is_trained(source):
            return None
        states, about = training.states(source)
    except VitruvianError as error:
        return {"states": [], "why": str(error)}
    return {"states": [*states], **about}


def _parameters(source: Checkpoint) -> int:
    """Elements of the model, padding and copies left out."""
    return sum(prod(shape) for _, _, shape in source.spec.boxes(source.padded_vocab))


def _notes(source: Checkpoint) -> list[str]:
    notes = [*source.spec.notes, *source.notes]
    if source.state:
        state = ", ".join(source.state)
        notes.append(f"only weights are carried: {state} stay behind; train on with {source.details.fresh}")
    if source.assets is None:
        notes.append("no config or tokenizer travels with it; --config BASE supplies them")
    else:
        notes += assets.checks(source.assets, source.spec)
        if left := assets.left_behind(source.assets):
            notes.append(f"{some(left, 4)} in {source.assets} stay behind: not names of model files")
    if source.spec.vocab is None:
        notes.append("its true vocabulary is unknown; --vocab-size N or --config BASE supplies it")
    return notes


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


def plan_record(plan: Plan) -> dict[str, Any]:
    """Everything that a plan says."""
    source, target = plan.source, plan.target
    notes = [*(_notes(source) if plan.again is None else ()), *plan.notes]
    if source.dropped:
        notes.append(f"what is no weight of the model stays behind: {len(source.dropped)} such as {source.dropped[0]}")
    record: dict[str, Any] = {
        "source": {
            "path": str(source.root),
            "format": source.format,
            "topology": dict(source.topology),
            "files": len(source.files),
        },
        "jobs": len(plan.jobs),
        "blocks": plan.blocks,
        "bytes": plan.nbytes,
        "edges": plan.edges,
        "masters compared": sum(1 for job in plan.jobs if job.twins),
        "notes": notes,
    }
    padding = source.padded_vocab - source.spec.vocab if source.padded_vocab and source.spec.vocab else 0
    if padding and plan.more is None:
        notes.append(f"{padding} rows of vocabulary padding in the source belong to no token and are not carried")
    record["residue"] = _residue(source)
    if target:
        record["target"] = {
            "files": {str(file.path).split(".partial/out/")[-1]: file.size for file in target.files},
            "small files": sorted([*target.texts, *target.copies]),
            "bytes": sum(file.size for file in target.files),
            "filled elements": filled(target) - _carried_padding(plan),
            "filled with": FILL[target.padding],
        }
    return record


def _carried_padding(plan: Plan) -> int:
    """How many elements of vocabulary padding come from the source."""
    return sum(part.leaf.numel for job in plan.jobs if job.state == PADDING for part in job.targets)


def _residue(source: Checkpoint) -> dict[str, list[str]]:
    """Settings that no table knows, by the file that holds them."""
    of_config = {} if source.config is None else {"config.json": hf_config.residue(source.config)}
    return {name: keys for name, keys in (of_config | dict(source.details.residue)).items() if keys}


def plan_lines(plan: Plan) -> Iterator[str]:
    """A plan for people."""
    record = plan_record(plan)
    source, target = record["source"], record["target"]
    topology = "".join(f", {name} {n}" for name, n in source["topology"].items())
    yield f"read   {source['path']}: {source['format']}{topology}, {source['files']} files"
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
