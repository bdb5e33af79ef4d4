"""Rows as tensors. Documents lie behind each other without padding, each predicts its own next tokens only.

The last token of a document is nobody's input and the first nobody's label, so a row has one input less than tokens for
each document: no label ever crosses a boundary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats.errors import RefusedError, SourceError
from train.data.packing.pack_plan import Plan, is_plan, make_plan, open_plan
from train.data.tokens.documents import Documents, open_documents
from train.data.tokens.tokenizers import FILES, made_with, open_vocabulary
from train.settings.batching import shares
from train.settings.config import Data

IGNORED = -100
"""A label that is not trained (the default of torch.nn.functional.cross_entropy)."""
LARGEST = 2**31
"""No vocabulary has so many tokens."""
CHUNK = 2048
"""Tokens whose logits are held at a time: a vocabulary of 131,072 takes 1 GiB for them in float32."""


class Flat(NamedTuple):
    """Rows of a micro-batch, flattened.

    Attributes:
        input_ids: int64[n].
        labels: the next token, or `IGNORED`, int64[n].
        position_ids: from 0 in each document, int64[n].
        cu_seqlens: where documents begin, and n, int32[d + 1].
        longest: inputs of the longest document, 0 if there is none.
        trained: labels that are trained.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    longest: int
    trained: int

    @property
    def tokens(self) -> int:
        """Inputs that belong to a document."""
        return len(self.input_ids) if self.longest else 0


@dataclass(frozen=True)
class Rows:
    """The packed rows of one or several token files.

    Attributes:
        documents: the files.
        plans: the rows of each.
        ends: first row of each file, and their number.
        loss: what is trained, see `masks.label_mask`.
        vocabulary: rows of the model's embedding, where that is known: larger ids are refused.
        positions: tokens that the model was made for, where that is known: longer documents are told.
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
        """What became of documents that are longer than a row, or than the model knows; empty if there are none."""
        many, tokens = (sum(plan.counts[key] for plan in self.plans) for key in ("overlong", "overlong_tokens"))
        told = []
        if many and all(plan.algorithm != "packed" for plan in self.plans):
            done = "left out" if all(plan.pieces is None for plan in self.plans) else "cut"
            told.append(f"{many} documents with {tokens} tokens are longer than a row: {done}")
        if self.longest > self.positions:
            told.append(f"documents have up to {self.longest} inputs, the model was made for {self.positions}")
        return "; ".join(told)

    @property
    def longest(self) -> int:
        """The most inputs that a document can have in a row."""
        pairs = zip(self.documents, self.plans, strict=True)
        return max((int(lengths(*pair).clip(max=pair[1].capacity).max(initial=1)) - 1 for pair in pairs), default=0)

    def within(self, positions: int | None, learned: bool) -> Rows:
        """These rows for a model.

        Args:
            positions: how many it was made for, None where that is not known.
            learned: whether it has a vector for each, and none for others.

        Raises:
            RefusedError: a document needs others.
        """
        if positions is not None and learned and self.longest > positions:
            raise RefusedError(
                f"documents have up to {self.longest} inputs, the model has vectors of {positions} positions",
                f"--data.seq_length {positions}",
            )
        return replace(self, positions=positions or LARGEST)

    @property
    def digest(self) -> str:
        """What the rows are made of: hashes of the files, and everything that decides which documents share a row."""
        told = [sorted(one.control.items()) for one in self.documents if one.facts is None and one.control]
        found = blake3(repr([[sorted(plan.made_from.items()) for plan in self.plans], self.loss, *told]).encode())
        for array in (one for plan in self.plans for one in (plan.documents, plan.rows, plan.pieces)):
            found.update(b"" if array is None else np.ascontiguousarray(array).view(np.uint8).data)
        return found.hexdigest()

    def flat(self, numbers: Sequence[int]) -> Flat:
        """Some rows, flattened; no rows give one input that trains nothing, because every rank takes every step."""
        pieces = [piece for number in numbers for piece in self._pieces(number)]
        pieces = [(tokens, mask) for tokens, mask in pieces if len(tokens) > 1]
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
        )

    def _pieces(self, number: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Tokens and masks of the documents of a row."""
        file = bisect_right(self.ends, number) - 1
        documents, plan = self.documents[file], self.plans[file]
        found = []
        for document, low, many in plan.row(number - self.ends[file], documents.indexed.sizes):
            tokens = documents.indexed[document][low : low + many].astype(np.int64)
            if int(tokens.max()) >= self.vocabulary:
                raise RefusedError(
                    f"document {document} of {documents.indexed.prefix} has the token {int(tokens.max())}, "
                    f"the model's embedding {self.vocabulary} rows",
                    "tokenize with the model's own tokenizer",
                )
            found.append((tokens, documents.trained(document, document + 1, self.loss)[low : low + many]))
        return found


