"""Where each data set is cut: at the first document that begins at or behind what it has to give up to there.

The document that crosses a target belongs to the slice before it. Targets count from where the state says that the data
set begins, over all packs: a slice that got too much leaves the next one as much less. Slices of a data set have no
gaps between them and do not overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError, SourceError, UsageError, VitruvianError
from train.data.packs.files import marks_of
from train.data.packs.inputs import State
from train.data.packs.phases import Pack, Pool
from train.data.tokens.indexed import Indexed, bin_path, open_indexed, prefix_of
from train.data.tokens.sidecar import common_facts, mask_path

LONGEST = 255 - len(".partial")
"""Bytes of the longest name of a file that can be written."""


@dataclass(frozen=True)
class Source:
    """The token files of a data set.

    Attributes:
        name: its name in the slices json.
        found: the files.
        marks: first sequence of each document, None where each sequence is one.
        begin: first document that is still to be used.
        masked: whether it has a loss mask.
    """

    name: str
    found: Indexed
    marks: NDArray[np.int64] | None
    begin: int
    masked: bool

    @property
    def documents(self) -> int:
        """How many it has."""
        return len(self.found) if self.marks is None else len(self.marks) - 1

    def sequence(self, document: int) -> int:
        """First sequence of a document; the number of sequences behind the last one."""
        return document if self.marks is None else int(self.marks[document])

    def token(self, sequence: int) -> int:
        """First token of a sequence; the number of tokens behind the last one."""
        if sequence == len(self.found):
            return self.found.total
        return int(self.found.pointers[sequence]) // self.found.dtype.itemsize

    def document_at(self, token: int) -> int:
        """The first document that begins at a token or behind it."""
        sequence = bisect_left(self.found.pointers, token * self.found.dtype.itemsize)
        return sequence if self.marks is None else bisect_left(self.marks, sequence)

    @property
    def available(self) -> int:
        """Tokens that are still to be used."""
        return self.found.total - self.token(self.sequence(self.begin))


@dataclass(frozen=True)
class Slice:
    """A part of a data set that becomes a pair of files.

    Attributes:
        pack: the folder of its pack.
        stem: the name of its files.
        source: its data set.
        documents: first, and the one behind the last; also `sequences` and `tokens`.
    """

    pack: str
    stem: str
    source: Source
    documents: tuple[int, int]
    sequences: tuple[int, int]
    tokens: tuple[int, int]

    @property
    def count(self) -> int:
        """How many tokens it has."""
        return self.tokens[1] - self.tokens[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its files, but for what is known about them."""
        marks = self.documents[1] - self.documents[0] + 1
        width = self.source.found.dtype.itemsize + self.source.masked
        return self.count * width + 34 + 12 * (self.sequences[1] - self.sequences[0]) + 8 * marks


@dataclass(frozen=True)
class Plan:
    """Everything that is to be written.

    Attributes:
        names: the data sets, in the order of the slices json.
        packs: in the order of the training.
        slices: by pack, then in the order of the data sets.
        sources: the data sets that give tokens.
        ends: first document that is not used, after each pack, by data set.
        notes: what the user may want to know.
    """

    names: tuple[str, ...]
    packs: tuple[Pack, ...]
    slices: tuple[Slice, ...]
    sources: Mapping[str, Source]
    ends: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    def of(self, pack: Pack) -> list[Slice]:
        """The slices of a pack."""
        return [one for one in self.slices if one.pack == pack.name]


def make_plan(
    names: Sequence[str], pools: Mapping[str, Pool], packs: Sequence[Pack], state: Mapping[str, State]
) -> Plan:
    """Cut all data sets for all packs. Only indexes are read.

    Raises:
        RefusedError: data sets are unknown, their files are not there, or they have too few tokens: all of them are
            listed; or their tokens cannot be in one file.
    """
    needed = {name: sum(one.totals[i] for one in pools.values()) for i, name in enumerate(names)}
    sources = _open(needed, state)
    _check_enough(needed, sources)
    check_alike([one.found for one in sources.values()])
    slices: dict[tuple[int, int], Slice] = {}
    ends = {}
    for i, name in enumerate(names):
        if name not in sources:
            continue
        cuts = _cuts(sources[name], [pack.targets[i] for pack in packs])
        ends[name] = tuple(cuts[1:])
        for k, (pack, low, high) in enumerate(zip(packs, cuts, cuts[1:], strict=False)):
            if high > low:
                slices[k, i] = _slice(pack, sources[name], low, high, pack.named[i])
    found = tuple(slices[key] for key in sorted(slices))
    _check_names(found)
    return Plan(tuple(names), tuple(packs), found, sources, ends, _notes(names, packs, slices, state))


