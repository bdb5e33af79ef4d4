"""A pack plan: which documents share a row. A training run makes a plan, or maps one that `train pack` has made.

A plan on disk is a folder:

    plan.json        where its token files are, their hashes, algorithm, capacity, seed, splits, counts
    documents.npy    int32[p]: document of each piece, in the order of the rows
    rows.npy         int64[r + 1]: first piece of each row
    pieces.npy       int32[p, 2]: first token and number of tokens of each piece; only where documents are cut

The tokens stay in the token files. A plan records hashes of its token files, and is refused for any other files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from converters.common.atomic import named, sync_path, synced, write_file
from formats.errors import OutputError, RefusedError, SourceError, UnsupportedError, UsageError, short
from train.data.packing.k_bin import k_bin
from train.data.packing.packing import Lengths, Rows, best_fit, concatenated, next_fit
from train.data.tokens.indexed import Indexed, bin_path, idx_path
from train.data.tokens.sidecar import mask_path

ALGORITHMS: Mapping[str, Callable[[Lengths, int, int], Rows]] = {
    "bfd": best_fit,
    "k_bin": k_bin,
    "overflow": next_fit,
    "packed": concatenated,
}
SPLITS = ("train", "validation", "test")
RECORD = ("made_from", "algorithm", "capacity", "seed", "splits", "counts")
"""Attributes of a plan that are saved in `plan.json`."""
FILES = {"plan.json", "documents.npy", "rows.npy", "pieces.npy"}
"""Names of all files that a plan's folder may have."""
LONGEST = 2**31 - 2
"""Number of tokens of the longest sequence: a row has one token more, and lengths are int32."""
SAMPLED = 256
"""Number of samples of 4 KiB of a large file that are hashed."""


@dataclass(frozen=True)
class Plan:
    """The rows of token files: which pieces of documents each row has.

    Attributes:
        prefix: prefix of the token files.
        made_from: hashes of the token files, by suffix.
        algorithm: a key of `ALGORITHMS`.
        capacity: number of tokens of a row: the sequence length and one more, which is only a label.
        seed: seed of the packing algorithm.
        splits: half-open range of rows of each split, by name.
        counts: documents, rows, tokens, fill, and what was left out.
        documents: document of each piece, int32[p].
        rows: first piece of each row, and p at the end, int64[r + 1].
        pieces: first token and number of tokens of each piece, int32[p, 2]; None if all documents are whole.
    """

    prefix: Path
    made_from: Mapping[str, str]
    algorithm: str
    capacity: int
    seed: int
    splits: Mapping[str, tuple[int, int]]
    counts: Mapping[str, Any]
    documents: NDArray[np.int32] = field(repr=False)
    rows: NDArray[np.int64] = field(repr=False)
    pieces: NDArray[np.int32] | None = field(repr=False, default=None)

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def overlong(self) -> str | None:
        """What became of documents longer than a row: drop, truncate, or cut over rows; None if there are none."""
        if not self.counts["overlong"]:
            return None
        return "cut" if self.algorithm == "packed" else "drop" if self.pieces is None else "truncate"

    def row(self, number: int, sizes: NDArray[Any]) -> list[tuple[int, int, int]]:
        """The pieces of a row: document, first token in that document, and number of tokens.

        Args:
            number: number of the row.
            sizes: number of tokens of each document.
        """
        begin, stop = int(self.rows[number]), int(self.rows[number + 1])
        documents = self.documents[begin:stop].tolist()
        if self.pieces is None:
            return [(document, 0, int(sizes[document])) for document in documents]
        cuts = self.pieces[begin:stop].tolist()
        return [(document, low, many) for document, (low, many) in zip(documents, cuts, strict=True)]

    def part(self, name: str, sizes: NDArray[Any]) -> Plan:
        """A plan with the rows of one split only.

        Args:
            name: name of the split.
            sizes: number of tokens of each document.

        Raises:
            RefusedError: the plan has no split of that name.
        """
        if name not in self.splits:
            raise RefusedError(
                f"the plan of {self.prefix} has the splits {', '.join(self.splits)}, none is named {name}",
                "a validation set has the name of its split: --data.validation '{validation: P.pack}'",
            )
        begin, stop = self.splits[name]
        rows = self.rows[begin : stop + 1]
        pieces = slice(int(rows[0]), int(rows[-1]))
        kept = _tokens(self.documents[pieces], None if self.pieces is None else self.pieces[pieces], sizes)
        return replace(self, rows=rows, counts={**self.counts, **_filling(kept, stop - begin, self.capacity)})


def _tokens(documents: NDArray[np.int32], pieces: NDArray[np.int32] | None, sizes: NDArray[Any]) -> int:
    return int((sizes[documents] if pieces is None else pieces[:, 1]).sum(dtype=np.int64))


def _filling(tokens: int, rows: int, capacity: int) -> dict[str, Any]:
    return {"rows": rows, "tokens": tokens, "fill": round(tokens / (rows * capacity), 6)}