def lengths(documents: Documents, plan: Plan) -> NDArray[Any]:
    """Tokens of each document that is trained; cut over several rows, it counts as the whole one."""
    sizes = documents.indexed.sizes
    if plan.algorithm == "packed":
        return np.asarray(sizes)
    taken = slice(int(plan.rows[0]), int(plan.rows[-1]))
    return sizes[plan.documents[taken]] if plan.pieces is None else plan.pieces[taken, 1]


def open_rows(data: Data, paths: Sequence[Path], seed: int, split: str = "train") -> Rows:
    """Pack token files.

    Args:
        data: the settings.
        paths: prefixes of token files, or plans of `train pack`.
        seed: of the packer.
        split: which rows of a plan; of files all are taken.

    Raises:
        RefusedError: nobody knows which tokens are replies, or a plan is for other rows.
    """
    opened = [_opened(data, path, seed, split) for path in paths]
    documents, plans = [one for one, _ in opened], [plan for _, plan in opened]
    for one in documents:
        if one.silent and data.loss != "all":
            raise RefusedError(
                f"{one.indexed.prefix} does not tell which of its tokens are replies",
                "name its control tokens, --data.control_tokens '{user: 7, assistant: 8}', or train all of its tokens, "
                "--data.loss all",
            )
    return Rows(documents, plans, shares([len(plan) for plan in plans]), data.loss)


def _opened(data: Data, path: Path, seed: int, split: str) -> tuple[Documents, Plan]:
    if not is_plan(path):
        one = open_documents(path, None, data.control_tokens)
        return one, make_plan(
            one.indexed, algorithm=data.packing, seq_length=data.seq_length, seed=seed, overlong=data.overlong
        )
    plan = open_plan(path)
    for name, wanted, held in (
        ("seq_length", data.seq_length, plan.capacity - 1),
        ("packing", data.packing if "packing" in data.model_fields_set else plan.algorithm, plan.algorithm),
    ):
        if wanted != held:
            hint = f"--data.{name} {held}, or pack again"
            raise RefusedError(f"{path} has rows of {name} {held}, not {wanted}", hint)
    one = open_documents(plan.prefix, None, data.control_tokens)
    return one, plan.part(split, one.indexed.sizes)


def check_tokenizer(files: Iterable[Documents], folder: Path) -> None:
    """See that the ids of token files are those of a model; of files that do not tell, nobody knows.

    Args:
        files: the token files.
        folder: the model's; without a tokenizer that can be read there is nothing to compare. (tokenizer.model of some
            models is tiktoken's.)

    Raises:
        RefusedError: a file was made with another tokenizer.
    """
    held = []
    for name in FILES:
        if (folder / name).is_file():
            with suppress(SourceError):
                held.append(open_vocabulary(folder / name))
    for one in files:
        facts = one.facts
        if facts is not None and held and not any(made_with(facts, known) for known in held):
            raise RefusedError(
                f"{one.indexed.prefix} was made with another tokenizer, of {facts.vocabulary} tokens, than that of "
                f"{folder}, of {held[0].size}: its ids mean something else to the model",
                f"train tokenize --tokenizer {folder}",
            )
