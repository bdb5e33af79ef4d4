"""Role bins of Megatron-LLM: `P-text.bin` has the tokens of conversations, `P-role.bin` the role of each token.

Both have an index, and the same sizes. Roles are 0 for the system, 1 for the user, 2 for the assistant; rows of several
conversations have the token <s> between two of them, with the role 1000.

The bytes are those of Megatron-LLM's own tool, also of the indexes: each has only the document mark 0, because that
tool never ends a document. The training that reads the files uses sizes and never marks (`InstructionDataset`); to
programs that use marks, these files have no document, like the tool's own files.

Intended differences:
* A content that spells a special token stays text; in the tool it becomes the token, so a content could open a turn.
* A malformed record is dropped and counted; in the tool it aborts the run and leaves short files that look complete. A
  conversation without turns is malformed; in the tool it becomes a <s> at the end of a row. A record needs no id.
* `P.jsonl` is not written: the bins contain everything in it, and the tool overwrites the input if P is its name.
* `P-text.json` records which tokenizer made the files, and what was dropped.

Facts: xingyaoww/Megatron-LLM 1b07577, tools/preprocess_instruct_data.py (`DatasetWriter`, `pack_docs`), megatron/data/
instruction_dataset.py (`Role`), megatron/tokenizer/tokenizer.py (`_SentencePieceTokenizer._initalize`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converters.common.atomic import synced
from converters.common.progress import Progress
from formats.errors import Interrupted, SourceError, UsageError
from train.data.packing.packing import Rows, longest_first
from train.data.tokens.encode import CHATML
from train.data.tokens.indexed import Sizes, best_dtype, bin_path, idx_path, write_index
from train.data.tokens.sidecar import Facts, facts_path
from train.data.tokens.tokenize import Request, put_in_place, staged, write_facts
from train.data.tokens.tokenizers import SentencePiece

NEW = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
"""Tokens that are added after the vocabulary, before tokens that the user names; not with `--no-new-tokens`."""
ROLE = np.dtype("<u2")
PACK_SEP = 1000
MARKS = np.zeros(1, np.int64)
"""The document marks in both indexes."""


@dataclass(frozen=True)
class Packing:
    """How conversations are packed into rows.

    Attributes:
        length: number of tokens of a row.
        separator: id of the token between two conversations.
        name: name of the separator token.
    """

    length: int
    separator: int
    name: str


def special_tokens(vocabulary: SentencePiece, extra: Sequence[str], new: bool) -> dict[str, int]:
    """The special tokens of a vocabulary; tokens that the vocabulary lacks get ids after its last piece.

    Args:
        vocabulary: the tokenizer, opened with `extra` and `NEW` as control tokens.
        extra: tokens that the user names.
        new: whether to add `NEW` too, and <PAD>, <BOS> and <EOS> where the model lacks them.

    Returns:
        Token ids by name, in the order in which the tokens are added.

    Raises:
        UsageError: a text could contain a token that marks turns.
    """
    missing = [token for token in CHATML if token not in extra]
    if missing:
        raise UsageError(
            f"--vocab-extra-ids-list {','.join(extra)} lacks {' and '.join(missing)}, which enclose each turn",
            f"--vocab-extra-ids-list '{','.join([*missing, *extra])}'",
        )
    model, size, ids = vocabulary.model, vocabulary.size, dict[str, int]()
    edge_tokens = {"<PAD>": model.pad_id(), "<BOS>": model.bos_id(), "<EOS>": model.eos_id()}
    own = [model.id_to_piece(number) if number >= 0 else name for name, number in edge_tokens.items()]
    for token, add in (*((token, new) for token in (*NEW, *own)), *((token, True) for token in extra)):
        piece_id = model.piece_to_id(token)
        if model.id_to_piece(piece_id) == token:
            if not (model.is_control(piece_id) or model.is_unused(piece_id)):
                raise UsageError(
                    f"{token} is an ordinary piece of {vocabulary.path}, id {piece_id}: text could become it"
                )
            ids[token] = piece_id
        elif add and token not in ids:
            ids[token] = size
            size += 1
    return ids


def full_size(vocabulary: SentencePiece, special: Mapping[str, int]) -> int:
    """Number of tokens of a vocabulary, including its special tokens."""
    return max(vocabulary.size, 1 + max(special.values()))


def separator(vocabulary: SentencePiece, special: Mapping[str, int]) -> tuple[int, str]:
    """Id and name of the token between conversations of a row: the BOS token.

    Raises:
        UsageError: the vocabulary has no BOS token.
    """
    number = vocabulary.model.bos_id()
    name = vocabulary.model.id_to_piece(number) if number >= 0 else "<BOS>"
    if name not in special:
        raise UsageError(
            f"{vocabulary.path} has no BOS token to put between packed conversations",
            "remove --no-new-tokens or --do-packing",
        )
    return special[name], name


def write_role_bins(request: Request, packing: Packing | None = None) -> Facts:
    """Write role bins.

    Args:
        request: the input and output; the prefix is P, and the job has special tokens.
        packing: how rows are packed, None for one conversation per row.

    Returns:
        The sidecar of the role bins; `counts` has documents, tokens, rows, what was cut, and dropped records by reason.

    Raises:
        OutputError: an output exists, or cannot be written.
        RefusedError: too many records are malformed.
        SourceError: no conversation is left.
        Interrupted: a signal came; the same call resumes.
    """
    prefix, staging = request.prefix, request.staging
    text, role = (prefix.with_name(f"{prefix.name}-{kind}") for kind in ("text", "role"))
    streams = {"bin": bin_path(text), "mask": bin_path(role)}
    others = {"json": facts_path(text), "role.idx": idx_path(role), "idx": idx_path(text)}
    dtype = best_dtype(request.job.vocabulary)
    with staged(request, streams | others) as (done, stopped):
        sizes: Sizes = np.memmap(staging / "sizes", "<i4", "r")
        counts = {"documents": len(sizes), "tokens": done.counts["tokens"]}
        if packing is not None:
            rows = longest_first(sizes, packing.length)
            with Progress("packing", sum(done.lengths[name] for name in streams), request.quiet) as progress:
                for name, mark in (("bin", dtype.type(packing.separator)), ("mask", ROLE.type(PACK_SEP))):
                    pieces = _rows(staging / name, mark.tobytes(), sizes, rows)
                    _write(staging / f"packed.{name}", pieces, stopped, progress)
            counts |= _cut(sizes, packing.length)
            sizes = _row_sizes(rows)
            counts |= {"rows": len(sizes), "tokens": int(sizes.sum(dtype=np.int64))}
            streams = {f"packed.{name}": path for name, path in streams.items()}
        write_index(staging / "role.idx", ROLE, sizes, MARKS)
        write_index(staging / "idx", dtype, sizes, MARKS)
        facts = write_facts(request, done, counts, streams)
        put_in_place(staging, streams | others)
    return facts


def _cut(sizes: Sizes, length: int) -> dict[str, int]:
    """Number of conversations longer than a row, and number of tokens that are cut off."""
    over = sizes[sizes > length]
    return {"cut": len(over), "cut_tokens": int((over - length).sum(dtype=np.int64))}


def _row_sizes(rows: Rows) -> Sizes:
    """Number of tokens of each row: those of its conversations, and the separators between them."""
    assert rows.lengths is not None
    sizes: Sizes = (np.add.reduceat(rows.lengths, rows.offsets[:-1]) + np.diff(rows.offsets) - 1).astype(np.int32)
    return sizes


def _rows(source: Path, mark: bytes, sizes: Sizes, rows: Rows) -> Iterator[bytes]:
    """The bytes of each row of a stream.

    Args:
        source: the stream, conversations concatenated.
        mark: bytes of the separator between two conversations of a row; as wide as a number of the stream.
        sizes: number of tokens of each conversation, int32[d].
        rows: which conversations share a row.
    """
    assert rows.lengths is not None
    width = len(mark)
    begins = (np.cumsum(sizes, dtype=np.int64) - sizes) * width
    with source.open("rb") as file:
        for first, stop in zip(rows.offsets.tolist(), rows.offsets[1:].tolist(), strict=False):
            places = begins[rows.documents[first:stop]].tolist()
            lengths = (rows.lengths[first:stop].astype(np.int64) * width).tolist()
            parts = [os.pread(file.fileno(), length, place) for place, length in zip(places, lengths, strict=True)]
            if [len(part) for part in parts] != lengths:
                raise SourceError(f"{source} became shorter while it was read", "run the same command again")
            yield mark.join(parts)


def _write(path: Path, pieces: Iterator[bytes], stopped: Callable[[], bool], progress: Progress) -> None:
    """Write pieces and fsync the file."""
    with synced(path) as file:
        for piece in pieces:
            if stopped():
                raise Interrupted("stopped while conversations were packed", "run the same command again to resume")
            file.write(piece)
            progress.advance(len(piece))