def document_sizes(indexed: Indexed) -> NDArray[np.int32]:
    """Number of tokens of each document, where each sequence is a document.

    GPT-NeoX's merge tool and Megatron-LLM leave the list of documents empty, or keep the list of the first file.

    Raises:
        UnsupportedError: documents have several sequences.
    """
    marks = indexed.documents
    if len(marks) > 1 and len(marks) != len(indexed) + 1 and int(marks[-1]) == len(indexed):
        raise UnsupportedError(
            f"{indexed.prefix} has {len(indexed)} sequences in {len(marks) - 1} documents: it was split into sentences",
            "tokenize without splitting sentences",
        )
    return np.array(indexed.sizes)


def make_plan(
    indexed: Indexed,
    *,
    algorithm: str,
    seq_length: int,
    seed: int,
    overlong: str | None = None,
    split: Sequence[float] = (1.0,),
) -> Plan:
    """Pack the documents of token files into rows.

    Args:
        indexed: the token files.
        algorithm: a key of `ALGORITHMS`.
        seq_length: number of input tokens of a row; the row has one more token, the last label.
        seed: seed of the packing algorithm.
        overlong: how documents longer than a row are treated: drop, error or truncate. None drops them; `packed`,
            which cuts them over several rows, takes none but error.
        split: shares of train, validation and test, which are consecutive documents.

    Raises:
        RefusedError: a document is too long with `error`, or no document is left.
        UsageError: the algorithm does not support the arguments.
    """
    if seq_length > LONGEST:
        raise UsageError(f"a sequence has up to {LONGEST} tokens, not {seq_length}", "--seq-length 8192")
    sizes, capacity = document_sizes(indexed), seq_length + 1
    if algorithm == "k_bin" and len([share for share in split if share]) > 1:
        raise UsageError(
            "k_bin packs all documents whatever the split, so validation data would be trained",
            "pack with bfd, or tokenize validation data into a file of its own",
        )
    cut = algorithm == "packed"
    if cut and overlong in ("drop", "truncate"):
        raise UsageError(
            f"overlong {overlong} has no effect with packed, which cuts long documents over several rows",
            "remove it, or pack with bfd",
        )
    long, empty = sizes > capacity, sizes == 0
    if overlong == "error" and long.any():
        first = int(np.argmax(long))
        raise RefusedError(
            f"{int(long.sum())} of {len(sizes)} documents are longer than {capacity} tokens, such as document {first} "
            f"with {int(sizes[first])}",
            "--overlong drop leaves them out, --overlong truncate cuts them",
        )
    usable = ~empty if cut or overlong == "truncate" else ~(empty | long)
    fitting = sizes if cut else np.minimum(sizes, capacity)
    parts: list[Rows] = []
    splits, begin = {}, 0
    for name, (low, high) in zip(SPLITS, _bounds(len(sizes), split), strict=False):
        chosen = (np.flatnonzero(usable[low:high]) + low).astype(np.int32)
        if not len(chosen):
            continue
        packed = ALGORITHMS[algorithm](fitting[chosen], capacity, seed)
        parts.append(packed._replace(documents=chosen[packed.documents]))
        splits[name] = (begin, begin + len(packed.offsets) - 1)
        begin = splits[name][1]
    if not parts:
        raise RefusedError(f"none of {len(sizes)} documents of {indexed.prefix} fits a row of {capacity} tokens")
    documents, rows = _joined(parts)
    pieces = None
    if cut:
        pieces = np.concatenate([np.stack([part.begins, part.lengths], 1) for part in parts])  # type: ignore[list-item]
    elif overlong == "truncate" and long.any():
        pieces = np.stack([np.zeros(len(documents), np.int32), fitting[documents]], 1)
    counts = {
        "documents": len(sizes),
        "packed": int(usable.sum()),
        **_filling(_tokens(documents, pieces, sizes), len(rows) - 1, capacity),
        "empty": int(empty.sum()),
        "overlong": int(long.sum()),
        "overlong_tokens": int(sizes[long].sum(dtype=np.int64)),
    }
    prefix = indexed.prefix
    return Plan(prefix, hashes(prefix), algorithm, capacity, seed, splits, counts, documents, rows, pieces)


