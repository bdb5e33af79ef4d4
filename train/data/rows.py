"""Packed rows as arrays. Documents are contiguous, without padding; each document predicts only its own next tokens.

The last token of a document is never an input and the first is never a label, so each document has one input less than
tokens: no label crosses a document boundary.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats.errors import RefusedError, SourceError
from train.data.packing.pack_plan import Plan, hashes, is_plan, make_plan, open_plan
from train.data.tokens.documents import Documents, open_documents
from train.data.tokens.tokenizers import FILES, made_with, open_vocabulary
from train.settings.batching import shares
from train.settings.config import Data

IGNORED = -100
"""The value of a label that is not trained (the default of torch.nn.functional.cross_entropy)."""
LARGEST = 2**31
"""A number that is larger than any vocabulary and any number of positions."""
CHUNK = 2048
"""Number of tokens whose logits are in memory at once: with a vocabulary of 131,072 they take 1 GiB in float32."""


class Keys(NamedTuple):
    """Which keys a part of flattened rows needs: those of its documents, up to the last token of the part.

    Attributes:
        begin: where the first of these documents begins in the rows.
        stop: where the part ends.
        cu_seqlens: where documents begin, counted from `begin`, and their end, int32[d + 1].
        longest: number of keys of the longest document.
    """

    begin: int
    stop: int
    cu_seqlens: NDArray[np.int32]
    longest: int


class Flat(NamedTuple):
    """Rows of a micro-batch, flattened; or a part of them.

    Attributes:
        input_ids: int64[n].
        labels: the next token, or `IGNORED`, int64[n].
        position_ids: positions, which start at 0 in each document, int64[n].
        cu_seqlens: where documents begin, and n, int32[d + 1].
        longest: number of inputs of the longest document, 0 if there is no document.
        trained: number of trained labels.
        rows: where rows begin, and n; empty for a single row.
        padding: number of tokens at the end that belong to no document.
        keys: the keys that a part needs; None for whole rows.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    longest: int
    trained: int
    rows: Sequence[int] = ()
    padding: int = 0
    keys: Keys | None = None

    @property
    def tokens(self) -> int:
        """Number of input tokens that belong to a document."""
        return len(self.input_ids) - self.padding if self.longest else 0


