"""The slices of a plan are written: what is there already stays, what is missing is made, nothing is half there.

OUT holds a folder for each pack, `packs.json` (what all this was made of, and how), and for each data set a folder
`states/NAME`: `tokens.yaml` (what each slice was to have), `slices.yaml` (the phase of each) and `state.0.yaml`, as the
users' script writes them. At the end comes `state.N.yaml`, there and in OUT, with which a further slicing begins: N is
the number of slices that were ever made.
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
from blake3 import blake3

from converters.common.atomic import lock, named, stoppable, write_file
from converters.common.progress import Progress
from formats.errors import OutputError, VitruvianError, short
from train.data.packs import files
from train.data.packs.files import Advance, Joined, Stop
from train.data.packs.inputs import State, dump, state_text
from train.data.packs.phases import Schedule
from train.data.packs.slices import Plan, Slice, Source
from train.data.tokens.indexed import bin_path, chunks, idx_path, open_indexed, write_index
from train.data.tokens.sidecar import Facts, mask_path, read_facts

RECORD = "packs.json"
DIFFERENCES = {
    "version": "another version", "arguments": "other arguments", "inputs": "other inputs",
    "packs": "other targets, from another slices json",
}  # fmt: skip

OPTIONS = {
    "tokens_per_iter": "--tokens-per-iter", "warmup_iters": "--warmup-iters", "cool_down": "--cd-phase",
    "most": "--max-tokens-per-pack",
}  # fmt: skip
"""Field of a schedule, and the option that gives it."""


def write(
    plan: Plan, schedule: Schedule, state: Mapping[str, State], out: Path, *, jobs: int, force: bool, quiet: bool
) -> int:
    """Write all slices that are not there. Memory does not depend on their sizes.

    Returns:
        How many were already there.

    Raises:
        OutputError: OUT holds packs of other inputs or arguments, another process writes them, or there is no room.
        Interrupted: a signal came.
    """
    with stoppable() as stop, named(out):
        record = make_record(plan, schedule)
        (out / "states").mkdir(parents=True, exist_ok=True)
        with _alone(out):
            _make_way(plan, record, out, force)
            missing = [one for one in plan.slices if not is_whole(one, out)]
            nbytes = sum(one.nbytes for one in missing)
            files.check_space(out, nbytes)
            write_file(out / RECORD, _text(record | {"complete": False}))
            _write_states(plan, state, out)
            with Progress("slicing", nbytes, quiet) as progress:
                tasks = [partial(write_slice, one, out, progress.advance) for one in missing]
                files.in_threads(tasks, jobs, stop)
            _write_last_states(plan, state, out)
            write_file(out / RECORD, _text(record | {"complete": True}))
    return len(plan.slices) - len(missing)


def prefix_in(one: Slice, out: Path) -> Path:
    """Where a slice lies."""
    return out / one.pack / one.stem


def write_slice(one: Slice, out: Path, advance: Advance, stop: Stop) -> None:
    """Write one slice: tokens, mask and facts as they are, then the index."""
    found, low = one.source.found, one.tokens[0]
    width = found.dtype.itemsize
    with files.fresh(prefix_in(one, out)) as prefix:
        files.copy_range(bin_path(found.prefix), low * width, one.count * width, bin_path(prefix), advance, stop)
        if one.source.masked:
            files.copy_range(mask_path(found.prefix), low, one.count, mask_path(prefix), advance, stop)
        files.write_facts(prefix, facts_of(one))
        first, behind = one.sequences
        write_index(idx_path(prefix), found.dtype, found.sizes[first:behind], marks_in(one))
        advance(idx_path(prefix).stat().st_size)


def facts_of(one: Slice) -> Facts | None:
    """What is known about a slice: what is known about its data set, with counts of its own."""
    facts = read_facts(one.source.found.prefix)
    counts = {"documents": one.documents[1] - one.documents[0], "tokens": one.count}
    return facts and replace(facts, counts=counts)


def marks_in(one: Slice) -> Joined | None:
    """First sequence of each document of a slice, counted from its own first one."""
    marks = one.source.marks
    if marks is None:
        return None
    low, high = one.documents
    return Joined([(marks[low : high + 1], -one.sequences[0])], "<i8")


def is_whole(one: Slice, out: Path) -> bool:
    """Whether a slice is on disk: files of the right sizes, an index with its sequences, and what is known about it."""
    prefix = prefix_in(one, out)
    try:
        made = open_indexed(prefix, tokens=False)
        same = made.dtype == one.source.found.dtype and len(made) == one.sequences[1] - one.sequences[0]
        same = same and bin_path(prefix).stat().st_size == one.count * made.dtype.itemsize
        same = same and mask_path(prefix).exists() == one.source.masked
        same = same and (not one.source.masked or mask_path(prefix).stat().st_size == one.count)
        sizes = one.source.found.sizes[one.sequences[0] : one.sequences[1]]
        same = same and all(np.array_equal(part, sizes[low : low + len(part)]) for low, part in chunks(made.sizes))
        return same and read_facts(prefix) == facts_of(one)
    except (VitruvianError, OSError):
        return False


# --- what OUT was made of --------------------------------------------------------------------------------------------


def make_record(plan: Plan, schedule: Schedule) -> dict[str, Any]:
    """What `packs.json` says: arguments, inputs, and every slice."""
    packs = []
    for pack in plan.packs:
        slices = {one.source.name: _slice_record(one) for one in plan.of(pack)}
        packs.append({"name": pack.name, "tokens": pack.tokens, "train_iters": pack.steps(schedule), "slices": slices})
    inputs = {name: _input_record(source) for name, source in plan.sources.items()}
    return {"version": 1, "arguments": asdict(schedule), "inputs": inputs, "packs": packs}


def _slice_record(one: Slice) -> dict[str, Any]:
    return {"files": one.stem, "documents": list(one.documents), "tokens": one.count}


def _input_record(source: Source) -> dict[str, Any]:
    prefix = source.found.prefix
    about = bin_path(prefix).stat()
    return {
        "datapath": str(bin_path(prefix).absolute()), "bytes": about.st_size, "mtime_ns": about.st_mtime_ns,
        "idx": blake3().update_mmap(idx_path(prefix)).hexdigest(), "first_document": source.begin,
        "masked": source.masked,
    }  # fmt: skip


def _text(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def read_record(out: Path) -> dict[str, Any] | None:
    """What OUT says that it was made of, None if it does not.

    Raises:
        OutputError: it cannot be read.
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
        raise OutputError(f"{path} does not tell what the packs were made of: {short(str(error))}") from None
    return record


