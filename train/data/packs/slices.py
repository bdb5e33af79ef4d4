"""Plans where each data set is cut: at the first document that begins at or after the cumulative target.

The document that crosses a target belongs to the slice before it. Targets are cumulative over all packs, from where the
state file specifies that the data set begins: a slice that is too long shortens the next slice. Slices of a data set
have no gaps between them and do not overlap.
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
from train.data.packs.files import check_beside, marks_of
from train.data.packs.inputs import State
from train.data.packs.phases import Pack, Pool
from train.data.tokens.indexed import Indexed, bin_path, open_indexed, prefix_of
from train.data.tokens.sidecar import common_facts, mask_path

LONGEST = 255 - len(".partial")
"""Maximum number of bytes of a file name, with room for `.partial`."""


@dataclass(frozen=True)
class Source:
    """The token files of a data set.

    Attributes:
        name: name of the data set in the slices json.
        indexed: the token files.
        marks: first sequence of each document, None where each sequence is a document.
        begin: first unused document.
        masked: whether the data set has a loss mask.
    """

    name: str
    indexed: Indexed
    marks: NDArray[np.int64] | None
    begin: int
    masked: bool

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.indexed) if self.marks is None else len(self.marks) - 1

    def sequence(self, document: int) -> int:
        """First sequence of a document; the number of sequences for the document after the last one."""
        return document if self.marks is None else int(self.marks[document])

    def token(self, sequence: int) -> int:
        """First token of a sequence; the number of tokens for the sequence after the last one."""
        if sequence == len(self.indexed):
            return self.indexed.total
        return int(self.indexed.pointers[sequence]) // self.indexed.dtype.itemsize

    def document_at(self, token: int) -> int:
        """The first document that begins at or after a token."""
        sequence = bisect_left(self.indexed.pointers, token * self.indexed.dtype.itemsize)
        return sequence if self.marks is None else bisect_left(self.marks, sequence)

    @property
    def available(self) -> int:
        """Number of unused tokens."""
        return self.indexed.total - self.token(self.sequence(self.begin))


@dataclass(frozen=True)
class Slice:
    """A part of a data set that is written as a pair of token files.

    Attributes:
        pack: name of the folder of the slice's pack.
        stem: name of the slice's files, without suffix.
        source: the data set.
        documents: half-open range of documents.
        sequences: half-open range of sequences.
        tokens: half-open range of tokens.
    """

    pack: str
    stem: str
    source: Source
    documents: tuple[int, int]
    sequences: tuple[int, int]
    tokens: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.tokens[1] - self.tokens[0]

    @property
    def nbytes(self) -> int:
        """Size of the slice's files without the sidecar, in bytes."""
        marks = self.documents[1] - self.documents[0] + 1
        width = self.source.indexed.dtype.itemsize + self.source.masked
        return self.count * width + 34 + 12 * (self.sequences[1] - self.sequences[0]) + 8 * marks


@dataclass(frozen=True)
class Plan:
    """All slices that will be written.

    Attributes:
        names: the data sets, in the order of the slices json.
        packs: the packs, in the order of the training.
        slices: the slices, sorted by pack, then in the order of the data sets.
        sources: the data sets that give tokens.
        ends: first unused document after each pack, by data set.
        notes: notes for the user.
    """

    names: tuple[str, ...]
    packs: tuple[Pack, ...]
    slices: tuple[Slice, ...]
    sources: Mapping[str, Source]
    ends: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    def of(self, pack: Pack) -> list[Slice]:
        """The slices of a pack."""
        return [part for part in self.slices if part.pack == pack.name]