def _open(needed: Mapping[str, int], state: Mapping[str, State]) -> dict[str, Source]:
    """The data sets that have to give tokens."""
    found, problems = {}, []
    for name, tokens in needed.items():
        if not tokens:
            continue
        try:
            if name not in state:
                raise UsageError("is not in the state file")
            found[name] = _source(name, state[name])
        except VitruvianError as error:
            problems.append(f"{name} ({tokens:,} tokens): {error}")
    if problems:
        raise RefusedError(
            f"{len(problems)} of {len(needed)} data sets cannot be sliced, nothing was written:\n  "
            + "\n  ".join(problems),
            "a data set is left out by giving it 0 tokens in every phase of the slices json",
        )
    return found


def _source(name: str, state: State) -> Source:
    found = open_indexed(Path(state.datapath))
    marks, mask = marks_of(found), mask_path(found.prefix)
    if mask.exists() and mask.stat().st_size != found.total:
        raise SourceError(f"{mask} has {mask.stat().st_size:,} bytes for {found.total:,} tokens")
    source = Source(name, found, marks, state.idxs[-1], mask.exists())
    if source.begin > source.documents:
        raise SourceError(
            f"its state begins at document {source.begin:,}, {bin_path(found.prefix)} has {source.documents:,}"
        )
    return source


def _check_enough(needed: Mapping[str, int], sources: Mapping[str, Source]) -> None:
    short = {name: one.available for name, one in sources.items() if one.available < needed[name]}
    if short:
        lines = (f"{name}: {needed[name]:,} needed, {held:,} available" for name, held in short.items())
        raise RefusedError(
            f"{len(short)} data sets have fewer tokens than the slices json asks for, nothing was written:\n  "
            + "\n  ".join(lines),
            "lower their totals, or lengthen the data sets",
        )


def check_alike(found: Sequence[Indexed]) -> None:
    """Token files that are to become one: of one type, made in one way, all with a loss mask or none.

    Raises:
        RefusedError: they are not alike.
    """
    if not found:
        return
    first = found[0]
    other = next((one for one in found if one.dtype != first.dtype), None)
    if other is not None:
        raise RefusedError(
            f"{bin_path(first.prefix)} has tokens of the type {first.dtype}, {bin_path(other.prefix)} of {other.dtype}",
            "tokenize one of them again, with the tokenizer and the vocabulary of the other",
        )
    with_mask = [mask_path(one.prefix).exists() for one in found]
    if any(with_mask) and not all(with_mask):
        lacking = [one.prefix for one, has in zip(found, with_mask, strict=True) if not has]
        raise RefusedError(
            f"{sum(with_mask)} of {len(found)} token files have a loss mask, {len(lacking)} have none, "
            f"such as {lacking[0]}",
            "tokenize all of them with a chat template, or none",
        )
    common_facts([one.prefix for one in found], {})


def _cuts(source: Source, targets: Sequence[int]) -> list[int]:
    """First document of each slice, and the one behind the last."""
    base = source.token(source.sequence(source.begin))
    cuts = [source.begin]
    for upto in accumulate(targets):
        cuts.append(max(cuts[-1], source.document_at(base + upto)) if upto else cuts[-1])
    return cuts


def _slice(pack: Pack, source: Source, low: int, high: int, named: int) -> Slice:
    sequences = source.sequence(low), source.sequence(high)
    tokens = source.token(sequences[0]), source.token(sequences[1])
    stem = f"{source.name}_slice{pack.number}_{low}_{named}"
    return Slice(pack.name, stem, source, (low, high), sequences, tokens)


def _check_names(slices: Sequence[Slice]) -> None:
    long = [one.stem for one in slices if len(f"{one.stem}.mask".encode()) > LONGEST]
    if long:
        raise RefusedError(f"{len(long)} slices have names that no file can have, such as {long[0]}", "rename them")


def _notes(
    names: Sequence[str], packs: Sequence[Pack], slices: Mapping[tuple[int, int], Slice], state: Mapping[str, State]
) -> tuple[str, ...]:
    """What is not an error and may still surprise."""
    idle: dict[tuple[str, ...], list[str]] = {}
    ahead: dict[tuple[str, ...], list[str]] = {}
    for k, pack in enumerate(packs):
        less = tuple(name for i, name in enumerate(names) if not pack.targets[i])
        covered = tuple(name for i, name in enumerate(names) if pack.targets[i] and (k, i) not in slices)
        idle.setdefault(less, []).append(pack.name)
        ahead.setdefault(covered, []).append(pack.name)
    notes = [f"{', '.join(where)}: no tokens and no file of {', '.join(sets)}" for sets, where in idle.items() if sets]
    notes += [
        f"{', '.join(where)}: no file of {', '.join(sets)}: a long document of an earlier pack covers it"
        for sets, where in ahead.items()
        if sets
    ]
    spare = [name for name in state if name not in names]
    if spare:
        notes.append(f"of the state file, not of the slices json, and not used: {', '.join(spare)}")
    paths = [prefix_of(Path(state[name].datapath)) for name in names if name in state]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        notes.append(f"several data sets are the same file and get the same documents: {', '.join(twice)}")
    return tuple(notes)
