"""What a training says before its first step, a line for each subject."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from math import prod

from formats.torch_files import saves
from train.data.rows import Rows
from train.distributed import World
from train.engines import Engine
from train.model.trainee import shape_of
from train.run.estimate import mixture_of
from train.run.prepare import Prepared
from train.settings.batching import passes

Line = tuple[str, str]
"""A subject, and what is said of it."""


def opening_lines(
    prepared: Prepared, sets: Mapping[str, Rows], engine: Engine, world: World, attention: str, of_start: str
) -> Iterator[str]:
    """The lines on the data, the steps, and what computes them, and on the weights that are trained.

    Args:
        prepared: the training.
        sets: the rows of each validation set by name.
        engine: the engine, with its weights.
        world: the ranks.
        attention: its implementation, and how far packed documents differ from unpacked ones.
        of_start: a note on the weights that the run began with, empty if there is none.
    """
    data, steps = _data(prepared, sets, of_start), _steps(prepared, engine, world, attention)
    for subject, text in chain(data, steps, _weights(prepared, engine)):
        yield f"{subject:<10} {text}"


def _data(prepared: Prepared, sets: Mapping[str, Rows], of_start: str) -> Iterator[Line]:
    rows, order, start = prepared.rows, prepared.order, prepared.start
    count = sum(plan.counts["tokens"] for plan in rows.plans)
    packing, capacity = rows.plans[0].algorithm, rows.plans[0].capacity
    yield "rows", f"{len(rows)} of {count} tokens, {packing}, {100 * count / (len(rows) * capacity):.2f} % full"
    for name, rows_of_set in {"data.train": rows, **sets}.items():
        if rows_of_set.overlong:
            yield "note", f"{name}: {rows_of_set.overlong}"
    if start is not None and saves.recorded(start) is None:
        yield "note", f"{start} has no {saves.RECORD}: nothing proves that its files are of one save"
    for note in [*prepared.notes, *filter(None, [of_start])]:
        yield "note", note
    for part in mixture_of(rows, order):
        yield "set", f"{part.name}: {part.trained} rows, {100 * part.share:.2f} %, {part.epochs:.3g} epochs"
    if not order.sets and (note := passes(len(rows), prepared.config.steps, prepared.sizes.size)):
        yield "note", note


def _steps(prepared: Prepared, engine: Engine, world: World, attention: str) -> Iterator[Line]:
    yield "batch", f"{prepared.sizes}{f', each shared by {world.context}' if world.context > 1 else ''}"
    yield "steps", f"{prepared.total}, from global step {prepared.progress.offset + prepared.progress.step + 1}"
    yield "attention", attention
    yield "kernels", engine.kernels


def _weights(prepared: Prepared, engine: Engine) -> Iterator[Line]:
    config = prepared.config
    yield "weights", f"{prepared.start or config.model.path}"
    if prepared.moments is not None:
        yield "moments", f"of the start, after {prepared.moments.step} steps; the weights are its master weights"
    if config.lora is not None and config.lora.adapter is not None and prepared.start is None:
        yield "adapter", str(config.lora.adapter)
    if config.lora is not None or config.model.freeze:
        sizes = [(prod(shape_of(tensor)), tensor.requires_grad) for tensor in engine.model.parameters()]
        trained, total = sum(count for count, trains in sizes if trains), sum(count for count, _ in sizes)
        yield "adapters" if config.lora else "trained", f"{trained:,} of {total:,} parameters are trained"