def files_of(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Pack, and the names of its slices, as a record has them."""
    return {pack["name"]: [one["files"] for one in pack["slices"].values()] for pack in record["packs"]}


def _make_way(plan: Plan, record: Mapping[str, Any], out: Path, force: bool) -> None:
    """OUT is free, or holds what this very command has begun."""
    held = read_record(out)
    if held is None:
        for pack in plan.packs:
            if (out / pack.name).exists():
                raise OutputError(
                    f"{out / pack.name} exists, and {out / RECORD} does not", "remove it, or move it away"
                )
        return
    changed = difference(held, record)
    if changed and not force:
        raise OutputError(
            f"{out} holds packs made with {changed}", "choose another folder, or delete them with --force"
        )
    if force:
        _delete(held, out)


def difference(held: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Where two records are not equal, in words; empty if they are."""
    for part, words in DIFFERENCES.items():
        one, two = held.get(part), record[part]
        if one != two:
            if not isinstance(one, dict) or not isinstance(two, dict):
                return words
            parts = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
            if part == "arguments":
                return ", ".join(f"{OPTIONS.get(key, key)} {one.get(key)}, not {two.get(key)}" for key in parts)
            return f"{words}: " + ", ".join(parts)
    return ""


def _delete(held: Mapping[str, Any], out: Path) -> None:
    """Delete the slices that a record names, and nothing else."""
    for pack, stems in files_of(held).items():
        for stem in stems:
            for path in reversed(files.members(out / pack / stem)):
                path.unlink(missing_ok=True)
    (out / RECORD).unlink()


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process writes packs here."""
    handle = os.open(out / "states" / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, out)
        yield
    finally:
        os.close(handle)


# --- states ----------------------------------------------------------------------------------------------------------


def _write_states(plan: Plan, state: Mapping[str, State], out: Path) -> None:
    """What each data set begins with, and what is to be cut from it."""
    place = {name: i for i, name in enumerate(plan.names)}
    for name in plan.sources:
        folder = out / "states" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "tokens.yaml", dump({name: [pack.targets[place[name]] for pack in plan.packs]}))
        write_file(folder / "slices.yaml", dump({name: [pack.phase for pack in plan.packs]}))
        write_file(folder / "state.0.yaml", state_text({name: state[name]}))


def _write_last_states(plan: Plan, state: Mapping[str, State], out: Path) -> None:
    """Where each data set ends: the first document that no slice has, after each slice."""
    after = {name: State(one.datapath, one.idxs + plan.ends.get(name, ())) for name, one in state.items()}
    last = f"state.{max(len(one.idxs) for one in after.values()) - 1}.yaml"
    for name in plan.sources:
        write_file(out / "states" / name / last, state_text({name: after[name]}))
    write_file(out / last, state_text(after))
