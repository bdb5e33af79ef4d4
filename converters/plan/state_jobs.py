"""Jobs of optimizer states: of the tensors of each state, and of the rows of vocabulary padding in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from converters.plan.parts import Part, prove_tiling
from converters.plan.plan import PADDING, Job, cast_dtype, make_plan, padding_leaves
from formats.checkpoint import Checkpoint, Target
from formats.layout.leaves import Leaf
from formats.layout.placed import Placed
from formats.layout.slots import ORIGINAL, Replica


def state_jobs(
    source: Checkpoint, states: Mapping[str, Checkpoint], rows: int = 0, target: Target | None = None,
    cast: str | None = None,
) -> Iterator[Job]:  # fmt: skip
    """The jobs of each state, and of padding rows from the vocabulary up to `rows`, cast if they are of weights."""
    vocab = source.spec.vocab or 0
    for state, part_source in {"": source, **states}.items():
        part = tensors_of(target, state) if target else None
        if state:
            yield from (replace(job, state=state) for job in make_plan(part_source, part).jobs)
        placed = [placed for whole in part.tensors for placed in whole.each()] if part else []
        name = f"{state}.{PADDING}".strip(".")
        yield from _padding_jobs(part_source, placed, range(vocab, rows), name, None if state else cast)


def tensors_of(target: Target, state: str) -> Target:
    """A target with only the tensors of one optimizer state, or of the weights where the state is empty."""
    if not state:
        return target
    return replace(target, files=tuple(replace(file, tensors=file.states.get(state, ())) for file in target.files))


def _padding_jobs(
    source: Checkpoint, placed_tensors: Iterable[Placed], rows: range, state: str, cast: str | None
) -> Iterator[Job]:
    """The jobs that move rows of vocabulary padding, which no token has."""
    read, targets, dtypes = _rows(source.tensors, rows), _rows(placed_tensors, rows), source.dtypes()
    for tensor, copies in read.items():
        written = [part for parts in targets.get(tensor, {}).values() for part in parts]
        shape = (len(rows), *(span.size for span in copies[ORIGINAL][0].leaf.spans[1:]))
        for parts in (*copies.values(), *targets.get(tensor, {}).values()):
            prove_tiling([part.leaf for part in parts], shape, f"{state}.{tensor}")
        replicas = {copy: tuple(parts) for copy, parts in copies.items() if copy}
        dtype = dtypes[tensor, None]
        cast_to = cast_dtype(dtype, cast, tensor)
        yield Job(tensor, None, shape, dtype, cast_to, tuple(copies[ORIGINAL]), replicas, tuple(written), state=state)


def _rows(tensors: Iterable[Placed], rows: range) -> dict[str, dict[Replica, list[Part]]]:
    """The parts of padding `rows` by tensor and by the copy to which they belong; the first row is number 0."""
    by_tensor: dict[str, dict[Replica, list[Part]]] = {}
    for placed in (part for whole in tensors for part in whole.each()) if rows else ():
        for leaf in rows_of_padding(placed, rows):
            by_tensor.setdefault(leaf.tensor, {}).setdefault(placed.slot.replica, []).append(
                Part(leaf, placed.fragment)
            )
    return by_tensor


def rows_of_padding(placed: Placed, rows: range) -> Iterator[Leaf]:
    """The leaves of padding `rows` in a tensor, with rows counted from the first of them."""
    for leaf in padding_leaves(placed, rows.stop):
        first, *others = leaf.spans
        moved = first._replace(start=first.start - rows.start, stop=first.stop - rows.start)
        yield replace(leaf, spans=(moved, *others))
