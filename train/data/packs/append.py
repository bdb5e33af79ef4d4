"""Appends a token to every document, or replaces its last token: writes `eod_FILE.bin` and `.idx` beside FILE.

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
    """Token files whose documents will end in a token.

    Attributes:
        indexed: the token files.
        marks: first sequence of each document, None where each sequence is a document.
        eod: id of the token.
        appended: whether the token is appended after the last token of a document; otherwise it replaces that token.
        facts: the sidecar of the files, None if they have none.
    """

    indexed: Indexed
    marks: NDArray[np.int64] | None
    eod: int
    appended: bool
    facts: Facts | None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.indexed) if self.marks is None else len(self.marks) - 1

    @property
    def masked(self) -> bool:
        """Whether the token files have a loss mask."""
        return mask_path(self.indexed.prefix).exists()

    @property
    def tokens(self) -> int:
        """Number of tokens of the output."""
        return self.indexed.total + (self.documents if self.appended else 0)

    @property
    def out(self) -> Path:
        """The prefix of the output."""
        return self.indexed.prefix.with_name(COPY + self.indexed.prefix.name)

    @property
    def nbytes(self) -> int:
        """Size of the output files, in bytes."""
        width = self.indexed.dtype.itemsize + self.masked
        return self.tokens * width + 34 + 12 * len(self.indexed) + 8 * (self.documents + 1)


def plan_append(path: Path, eod: int, mode: str) -> Work:
    """Open the token files, and check that the token fits their vocabulary and dtype.

    Args:
        path: FILE.bin.
        eod: id of the token.
        mode: append or replace.

    Raises:
        SourceError: the files are damaged.
        RefusedError: the token cannot be written.
    """
    indexed = open_indexed(path)
    kind, facts, marks = np.iinfo(indexed.dtype), read_facts(indexed.prefix), files.marks_of(indexed)
    most = kind.max if facts is None else min(kind.max, facts.vocabulary - 1)
    if not 0 <= eod <= most:
        raise RefusedError(
            f"{eod} is not a token of {bin_path(indexed.prefix)} ({indexed.dtype}): they run from 0 to {most}"
        )
    files.check_beside(indexed)
    follow = chunks(marks[1:]) if marks is not None else ()
    if marks is not None and any((part == marks[low : low + len(part)]).any() for low, part in follow):
        raise SourceError(f"{idx_path(indexed.prefix)} has documents without a sequence")
    return Work(indexed, marks, eod, mode == "append", facts)


def check_out(work: Work, force: bool) -> None:
    """Check that the output files do not exist.

    Raises:
        OutputError: a file exists, and `force` is not set.
    """
    for path in files.members(work.out):
        if path.exists() and not force:
            raise OutputError(f"{path} exists", "--force replaces it")


def write_append(work: Work, *, doubled: bool, quiet: bool) -> None:
    """Write the output files.

    Raises:
        OutputError: the disk has no room.
        RefusedError: documents already end in the token, or have no token to replace.
        Interrupted: a signal came.
    """
    files.check_space(work.out.parent, work.nbytes)
    kinds = [bin_path, mask_path] if work.masked else [bin_path]
    with stoppable() as stop, files.fresh(work.out) as staged, Progress("writing", work.nbytes, quiet) as progress:
        with ExitStack() as stack:
            readers = [stack.enter_context(kind(work.indexed.prefix).open("rb")) for kind in kinds]
            writers = [stack.enter_context(synced(kind(staged))) for kind in kinds]
            for block in _blocks(work):
                if stop():
                    raise files.stop_here()
                progress.advance(_write_block(work, block, readers, writers, doubled))
        write_index(
            idx_path(staged), work.indexed.dtype, _Longer(work) if work.appended else work.indexed.sizes, work.marks
        )
        counts = {"documents": work.documents, "tokens": work.tokens}
        files.write_facts(staged, work.facts and replace(work.facts, eod=work.eod, counts=counts, content=None))
        open_indexed(staged)


def _write_block(
    work: Work, block: _Block, readers: Sequence[BinaryIO], writers: Sequence[BinaryIO], doubled: bool
) -> int:
    """Write the tokens of a block, and their mask, in which the new token is trained. Returns the number of bytes."""
    written = 0
    for reader, writer, value in zip(readers, writers, (work.eod, REPLY | LAST_REPLY), strict=False):
        dtype = work.indexed.dtype if reader is readers[0] else np.dtype("u1")
        array: Tokens = np.frombuffer(reader.read(block.length * dtype.itemsize), dtype)
        if len(array) < block.length:
            raise SourceError(f"{reader.name} ends before token {block.begin + block.length}")
        last = block.ends[block.full] - 1
        if reader is readers[0]:
            _check(work, block, array[last], doubled)
        if work.appended:
            array = np.insert(array, block.ends, value)
        else:
            array = array.copy()
            array[last] = value
        at = (block.begin + (block.before if work.appended else 0)) * dtype.itemsize
        write_from(writer.fileno(), array.view(np.uint8).data, at)
        written += array.nbytes
    return written


def _check(work: Work, block: _Block, last: Tokens, doubled: bool) -> None:
    """Check that no document already ends in the token (append), or that each document has a token to replace."""
    path, upto = bin_path(work.indexed.prefix), block.before + len(block.ends)
    ended, empty = int((last == work.eod).sum()), len(block.ends) - len(last)
    if work.appended and ended and not doubled:
        raise RefusedError(
            f"{ended:,} of the documents {block.before:,} to {upto - 1:,} of {path} already end in {work.eod}",
            "replace leaves those as they are; --doubled appends a second one",
        )
    if not work.appended and empty:
        raise RefusedError(
            f"{empty:,} of the documents {block.before:,} to {upto - 1:,} of {path} have no token to replace",
            "append adds one to every document",
        )


class _Longer:
    """The sizes of all sequences, where the last sequence of each document has one token more."""

    def __init__(self, work: Work) -> None:
        self.sizes, self.marks = work.indexed.sizes, work.marks

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, where: slice) -> NDArray[np.int32]:
        low, high, _ = where.indices(len(self))
        sizes: NDArray[np.int32] = np.array(self.sizes[low:high])
        if self.marks is None:
            sizes += 1
            return sizes
        first, stop = bisect_right(self.marks, low), bisect_right(self.marks, high)
        sizes[np.asarray(self.marks[first:stop]) - 1 - low] += 1
        return sizes


class _Block(NamedTuple):
    """Tokens that are in memory at one time, and the documents that end among them.

    Attributes:
        begin: number of the first token in the file.
        length: number of tokens.
        ends: end of each document, counted from `begin`.
        full: whether each document has a token.
        before: number of documents that end before the block.
    """

    begin: int
    length: int
    ends: NDArray[np.int64]
    full: NDArray[np.bool_]
    before: int


def _blocks(work: Work) -> Iterator[_Block]:
    """Blocks that cover all tokens and all document ends, each in exactly one block."""
    total, begin, document, start = work.indexed.total, 0, 0, 0
    while begin < total or document < work.documents:
        end = min(total, begin + CHUNK)
        stop = _ended(work, end)
        if stop > document + CHUNK:  # many empty documents
            stop = document + CHUNK
            end = int(_starts(work, stop, stop + 1)[0])
        ends = _starts(work, document + 1, stop + 1)
        full = np.diff(ends, prepend=start) > 0
        yield _Block(begin, end - begin, ends - begin, full, document)
        start = int(ends[-1]) if len(ends) else start
        begin, document = end, stop


def _ended(work: Work, token: int) -> int:
    """Number of documents that end at or before a token."""
    indexed = work.indexed
    if token == indexed.total:
        return work.documents
    sequences = bisect_right(indexed.pointers, token * indexed.dtype.itemsize) - 1
    return sequences if work.marks is None else bisect_right(work.marks, sequences) - 1


def _starts(work: Work, low: int, high: int) -> NDArray[np.int64]:
    """First token of the documents from `low` to `high`; the token count for the number after the last document."""
    indexed = work.indexed
    numbers = np.arange(low, high) if work.marks is None else np.asarray(work.marks[low:high])
    inside = numbers[numbers < len(indexed)]
    starts = np.full(len(numbers), indexed.total, np.int64)
    starts[: len(inside)] = indexed.pointers[inside] // indexed.dtype.itemsize
    return starts