def make_plan(
    names: Sequence[str], pools: Mapping[str, Pool], packs: Sequence[Pack], state: Mapping[str, State]
) -> Plan:
    """Plan the cuts of all data sets for all packs. Only indexes are read.

    Raises:
        RefusedError: data sets are unknown, their files are not there, or they have too few tokens: all such data sets
            are listed; or the tokens of data sets cannot be in one file.
    """
    needed = {name: sum(pool.totals[i] for pool in pools.values()) for i, name in enumerate(names)}
    sources = _open(needed, state)
    _check_enough(needed, sources)
    check_alike([source.indexed for source in sources.values()])
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
    ordered = tuple(slices[key] for key in sorted(slices))
    _check_names(ordered)
    return Plan(tuple(names), tuple(packs), ordered, sources, ends, _notes(names, packs, slices, state))


def _open(needed: Mapping[str, int], state: Mapping[str, State]) -> dict[str, Source]:
    """The data sets that have to give tokens, opened."""
    sources, problems = {}, []
    for name, tokens in needed.items():
        if not tokens:
            continue
        try:
            if name not in state:
                raise UsageError("is not in the state file")
            sources[name] = _source(name, state[name])
        except VitruvianError as error:
            problems.append(f"{name} ({tokens:,} tokens): {error}")
    if problems:
        raise RefusedError(
            f"{len(problems)} of {len(needed)} data sets cannot be sliced, nothing was written:\n  "
            + "\n  ".join(problems),
            "a data set is left out by giving it 0 tokens in every phase of the slices json",
        )
    return sources


def _source(name: str, state: State) -> Source:
    indexed = open_indexed(Path(state.datapath))
    check_beside(indexed)
    source = Source(name, indexed, marks_of(indexed), state.idxs[-1], mask_path(indexed.prefix).exists())
    if source.begin > source.documents:
        raise SourceError(
            f"its state begins at document {source.begin:,}, {bin_path(indexed.prefix)} has {source.documents:,}"
        )
    return source


def _check_enough(needed: Mapping[str, int], sources: Mapping[str, Source]) -> None:
    short = {name: source.available for name, source in sources.items() if source.available < needed[name]}
    if short:
        lines = (f"{name}: {needed[name]:,} needed, {available:,} available" for name, available in short.items())
        raise RefusedError(
            f"{len(short)} data sets have fewer tokens than the slices json asks for, nothing was written:\n  "
            + "\n  ".join(lines),
            "lower their totals, or lengthen the data sets",
        )


def check_alike(files: Sequence[Indexed]) -> None:
    """Check that token files can be merged: same dtype, same tokenizer, and all or none with a loss mask.

    Raises:
        RefusedError: the files differ.
    """
    if not files:
        return
    first = files[0]
    other = next((file for file in files if file.dtype != first.dtype), None)
    if other is not None:
        raise RefusedError(
            f"{bin_path(first.prefix)} has tokens of the type {first.dtype}, {bin_path(other.prefix)} of {other.dtype}",
            "tokenize one of them again, with the tokenizer and the vocabulary of the other",
        )
    with_mask = [mask_path(file.prefix).exists() for file in files]
    if any(with_mask) and not all(with_mask):
        lacking = [file.prefix for file, has in zip(files, with_mask, strict=True) if not has]
        raise RefusedError(
            f"{sum(with_mask)} of {len(files)} token files have a loss mask, {len(lacking)} have none, "
            f"such as {lacking[0]}",
            "tokenize all of them with a chat template, or none",
        )
    common_facts([file.prefix for file in files], {})


def _cuts(source: Source, targets: Sequence[int]) -> list[int]:
    """First document of each slice, and the end of the last slice."""
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
    long = [part.stem for part in slices if len(f"{part.stem}.mask".encode()) > LONGEST]
    if long:
        raise RefusedError(
            f"{len(long)} slices have names that are too long for a file, such as {long[0]}", "rename them"
        )


def _notes(
    names: Sequence[str], packs: Sequence[Pack], slices: Mapping[tuple[int, int], Slice], state: Mapping[str, State]
) -> tuple[str, ...]:
    """Notes on what is not an error, but may be unexpected: packs without a file of a data set, unused data sets."""
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
