"""Checkpoints and plans as JSON records for programs; the commands make text for people from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from converters.assets import files as assets
from converters.assets.left_behind import left_behind
from formats.checkpoint import MANIFEST, Checkpoint
from formats.errors import VitruvianError, some
from formats.huggingface import config as hf_config
from formats.huggingface import language_model
from formats.layout.placed import named_as_copies
from formats.registry import format_of

if TYPE_CHECKING:
    from converters.plan.plan import Plan

FILL = {"zeros": "zeros", "last": "copies of the last row"}


def inspect_record(source: Checkpoint, tensors: bool) -> dict[str, Any]:
    """The record of a checkpoint, as `convert inspect --json` prints it; with a list of `tensors` if asked for."""
    counted = Counter[str]()
    for placed in source.tensors:
        counted[placed.fragment.dtype] += placed.fragments
    weights = sum(placed.fragment.nbytes for placed in source.tensors)
    record: dict[str, Any] = {
        "path": str(source.root),
        "format": source.format,
        **({"kind": source.details.kind} if source.details.kind else {}),
        "topology": dict(source.topology),
        "settings": source.spec.settings(),
        "parameters": _parameters(source),
        "dtypes": dict(counted),
        "tensors": counted.total(),
        "files": len(source.files),
        "bytes": weights,
        "dropped": len(source.dropped),
        "assets": [*assets.carried_assets(source)],
        "optimizer": _optimizer(source),
        "manifest": (source.home / MANIFEST).is_file(),
        "notes": _notes(source),
    }
    record |= source.details.shown
    if tensors:
        record["list"] = [
            {"key": placed.key, "dtype": placed.fragment.dtype, "shape": list(placed.fragment.shape),
             "bytes": placed.fragment.nbytes, "rank": rank_text(placed.slot.mesh),
             "file": str(placed.fragment.path.relative_to(source.root)), "offset": placed.fragment.offset,
             "pattern": placed.slot.rule.pattern.text, "replica": str(placed.slot.replica)}
            for placed in source.fragments()
        ]  # fmt: skip
    return record


def rank_text(mesh: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """The rank that a tensor is for: `tp 1 of 2`; empty where no mesh is split."""
    return " ".join(f"{axis} {rank} of {ranks}" for axis, (rank, ranks) in mesh if ranks > 1)


def _optimizer(source: Checkpoint) -> dict[str, Any] | None:
    """The optimizer states of a checkpoint, or why they cannot be converted; None without an optimizer."""
    training = format_of(source).training
    if training is None:
        return None
    try:
        if not training.is_trained(source):
            return None
        from converters.plan.names import as_trained

        states, about = training.states(as_trained(source))
    except VitruvianError as error:
        return {"states": [], "why": str(error)}
    return {"states": [*states], **about}


def _parameters(source: Checkpoint) -> int:
    """How many parameters the model has, without padding and copies."""
    return sum(prod(shape) for _, _, shape in source.spec.boxes(source.padded_vocab))


def _notes(source: Checkpoint) -> list[str]:
    notes = [*source.spec.notes, *source.notes]
    notes += [
        f"{name} is in the files as {key}, which the config ties to it: it is read there, as transformers 5 does"
        for key, name in named_as_copies(source.tensors).items()
    ]
    if source.state:
        state = ", ".join(source.state)
        notes.append(f"only the weights are converted, not {state}: continue the training with {source.details.fresh}")
    if source.assets is None:
        notes.append("no config or tokenizer comes with it; --config BASE supplies them")
    else:
        notes += assets.checks(source.assets, source.config, source.spec)
        notes += left_behind(source)
        notes += assets.quantization_notes(source)
        notes += [
            f"{some(names, 4)} in {source.assets} are not carried: {reason}"
            for reason, names in assets.not_carried(source.assets, source.files).items()
        ]
    if source.spec.vocab is None:
        notes.append("its true vocabulary is unknown; --vocab-size N or --config BASE supplies it")
    return notes


def notes_of(plan: Plan) -> list[str]:
    """What a user has to know before a plan is run, a sentence each."""
    from converters.prove.sources import manifest_notes

    source = plan.source
    notes = [*(_notes(source) if plan.plan_of_output is None else ()), *plan.notes]
    if source.dropped:
        notes.append(
            f"what is no weight of the model is not carried: {len(source.dropped)} such as {source.dropped[0]}"
        )
    if source.left is not None:
        parts = language_model.modules_of(source.left)
        notes.append(f"--only {source.settings.only} leaves out {len(source.left)} tensors: {some(parts, 6)}")
    padding = source.padded_vocab - source.spec.vocab if source.padded_vocab and source.spec.vocab else 0
    if padding > 0 and plan.output_jobs is None:
        notes.append(f"{padding} rows of vocabulary padding in the source belong to no token and are not carried")
    return list(dict.fromkeys((*notes, *manifest_notes(plan))))


def plan_record(plan: Plan) -> dict[str, Any]:
    """The record of a plan, as `convert plan --json` prints it."""
    from converters.plan.plan import fill_count, name_in, needs

    source, target = plan.source, plan.target
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
        "masters_compared": sum(1 for job in plan.jobs if job.twins),
        "notes": notes_of(plan),
    }
    if plan.inputs:
        record["sources"] = [{"path": str(entry.checkpoint.root), **entry.record} for entry in plan.inputs]
    record["residue"] = _residue(source)
    if target:
        record["target"] = {
            "files": {name_in(file): file.size for file in target.files},
            "small_files": sorted([*target.texts, *target.copies]),
            "bytes": sum(file.size for file in target.files),
            "needs": dict(zip(("bytes", "files"), needs(target), strict=True)),
            "filled_elements": fill_count(target) - _carried_padding(plan),
            "filled_with": FILL[target.padding],
        }
    return record


def _carried_padding(plan: Plan) -> int:
    """How many elements of vocabulary padding come from the source."""
    from converters.plan.plan import PADDING

    return sum(part.leaf.numel for job in plan.jobs if job.state == PADDING for part in job.targets)


def _residue(source: Checkpoint) -> dict[str, list[str]]:
    """Settings that no table knows, by the file that they are in."""
    of_config = {} if source.config is None else {"config.json": hf_config.unknown_keys(source.config)}
    return {name: keys for name, keys in (of_config | dict(source.details.residue)).items() if keys}
