"""Every document gets a last token, or another one: `eod_FILE.bin` and `.idx` beside FILE.

Facts: tilde-nlp/llm-gpt-neox at 374a5c6, append_eod_bin.py, which makes the same bytes one document at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from converters.common.atomic import stoppable, synced
from converters.common.progress import Progress
from formats.disk.safetensors import write_from
from formats.errors import OutputError, RefusedError, SourceError
from train.data.packs import files
from train.data.packs.iters import COPY
from train.data.tokens.encode import LAST_REPLY, REPLY
from train.data.tokens.indexed import CHUNK, Indexed, bin_path, chunks, idx_path, open_indexed, write_index
from train.data.tokens.sidecar import Facts, mask_path, read_facts

Tokens = NDArray[Any]


@dataclass(frozen=True)
class Work:
    """Token files whose documents are to end in a token.

    Attributes:
        found: the files.
        marks: first sequence of each document, None where each sequence is one.
        eod: the token.
        appended: whether it comes behind the last token of a document, or in its place.
        facts: what is known about the files.
    """

    found: Indexed
    marks: NDArray[np.int64] | None
    eod: int
    appended: bool
    facts: Facts | None

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self.found) if self.marks is None else len(self.marks) - 1

    @property
    def masked(self) -> bool:
        """Whether there is a loss mask."""
        return mask_path(self.found.prefix).exists()

    @property
    def tokens(self) -> int:
        """How many there are to be."""
        return self.found.total + (self.documents if self.appended else 0)

    @property
    def out(self) -> Path:
        """The prefix that is to be made."""
        return self.found.prefix.with_name(COPY + self.found.prefix.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are to be made."""
        width = self.found.dtype.itemsize + self.masked
        return self.tokens * width + 34 + 12 * len(self.found) + 8 * (self.documents + 1)


def plan_append(path: Path, eod: int, mode: str) -> Work:
    """Open the files and see whether the token can be one of theirs.

    Args:
        path: FILE.bin.
        eod: the token.
        mode: append or replace.

    Raises:
        SourceError: the files are damaged.
        RefusedError: the token cannot be written.
    """
    found = open_indexed(path)
    kind, facts, marks = np.iinfo(found.dtype), read_facts(found.prefix), files.marks_of(found)
    most = kind.max if facts is None else min(kind.max, facts.vocabulary - 1)
    if not 0 <= eod <= most:
        raise RefusedError(f"{eod} is no token of {bin_path(found.prefix)} ({found.dtype}): they run from 0 to {most}")
    mask = mask_path(found.prefix)
    if mask.exists() and mask.stat().st_size != found.total:
        raise SourceError(f"{mask} has {mask.stat().st_size:,} bytes for {found.total:,} tokens")
    follow = chunks(marks[1:]) if marks is not None else ()
    if marks is not None and any((part == marks[low : low + len(part)]).any() for low, part in follow):
        raise SourceError(f"{idx_path(found.prefix)} has documents without a sequence")
    return Work(found, marks, eod, mode == "append", facts)


def check_out(work: Work, force: bool) -> None:
    """The output is not there.

    Raises:
        OutputError: it is.
    """
    for path in files.members(work.out):
        if path.exists() and not force:
            raise OutputError(f"{path} exists", "--force replaces it")


def write_append(work: Work, *, doubled: bool, quiet: bool) -> None:
    """Write the files.

    Raises:
        OutputError: there is no room.
        RefusedError: documents end in the token already, or have no token to replace.
        Interrupted: a signal came.
    """
    files.check_space(work.out.parent, work.nbytes)
    kinds = [bin_path, mask_path] if work.masked else [bin_path]
    with stoppable() as stop, files.fresh(work.out) as made, Progress("writing", work.nbytes, quiet) as progress:
        with ExitStack() as stack:
            readers = [stack.enter_context(kind(work.found.prefix).open("rb")) for kind in kinds]
            writers = [stack.enter_context(synced(kind(made))) for kind in kinds]
            for block in _blocks(work):
                if stop():
                    raise files.stop_here()
                progress.advance(_write_block(work, block, readers, writers, doubled))
        write_index(idx_path(made), work.found.dtype, _Longer(work) if work.appended else work.found.sizes, work.marks)
        counts = {"documents": work.documents, "tokens": work.tokens}
        files.write_facts(made, work.facts and replace(work.facts, eod=work.eod, counts=counts))
        open_indexed(made)


