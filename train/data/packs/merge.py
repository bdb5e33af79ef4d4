"""Merges the token files of a folder into one, in the order of their names, as GPT-NeoX merges them.

Unlike in GPT-NeoX (tools/datasets/merge_datasets_mmap.py, whose builder loses the documents of its parts), the merged
index has all documents. Each part is hashed while it is copied, and the output is read back and compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from converters.common.atomic import stoppable, write_file
from converters.common.progress import Progress, size, table
from formats.disk.safetensors import write_from
from formats.errors import OutputError, RefusedError, SourceError, VerificationError
from train.data.packs import files
from train.data.packs.files import Advance, Joined, Stop
from train.data.packs.iters import COPY
from train.data.packs.slices import check_alike
from train.data.packs.writing import files_of, read_record
from train.data.tokens.indexed import Column, Indexed, bin_path, idx_path, open_indexed, write_index
from train.data.tokens.sidecar import Facts, common_facts, content_of, facts_path, mask_path

Keep = Callable[[memoryview, int], None]
"""Called with a piece of a file, and the byte in the file where the piece begins."""


@dataclass(frozen=True)
class Merge:
    """A planned merge.

    Attributes:
        folder: the folder of the parts.
        parts: the token files, in the order of their names.
        documents: number of documents of each part.
        facts: the common sidecar of all parts, None if they have none.
        masked: whether the parts have a loss mask.
        notes: notes for the user.
    """

    folder: Path
    parts: tuple[Indexed, ...]
    documents: tuple[int, ...]
    facts: Facts | None
    masked: bool
    notes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all parts."""
        return sum(part.total for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size of the output files, in bytes."""
        width = self.parts[0].dtype.itemsize + self.masked
        return self.tokens * width + 34 + 12 * sum(map(len, self.parts)) + 8 * (sum(self.documents) + 1)

    @property
    def prefix(self) -> str:
        """Name of the output, which is that of the folder."""
        return name_of(self.folder)


def name_of(folder: Path) -> str:
    """The name of a folder, which may be given as `.`."""
    return folder.name if folder.name not in ("", "..") else folder.resolve().name


def plan_merge(folder: Path) -> Merge:
    """Open all token files of a folder, and plan their merge.

    Raises:
        SourceError: the folder has no token files, or one of a pair or a slice of the pack is missing.
        RefusedError: the files cannot be merged.
    """
    names = parts_of(folder)
    notes = list(_check_slices(folder, names))
    parts = tuple(open_indexed(folder / f"{name}.bin") for name in names)
    for part in parts:
        files.check_beside(part)
    check_alike(parts)
    every = [files.marks_of(part) for part in parts]
    documents = tuple(len(part) if marks is None else len(marks) - 1 for part, marks in zip(parts, every, strict=True))
    forgot = [part.prefix.name for part, marks in zip(parts, every, strict=True) if marks is None and not part.whole]
    if forgot:
        notes.append(
            f"{len(forgot)} indexes do not list all documents, each sequence is taken as one: {', '.join(forgot)}"
        )
    facts = common_facts(
        [part.prefix for part in parts], {"documents": sum(documents), "tokens": sum(part.total for part in parts)}
    )
    with_facts = sum(facts_path(part.prefix).exists() for part in parts)
    if 0 < with_facts < len(parts):
        notes.append(
            f"{with_facts} of {len(parts)} parts have a sidecar that says how they were tokenized, the result has none"
        )
    masked = mask_path(parts[0].prefix).exists()
    return Merge(folder, parts, documents, facts, masked, tuple(notes))


def parts_of(folder: Path) -> list[str]:
    """Names of all pairs of token files in a folder, sorted.

    Raises:
        SourceError: the folder has no token files, or one of a pair is missing.
        RefusedError: some files are copies of others.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise SourceError(f"{folder}: {error.strerror}") from None
    unfinished = [name for name in names if name.endswith(".partial")]
    if unfinished:
        raise SourceError(f"{folder / unfinished[0]} is not finished", "run the command that writes it again")
    tokens, indexes = ({name[:-4] for name in names if name.endswith(end)} for end in (".bin", ".idx"))
    alone = [f"{name}.bin" for name in sorted(tokens - indexes)] + [f"{name}.idx" for name in sorted(indexes - tokens)]
    if alone:
        raise SourceError(f"{len(alone)} files of {folder} lack the other one of their pair: {', '.join(alone)}")
    if not tokens:
        raise SourceError(f"{folder} has no .bin and .idx")
    copies = sorted(name for name in tokens if name.startswith(COPY) and name.removeprefix(COPY) in tokens)
    if copies:
        raise RefusedError(
            f"{len(copies)} token files of {folder} are copies of others: {', '.join(copies)}",
            "move them, or those that they were made of, to another folder",
        )
    return sorted(tokens)


def _check_slices(folder: Path, names: Sequence[str]) -> list[str]:
    """Check that no slice of a pack is missing, if `train packs slice` made the pack. Returns notes."""
    record = read_record(folder.resolve().parent)
    expected = files_of(record).get(name_of(folder)) if record else None
    if expected is None:
        return []
    missing, extra = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
    if missing:
        raise SourceError(
            f"{folder} lacks {len(missing)} of {len(expected)} slices: {', '.join(missing)}",
            "the slicing is not finished: run `train packs slice` again",
        )
    return [f"{len(extra)} files are not slices of this pack and are merged too: {', '.join(extra)}"] if extra else []


def check_out(merge: Merge, out: Path, force: bool) -> None:
    """Check that the output is not in the folder of the parts, and does not exist.

    Raises:
        OutputError: the output is in that folder, or exists and `force` is not set.
    """
    if out.resolve() == merge.folder.resolve():
        raise OutputError(f"{out} is the folder of the parts", "the next merge would take the result for one of them")
    for path in files.members(out / merge.prefix):
        if path.exists() and not force:
            raise OutputError(f"{path} exists", "choose another folder, or replace it with --force")


def write_merge(merge: Merge, out: Path, *, jobs: int, verify: bool, quiet: bool) -> Path:
    """Write `OUT/XX.bin`, `.idx`, `.merge.log`, and mask and sidecar where the parts have them.

    Returns:
        The prefix of the output.

    Raises:
        VerificationError: the output does not read back as it was written.
        Interrupted: a signal came.
    """
    began, prefix = time.monotonic(), out / merge.prefix
    out.mkdir(parents=True, exist_ok=True)
    files.check_space(out, merge.nbytes)
    kinds = [bin_path, mask_path] if merge.masked else [bin_path]
    total = merge.tokens * (merge.parts[0].dtype.itemsize + merge.masked)
    with (
        stoppable() as stop,
        files.fresh(prefix) as staged,
        Progress("merging", total * (1 + verify), quiet) as progress,
    ):
        sums = []
        for kind in kinds:
            pieces = _pieces([kind(part.prefix) for part in merge.parts])
            sums.append(_copy(pieces, kind(staged), jobs, progress.advance, stop))
            if verify:
                _verify(pieces, kind(staged), sums[-1], jobs, progress.advance, stop)
        marks = [files.marks_of(part) for part in merge.parts]
        sizes = Joined([(part.sizes, 0) for part in merge.parts], "<i4")
        write_index(idx_path(staged), merge.parts[0].dtype, sizes, _documents(merge.parts, marks))
        content = content_of([digest for kind_sums in sums for digest in kind_sums])
        files.write_facts(staged, merge.facts and replace(merge.facts, content=content))
        open_indexed(staged)
        seconds = time.monotonic() - began
        write_file(out / f"{merge.prefix}.merge.log", _log(merge, prefix, sums, verify, seconds))
    return prefix


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """The file of a part, and its byte range in the output."""

    path: Path
    begin: int
    length: int


def _pieces(paths: Sequence[Path]) -> list[_Piece]:
    counts = [path.stat().st_size for path in paths]
    return list(map(_Piece, paths, accumulate(counts, initial=0), counts))


def _copy(pieces: Sequence[_Piece], target: Path, jobs: int, advance: Advance, stop: Stop) -> list[str]:
    """Write all parts into one file, fsync it, and return the BLAKE3 of each part."""

    def copy(piece: _Piece, halt: Stop) -> str:
        with piece.path.open("rb", buffering=0) as reader:

            def keep(part: memoryview, at: int) -> None:
                write_from(writer, part, piece.begin + at)

            return _hash(reader.fileno(), piece.path, 0, piece.length, halt, advance, keep)

    writer = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(writer, sum(piece.length for piece in pieces))
        sums = files.in_threads([partial(copy, piece) for piece in pieces], jobs, stop)
        os.fsync(writer)
        if hasattr(os, "posix_fadvise"):  # so that it is read back from disk, not from the page cache
            os.posix_fadvise(writer, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(writer)
    return sums


def _verify(
    pieces: Sequence[_Piece], target: Path, sums: Sequence[str], jobs: int, advance: Advance, stop: Stop
) -> None:
    """Read each part back from the output.

    Raises:
        VerificationError: a part differs from what was copied.
    """
    with target.open("rb", buffering=0) as reader:
        again = partial(_again, reader.fileno(), target, advance)
        work = [partial(again, piece) for piece in pieces]
        read_back = files.in_threads(work, jobs, stop)
    wrong = [piece.path for piece, actual, expected in zip(pieces, read_back, sums, strict=True) if actual != expected]
    if wrong:
        raise VerificationError(
            f"{len(wrong)} of {len(pieces)} parts do not read back from {target} as they were written, such as "
            f"{wrong[0]}",
            "the disk or the memory is faulty; the file was deleted",
        )


def _again(reader: int, target: Path, advance: Advance, piece: _Piece, halt: Stop) -> str:
    return _hash(reader, target, piece.begin, piece.length, halt, advance, lambda _, __: None)


def _hash(reader: int, path: Path, begin: int, count: int, halt: Stop, advance: Advance, keep: Keep) -> str:
    """The BLAKE3 of a byte range of a file; `keep` is called with each piece."""
    digest, buffer, done = blake3(), bytearray(min(files.BUFFER, count)), 0
    while done < count:
        if halt():
            raise files.stop_here()
        got = os.preadv(reader, [memoryview(buffer)[: count - done]], begin + done)
        if not got:
            raise SourceError(f"{path} ends at byte {begin + done}, {begin + count} were expected")
        part = memoryview(buffer)[:got]
        digest.update(part)
        keep(part, done)
        done += got
        advance(got)
    return digest.hexdigest()


# --- the index and the log -------------------------------------------------------------------------------------------


class _Each:
    """The numbers 0, 1, 2, …: the first sequence of each document, where each sequence is a document."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> NDArray[np.int64]:
        low, high, _ = where.indices(self.count)
        return np.arange(low, high, dtype="<i8")


def _documents(parts: Sequence[Indexed], marks: Sequence[NDArray[np.int64] | None]) -> Joined | None:
    """First sequence of each document of all parts; None if each sequence is a document."""
    if all(part_marks is None for part_marks in marks):
        return None
    columns: list[tuple[Column, int]] = []
    before = 0
    for part, part_marks in zip(parts, marks, strict=True):
        columns.append((_Each(len(part)) if part_marks is None else part_marks[:-1], before))
        before += len(part)
    return Joined([*columns, (_Each(1), before)], "<i8")


def part_rows(merge: Merge) -> list[tuple[str, ...]]:
    """Rows of a table with name, documents and tokens: a header, a row for each part, and one for the sum."""
    parts = zip(merge.parts, merge.documents, strict=True)
    rows = [(part.prefix.name, f"{count:,}", f"{part.total:,}") for part, count in parts]
    return [("part", "documents", "tokens"), *rows, ("all", f"{sum(merge.documents):,}", f"{merge.tokens:,}")]


def _log(merge: Merge, prefix: Path, sums: Sequence[Sequence[str]], verify: bool, seconds: float) -> bytes:
    """The merge log: the output, and its parts with hashes."""
    heads = ["BLAKE3 of .bin", "BLAKE3 of .mask"]
    digests = [tuple(heads[: len(sums)]), *zip(*sums, strict=True), ("",) * len(sums)]
    rows = [(*row, *columns) for row, columns in zip(part_rows(merge), digests, strict=True)]
    checked = "read back and equal" if verify else "not read back"
    lines = [
        f"{merge.folder.absolute()} -> {prefix.absolute()}",
        table(rows),
        *(f"note: {note}" for note in merge.notes),
        f"{size(merge.nbytes)} in {seconds:.1f} s, {checked}",
    ]
    return ("\n".join(lines) + "\n").encode()