def _joined(parts: Sequence[Rows]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The rows of several splits, concatenated: document of each piece, and first piece of each row."""
    documents = np.concatenate([part.documents for part in parts])
    ends = np.cumsum([0, *(len(part.documents) for part in parts)])
    rows = [part.offsets[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
    return documents, np.concatenate([*rows, ends[-1:]]).astype(np.int64)


def _bounds(number: int, split: Sequence[float]) -> list[tuple[int, int]]:
    """The half-open range of documents of each split, as Megatron and GPT-NeoX cut them.

    The rounding error is subtracted from all ends but the first (`get_train_valid_test_split_`). In their code this may
    move an end below zero, or give a share of zero a document; here splits never overlap, and a share of zero is empty.
    """
    total = sum(split)
    if not 0 < total < math.inf or min(split) < 0 or len(split) > len(SPLITS):
        raise UsageError(f"a split is up to three shares such as 98,1,1, not {','.join(map(str, split))}")
    ends = [0]
    for share in split:
        ends.append(ends[-1] + round(share / total * number))
    over = ends[-1] - number
    first = next(place for place, share in enumerate(split) if share)
    ends = [0, *(max(0, end - over) if place >= first else 0 for place, end in enumerate(ends[1:]))]
    return list(pairwise(ends))


def hashes(prefix: Path) -> dict[str, str]:
    """BLAKE3 of the index, and of samples of the `.bin` and `.mask`, which are too large to hash whole; by suffix.

    The sidecar has the digest of all their bytes as they were written: see `Facts.content`.
    """
    index = blake3(max_threads=blake3.AUTO).update_mmap(idx_path(prefix)).hexdigest()
    digests = {"idx": index, "bin": _sampled(bin_path(prefix))}
    return digests | ({"mask": _sampled(mask_path(prefix))} if mask_path(prefix).is_file() else {})


def _sampled(path: Path) -> str:
    nbytes = path.stat().st_size
    hashed = blake3(str(nbytes).encode())
    with path.open("rb") as file:
        for place in range(SAMPLED):
            file.seek(max(0, nbytes - 4096) * place // (SAMPLED - 1))
            hashed.update(file.read(4096))
    return hashed.hexdigest()


def write_plan(plan: Plan, out: Path, force: bool = False) -> None:
    """Write a plan atomically.

    Raises:
        OutputError: the folder exists and `force` is not set, or it has other files than those of a plan.
    """
    if out.name in ("", ".."):
        raise UsageError(f"{out} cannot be the folder of a plan", "--out PLAN")
    staging = out.with_name(out.name + ".partial")
    if out.is_symlink() or out.exists():
        if not (out / "plan.json").is_file():
            raise OutputError(f"{out} exists", "choose another --out")
        if not force:
            raise OutputError(f"{out} exists", "--force replaces a plan")
        _require_own(out)
    if staging.is_symlink() or staging.exists():
        _require_own(staging)
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        for name in ("documents", "rows", "pieces"):
            if getattr(plan, name) is not None:
                _save(staging / f"{name}.npy", getattr(plan, name))
        prefix = plan.prefix.parent.resolve() / plan.prefix.name
        record = {"prefix": os.path.relpath(prefix, out.parent.resolve() / out.name)}  # both can be moved together
        record |= {name: getattr(plan, name) for name in RECORD}
        write_file(staging / "plan.json", (json.dumps(record, indent=1) + "\n").encode())
        sync_path(staging)
        if out.exists():
            shutil.rmtree(out)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    sync_path(out.parent)


def _require_own(folder: Path) -> None:
    """Check that a folder to be deleted has the files of a plan and nothing else."""
    if folder.is_symlink() or not folder.is_dir():
        raise OutputError(f"{folder} exists and is not a folder", "remove it, or choose another --out")
    other = sorted({path.name for path in folder.iterdir()} - FILES - {"plan.json.tmp"})
    if other:
        raise OutputError(
            f"{folder} holds {len(other)} files that are not part of a plan, such as {short(other[0])}",
            "move them away, or choose another --out",
        )


def _save(path: Path, array: NDArray[Any]) -> None:
    """Write an array as `np.save` does, but with errors that name the file and the reason."""
    array = np.ascontiguousarray(array)
    with named(path), synced(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.reshape(-1).view(np.uint8).data)


def is_plan(path: Path) -> bool:
    """Whether a path is that of a plan, not a prefix of token files."""
    return (path / "plan.json").is_file()


def open_plan(path: Path) -> Plan:
    """Open a plan with memory-mapped arrays.

    Raises:
        SourceError: the folder is not a plan, or is damaged, or the token files are not where they were.
        RefusedError: the token files are not those that the plan was made from.
    """
    try:
        record = json.loads((path / "plan.json").read_bytes())
        arrays = {
            name: np.load(path / f"{name}.npy", mmap_mode="r")
            for name in ("documents", "rows", "pieces")
            if name != "pieces" or (path / "pieces.npy").is_file()
        }
        prefix = Path(os.path.normpath(path.resolve() / record.pop("prefix")))
        plan = Plan(prefix, **record, **arrays)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise SourceError(f"{path} is not a pack plan: {short(str(error))}", "make one with train pack") from None
    if len(plan.rows) != plan.counts["rows"] + 1 or int(plan.rows[-1]) != len(plan.documents):
        raise SourceError(f"{path} is damaged: {len(plan.rows) - 1} rows of {plan.counts['rows']}")
    if not idx_path(prefix).is_file():
        raise SourceError(f"{path} was made from {prefix}, which is not there", "move both together, or pack again")
    digests = hashes(prefix)
    changed = sorted(name for name in {*digests, *plan.made_from} if digests.get(name) != plan.made_from.get(name))
    if changed:
        raise RefusedError(
            f"{path} was made from other files than {prefix}: .{', .'.join(changed)} differ", "pack again: train pack"
        )
    return plan