@dataclass(frozen=True)
class Rows:
    """The packed rows of one or several token files.

    Attributes:
        documents: the documents of each file.
        plans: the pack plan of each file.
        ends: first row of each file, and the number of rows of all files.
        loss: which labels are trained, see `loss_masks.label_mask`.
        vocabulary: number of rows of the model's embedding, if known: larger ids are refused.
        positions: maximum number of positions of the model, if known: `overlong` notes longer documents.
    """

    documents: Sequence[Documents]
    plans: Sequence[Plan]
    ends: Sequence[int]
    loss: str
    vocabulary: int = LARGEST
    positions: int = LARGEST

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def overlong(self) -> str:
        """A note on documents that are longer than a row, or than the model's positions; empty if there are none."""
        many, tokens = (sum(plan.counts[key] for plan in self.plans) for key in ("overlong", "overlong_tokens"))
        notes = []
        if many and all(plan.algorithm != "packed" for plan in self.plans):
            done = "left out" if all(plan.pieces is None for plan in self.plans) else "cut"
            notes.append(f"{many} documents with {tokens} tokens are longer than a row: {done}")
        if self.longest > self.positions:
            notes.append(f"documents have up to {self.longest} inputs, the model was made for {self.positions}")
        return "; ".join(notes)

    @property
    def longest(self) -> int:
        """Number of inputs of the longest document in the rows."""
        pairs = zip(self.documents, self.plans, strict=True)
        return max((int(lengths(*pair).clip(max=pair[1].capacity).max(initial=1)) - 1 for pair in pairs), default=0)

    def within(self, positions: int | None, learned: bool) -> Rows:
        """These rows with the model's number of positions.

        Args:
            positions: maximum number of positions of the model, None if not known.
            learned: whether the model has learned position embeddings, and so none beyond `positions`.

        Raises:
            RefusedError: a document needs positions beyond the learned ones.
        """
        if positions is not None and learned and self.longest > positions:
            raise RefusedError(
                f"documents have up to {self.longest} inputs, the model has vectors of {positions} positions",
                f"--data.seq_length {positions}",
            )
        return replace(self, positions=positions or LARGEST)

    @property
    def digest(self) -> str:
        """Digest of the rows: hashes of the files, and everything that determines which documents share a row."""
        controls = [
            sorted(documents.control.items())
            for documents in self.documents
            if documents.facts is None and documents.control
        ]
        digest = blake3(repr([[sorted(plan.made_from.items()) for plan in self.plans], self.loss, *controls]).encode())
        for array in chain.from_iterable((plan.documents, plan.rows, plan.pieces) for plan in self.plans):
            digest.update(b"" if array is None else np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    @property
    def sidecars(self) -> str:
        """Digest of what is beside the tokens and marks replies: the sidecar of each file, and samples of its roles."""
        said = [
            [documents.facts and documents.facts.known, documents.roles and hashes(documents.roles.prefix)]
            for documents in self.documents
        ]
        return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def flat(self, numbers: Sequence[int]) -> Flat:
        """Some rows, flattened. No rows give one untrained input, because every rank takes part in every step."""
        rows = [[piece for piece in self._pieces(number) if len(piece[0]) > 1] for number in numbers]
        pieces = [piece for row in rows for piece in row]
        if not pieces:
            zero = np.zeros(1, np.int64)
            return Flat(zero, zero + IGNORED, zero, np.array([0, 1], np.int32), 0, 0)
        sizes = [len(tokens) - 1 for tokens, _ in pieces]
        labels = np.concatenate([np.where(mask[1:], tokens[1:], IGNORED) for tokens, mask in pieces])
        return Flat(
            np.concatenate([tokens[:-1] for tokens, _ in pieces]),
            labels,
            np.concatenate([np.arange(size) for size in sizes]),
            np.array(shares(sizes), np.int32),
            max(sizes),
            int((labels != IGNORED).sum()),
            shares([sum(len(tokens) - 1 for tokens, _ in row) for row in rows]),
        )

    def _pieces(self, number: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Tokens and loss mask of each document of a row."""
        file = bisect_right(self.ends, number) - 1
        documents, plan = self.documents[file], self.plans[file]
        pieces = []
        for document, low, many in plan.row(number - self.ends[file], documents.indexed.sizes):
            tokens = documents.indexed[document][low : low + many].astype(np.int64)
            if int(tokens.max()) >= self.vocabulary:
                raise RefusedError(
                    f"document {document} of {documents.indexed.prefix} has the token {int(tokens.max())}, "
                    f"the model's embedding {self.vocabulary} rows",
                    "tokenize with the model's own tokenizer",
                )
            pieces.append((tokens, documents.trained(document, document + 1, self.loss)[low : low + many]))
        return pieces


def lengths(documents: Documents, plan: Plan) -> NDArray[Any]:
    """Number of tokens of each document in the rows; a document that is cut over several rows counts as a whole."""
    sizes = documents.indexed.sizes
    if plan.algorithm == "packed":
        return np.asarray(sizes)
    pieces = slice(int(plan.rows[0]), int(plan.rows[-1]))
    return sizes[plan.documents[pieces]] if plan.pieces is None else plan.pieces[pieces, 1]


def open_rows(data: Data, paths: Sequence[Path], seed: int, split: str = "train") -> Rows:
    """Open token files and pack them into rows, or open their plans.

    Args:
        data: the settings.
        paths: prefixes of token files, or plans of `train pack`.
        seed: seed of the packing algorithm.
        split: name of the split of a plan; of token files all rows are taken.

    Raises:
        RefusedError: it is not known which tokens are replies, or a plan has other rows than the settings.
    """
    opened = [_opened(data, path, seed, split) for path in paths]
    documents, plans = [documents for documents, _ in opened], [plan for _, plan in opened]
    for file in documents:
        if file.silent and data.loss != "all":
            raise RefusedError(
                f"{file.indexed.prefix} does not say which of its tokens are replies",
                "name its control tokens, --data.control_tokens '{user: 7, assistant: 8}', or train all of its tokens, "
                "--data.loss all",
            )
    return Rows(documents, plans, shares([len(plan) for plan in plans]), data.loss)


def _opened(data: Data, path: Path, seed: int, split: str) -> tuple[Documents, Plan]:
    if not is_plan(path):
        documents = open_documents(path, None, data.control_tokens)
        return documents, make_plan(
            documents.indexed,
            algorithm=data.packing or "bfd",
            seq_length=data.seq_length,
            seed=seed,
            overlong=data.overlong,
        )
    plan = open_plan(path)
    for name, expected, actual in (
        ("seq_length", data.seq_length, plan.capacity - 1),
        ("packing", data.packing or plan.algorithm, plan.algorithm),
    ):
        if expected != actual:
            hint = f"--data.{name} {actual}, or pack again"
            raise RefusedError(f"{path} has rows of {name} {actual}, not {expected}", hint)
    if data.overlong and plan.overlong and data.overlong != plan.overlong:
        raise RefusedError(
            f"{path} has {plan.counts['overlong']} documents longer than a row with overlong {plan.overlong}, not "
            f"{data.overlong}",
            f"leave data.overlong out, or pack again: train pack --overlong {data.overlong}",
        )
    documents = open_documents(plan.prefix, None, data.control_tokens)
    return documents, plan.part(split, documents.indexed.sizes)


def check_tokenizer(files: Iterable[Documents], folder: Path) -> None:
    """Check that token files were made with a model's tokenizer; files without a sidecar are not checked.

    Args:
        files: the token files.
        folder: folder of the model; nothing is compared if its tokenizer cannot be read (tokenizer.model of some models
            is tiktoken's).

    Raises:
        RefusedError: a file was made with another tokenizer.
    """
    known_tokenizers = []
    for name in FILES:
        if (folder / name).is_file():
            with suppress(SourceError):
                known_tokenizers.append(open_vocabulary(folder / name))
    for documents in files:
        facts = documents.facts
        if (
            facts is not None
            and known_tokenizers
            and not any(made_with(facts, tokenizer) for tokenizer in known_tokenizers)
        ):
            raise RefusedError(
                f"{documents.indexed.prefix} was made with another tokenizer, of {facts.vocabulary} tokens, than that "
                f"of {folder}, of {known_tokenizers[0].size}: its ids mean something else to the model",
                f"train tokenize --tokenizer {folder}",
            )
