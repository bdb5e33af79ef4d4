"""Members of archives that the digests of tensors say nothing of, such as those with vocabulary padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from pathlib import Path

from converters.plan.plan import Job
from converters.prove.sources import is_stored
from formats.checkpoint import Checkpoint
from formats.disk.safetensors import Fragment, Member

_Key = tuple[Path, int]
"""Identifies a member: its file, and its first byte."""


def unread(
    checkpoints: Iterable[Checkpoint], jobs: Iterable[Job], *, copies: bool, others: bool
) -> tuple[list[Path], Callable[[Path, int], bool]]:
    """The archives that tensors are in, and a function that tells whether the digests leave out a member of one.

    Args:
        checkpoints: the checkpoint, and those of its optimizer states, whose tensors the jobs read.
        jobs: the jobs, whose digests are compared.
        copies: whether further copies of a tensor have to be equal.
        others: whether members without any of these tensors count.
    """
    pieces = (piece for of in checkpoints for placed in of.fragments() for piece in _stored(placed.fragment))
    held = {(piece.path, piece.member.start) for piece in pieces if piece.member}
    whole = _read_whole(jobs, copies=copies) if held else set()
    paths = sorted({path for path, _ in held})
    return paths, lambda path, start: (path, start) not in whole and (others or (path, start) in held)


def _read_whole(jobs: Iterable[Job], *, copies: bool) -> set[_Key]:
    """The members of which every byte is in a digest of a job, or is compared with what is."""
    whole, parts = set[_Key](), dict[tuple[Path, Member], dict[int, int]]()
    for piece in chain.from_iterable(map(_stored, _covered(jobs, copies=copies))):
        if piece.member is None:
            continue
        if piece.nbytes == piece.member.size:
            whole.add((piece.path, piece.member.start))
        else:
            parts.setdefault((piece.path, piece.member), {})[piece.offset] = piece.nbytes
    return whole | {(path, member.start) for (path, member), of in parts.items() if sum(of.values()) == member.size}


def _covered(jobs: Iterable[Job], *, copies: bool) -> Iterator[Fragment]:
    """The fragments of which jobs read every element."""
    leaves: dict[Fragment, dict[tuple[object, ...], int]] = {}
    for job in jobs:
        if job.partial or not is_stored(job):
            continue
        for part in chain(job.sources, *(job.replicas.values() if copies else ())):
            leaf, fragment = part.leaf, part.fragment
            if leaf.numel == prod(fragment.shape):
                yield fragment
                continue
            spans = tuple((span.size, span.stride) for span in leaf.spans)
            leaves.setdefault(fragment, {})[leaf.base, spans] = leaf.numel
    yield from (fragment for fragment, read in leaves.items() if sum(read.values()) == prod(fragment.shape))


def _stored(fragment: Fragment) -> Sequence[Fragment]:
    """The fragments in files that a fragment is made of: itself, or its pieces."""
    return [piece for _, piece in fragment.pieces] or [fragment]