def _write_block(
    work: Work, block: _Block, readers: Sequence[BinaryIO], writers: Sequence[BinaryIO], doubled: bool
) -> int:
    """Write the tokens of a block, and their mask: the model learns to end. Returns how many bytes that made."""
    written = 0
    for reader, writer, value in zip(readers, writers, (work.eod, REPLY | LAST_REPLY), strict=False):
        dtype = work.found.dtype if reader is readers[0] else np.dtype("u1")
        held: Tokens = np.frombuffer(reader.read(block.length * dtype.itemsize), dtype)
        if len(held) < block.length:
            raise SourceError(f"{reader.name} ends before token {block.begin + block.length}")
        last = block.ends[block.full] - 1
        if reader is readers[0]:
            _check(work, block, held[last], doubled)
        if work.appended:
            held = np.insert(held, block.ends, value)
        else:
            held = held.copy()
            held[last] = value
        at = (block.begin + (block.before if work.appended else 0)) * dtype.itemsize
        write_from(writer.fileno(), held.view(np.uint8).data, at)
        written += held.nbytes
    return written


def _check(work: Work, block: _Block, last: Tokens, doubled: bool) -> None:
    """No document ends in the token already, and each has one to replace."""
    path, upto = bin_path(work.found.prefix), block.before + len(block.ends)
    ended, empty = int((last == work.eod).sum()), len(block.ends) - len(last)
    if work.appended and ended and not doubled:
        raise RefusedError(
            f"{ended:,} of the documents {block.before:,} to {upto - 1:,} of {path} end in {work.eod} already",
            "replace leaves those as they are; --doubled appends a second one",
        )
    if not work.appended and empty:
        raise RefusedError(
            f"{empty:,} of the documents {block.before:,} to {upto - 1:,} of {path} have no token to replace",
            "append adds one to every document",
        )


class _Longer:
    """The sizes of all sequences; the last one of each document has one token more."""

    def __init__(self, work: Work) -> None:
        self.sizes, self.marks = work.found.sizes, work.marks

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, where: slice) -> NDArray[np.int32]:
        low, high, _ = where.indices(len(self))
        sizes: NDArray[np.int32] = np.array(self.sizes[low:high])
        if self.marks is None:
            sizes += 1
            return sizes
        first, behind = bisect_right(self.marks, low), bisect_right(self.marks, high)
        sizes[np.asarray(self.marks[first:behind]) - 1 - low] += 1
        return sizes


class _Block(NamedTuple):
    """Tokens that are in memory at a time, and the documents that end in them.

    Attributes:
        begin: first token.
        length: tokens.
        ends: of each document, counted from `begin`.
        full: whether the document has a token.
        before: documents that end before.
    """

    begin: int
    length: int
    ends: NDArray[np.int64]
    full: NDArray[np.bool_]
    before: int


def _blocks(work: Work) -> Iterator[_Block]:
    """All tokens and all ends of documents, once."""
    total, begin, document, start = work.found.total, 0, 0, 0
    while begin < total or document < work.documents:
        end = min(total, begin + CHUNK)
        behind = _ended(work, end)
        if behind > document + CHUNK:  # many have no token
            behind = document + CHUNK
            end = int(_starts(work, behind, behind + 1)[0])
        ends = _starts(work, document + 1, behind + 1)
        full = np.diff(ends, prepend=start) > 0
        yield _Block(begin, end - begin, ends - begin, full, document)
        start = int(ends[-1]) if len(ends) else start
        begin, document = end, behind


def _ended(work: Work, token: int) -> int:
    """How many documents end at a token or before it."""
    found = work.found
    if token == found.total:
        return work.documents
    sequences = bisect_right(found.pointers, token * found.dtype.itemsize) - 1
    return sequences if work.marks is None else bisect_right(work.marks, sequences) - 1


def _starts(work: Work, low: int, high: int) -> NDArray[np.int64]:
    """First token of some documents; the one behind the last begins where the tokens end."""
    found = work.found
    numbers = np.arange(low, high) if work.marks is None else np.asarray(work.marks[low:high])
    inside = numbers[numbers < len(found)]
    starts = np.full(len(numbers), found.total, np.int64)
    starts[: len(inside)] = found.pointers[inside] // found.dtype.itemsize
    return starts
