"""Writes the slices of a plan: existing slices stay, missing slices are written, each complete or absent.

OUT has a folder for each pack, `packs.json` (inputs, arguments and all slices), and for each data set a folder
`states/NAME`: `tokens.yaml` (the target of each slice), `slices.yaml` (the phase of each slice) and `state.0.yaml`, as
tilde-nlp's script writes them. `state.N.yaml` is written at the end, to that folder and to OUT; the next slicing starts
from this file. N is the number of slices made so far.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from converters.common.atomic import lock, named, stoppable, write_file
from converters.common.progress import Progress
from formats.errors import OutputError, VitruvianError, short
from train.data.packing.pack_plan import hashes
from train.data.packs import files
from train.data.packs.files import Advance, Joined, Stop
from train.data.packs.inputs import State, dump, state_text
from train.data.packs.phases import Schedule
from train.data.packs.slices import Plan, Slice, Source
from train.data.tokens.indexed import bin_path, chunks, idx_path, open_indexed, write_index
from train.data.tokens.sidecar import Facts, facts_path, mask_path, read_facts

RECORD = "packs.json"
DIFFERENCES = {
    "version": "another version", "arguments": "other arguments", "inputs": "other inputs",
    "packs": "other targets, from another slices json",
}  # fmt: skip

OPTIONS = {
    "tokens_per_iter": "--tokens-per-iter", "warmup_iters": "--warmup-iters", "cool_down": "--cd-phase",
    "most": "--max-tokens-per-pack",
}  # fmt: skip
"""Field of a schedule: the option that sets it."""


def write(
    plan: Plan, schedule: Schedule, state: Mapping[str, State], out: Path, *, jobs: int, force: bool, quiet: bool
) -> int:
    """Write all missing slices of a plan. Memory does not depend on the size of slices.

    Returns:
        The number of slices that were already there.

    Raises:
        OutputError: OUT has packs of other inputs or arguments, another process writes packs there, or the disk has no
            room.
        Interrupted: a signal came.
    """
    with stoppable() as stop, named(out):
        record = make_record(plan, schedule)
        (out / "states").mkdir(parents=True, exist_ok=True)
        with _alone(out):
            _make_way(plan, record, out, force)
            missing = [part for part in plan.slices if not is_whole(part, out)]
            nbytes = sum(part.nbytes for part in missing)
            files.check_space(out, nbytes)
            write_file(out / RECORD, files.json_bytes(record | {"complete": False}))
            _write_states(plan, state, out)
            with Progress("slicing", nbytes, quiet) as progress:
                tasks = [partial(write_slice, part, out, progress.advance) for part in missing]
                files.in_threads(tasks, jobs, stop)
            _write_last_states(plan, state, out)
            write_file(out / RECORD, files.json_bytes(record | {"complete": True}))
    return len(plan.slices) - len(missing)


def prefix_in(part: Slice, out: Path) -> Path:
    """The prefix of the token files of a slice."""
    return out / part.pack / part.stem


def write_slice(part: Slice, out: Path, advance: Advance, stop: Stop) -> None:
    """Write one slice: tokens, mask and sidecar unchanged, then the index."""
    indexed, low = part.source.indexed, part.tokens[0]
    width = indexed.dtype.itemsize
    with files.fresh(prefix_in(part, out)) as prefix:
        files.copy_range(bin_path(indexed.prefix), low * width, part.count * width, bin_path(prefix), advance, stop)
        if part.source.masked:
            files.copy_range(mask_path(indexed.prefix), low, part.count, mask_path(prefix), advance, stop)
        files.write_facts(prefix, facts_of(part))
        first, end = part.sequences
        write_index(idx_path(prefix), indexed.dtype, indexed.sizes[first:end], marks_in(part))
        advance(idx_path(prefix).stat().st_size)


def facts_of(part: Slice) -> Facts | None:
    """The sidecar of a slice: that of its data set, with the counts of the slice; None if the data set has none."""
    facts = read_facts(part.source.indexed.prefix)
    counts = {"documents": part.documents[1] - part.documents[0], "tokens": part.count}
    return facts and replace(facts, counts=counts, content=None)


def marks_in(part: Slice) -> Joined | None:
    """First sequence of each document, counted from the slice's first; None if each sequence is a document."""
    marks = part.source.marks
    if marks is None:
        return None
    low, high = part.documents
    return Joined([(marks[low : high + 1], -part.sequences[0])], "<i8")


def is_whole(part: Slice, out: Path) -> bool:
    """Whether a slice is complete on disk: its file sizes, the lengths in its index, and its sidecar are right."""
    prefix = prefix_in(part, out)
    if files.staging_of(prefix).exists():  # of a process that was killed; it would keep the pack from being merged
        return False
    try:
        written = open_indexed(prefix, tokens=False)
        same = written.dtype == part.source.indexed.dtype and len(written) == part.sequences[1] - part.sequences[0]
        same = same and bin_path(prefix).stat().st_size == part.count * written.dtype.itemsize
        same = same and mask_path(prefix).exists() == part.source.masked
        same = same and (not part.source.masked or mask_path(prefix).stat().st_size == part.count)
        sizes = part.source.indexed.sizes[part.sequences[0] : part.sequences[1]]
        same = same and all(
            np.array_equal(column, sizes[low : low + len(column)]) for low, column in chunks(written.sizes)
        )
        return same and read_facts(prefix) == facts_of(part)
    except (VitruvianError, OSError):
        return False


# --- what OUT was made of --------------------------------------------------------------------------------------------


def make_record(plan: Plan, schedule: Schedule) -> dict[str, Any]:
    """The content of `packs.json`: arguments, inputs, and every slice."""
    packs = []
    for pack in plan.packs:
        slices = {part.source.name: _slice_record(part) for part in plan.of(pack)}
        packs.append({"name": pack.name, "tokens": pack.tokens, "train_iters": pack.steps(schedule), "slices": slices})
    inputs = {name: _input_record(source) for name, source in plan.sources.items()}
    return {"version": 2, "arguments": asdict(schedule), "inputs": inputs, "packs": packs}


def _slice_record(part: Slice) -> dict[str, Any]:
    return {"files": part.stem, "documents": list(part.documents), "tokens": part.count}


def _input_record(source: Source) -> dict[str, Any]:
    prefix = source.indexed.prefix
    read = {"bin": bin_path(prefix), "mask": mask_path(prefix), "json": facts_path(prefix)}
    return {
        "datapath": str(bin_path(prefix).absolute()),
        "mtime_ns": {kind: path.stat().st_mtime_ns for kind, path in read.items() if path.exists()},
        "blake3": hashes(prefix),
        "first_document": source.begin,
    }


def read_record(out: Path) -> dict[str, Any] | None:
    """The content of `packs.json` in OUT, None if the file does not exist.

    Raises:
        OutputError: the file is damaged.
    """
    path = out / RECORD
    if not path.exists():
        return None
    try:
        record = dict(json.loads(path.read_bytes()))
        names = [name for pack, stems in files_of(record).items() for name in (pack, *stems)]
        if any(type(name) is not str or "/" in name for name in names):
            raise ValueError("it names files of other folders")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OutputError(f"{path} is damaged: {short(str(error))}") from None
    return record


def files_of(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the slices of each pack, by pack, from a record."""
    return {pack["name"]: [entry["files"] for entry in pack["slices"].values()] for pack in record["packs"]}


def _make_way(plan: Plan, record: Mapping[str, Any], out: Path, force: bool) -> None:
    """Check that OUT has no packs, or only packs that the same command has begun; with `force`, delete packs there."""
    previous = read_record(out)
    if previous is None:
        for pack in plan.packs:
            if (out / pack.name).exists():
                raise OutputError(
                    f"{out / pack.name} exists, and {out / RECORD} does not", "remove it, or move it away"
                )
        return
    changed = difference(previous, record)
    if changed and not force:
        raise OutputError(
            f"{out} holds packs made with {changed}", "choose another folder, or delete them with --force"
        )
    if force:
        _delete(previous, out)


def difference(previous: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The difference between two records of `packs.json` as text; empty if they are equal."""
    for part, text in DIFFERENCES.items():
        before, now = previous.get(part), record[part]
        if before != now:
            if not isinstance(before, dict) or not isinstance(now, dict):
                return text
            parts = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
            if part == "arguments":
                return ", ".join(f"{OPTIONS.get(key, key)} {before.get(key)}, not {now.get(key)}" for key in parts)
            return f"{text}: " + ", ".join(parts)
    return ""


def _delete(record: Mapping[str, Any], out: Path) -> None:
    """Delete the slices that a record names, and nothing else."""
    for pack, stems in files_of(record).items():
        for stem in stems:
            for path in reversed(files.members(out / pack / stem)):
                path.unlink(missing_ok=True)
    (out / RECORD).unlink()


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock OUT, so that no other process writes packs into it."""
    handle = os.open(out / "states" / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, out)
        yield
    finally:
        os.close(handle)


# --- states ----------------------------------------------------------------------------------------------------------


def _write_states(plan: Plan, state: Mapping[str, State], out: Path) -> None:
    """Write the state that each data set begins with, and the targets of its slices."""
    place = {name: i for i, name in enumerate(plan.names)}
    for name in plan.sources:
        folder = out / "states" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "tokens.yaml", dump({name: [pack.targets[place[name]] for pack in plan.packs]}))
        write_file(folder / "slices.yaml", dump({name: [pack.phase for pack in plan.packs]}))
        write_file(folder / "state.0.yaml", state_text({name: state[name]}))


def _write_last_states(plan: Plan, state: Mapping[str, State], out: Path) -> None:
    """Write the state after slicing: the first unused document of each data set after each slice."""
    after = {name: State(entry.datapath, entry.idxs + plan.ends.get(name, ())) for name, entry in state.items()}
    last = f"state.{max(len(entry.idxs) for entry in after.values()) - 1}.yaml"
    for name in plan.sources:
        write_file(out / "states" / name / last, state_text({name: after[name]}))
    write_file(out / last, state_text(after))
