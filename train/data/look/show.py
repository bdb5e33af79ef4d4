"""Prints documents for people: text, pieces and ids, with trained tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError
from train.data.tokens.documents import Documents
from train.data.tokens.loss_masks import Mask, fork_mask, megatron_llm_mask
from train.data.tokens.tokenizers import Vocabulary

TRAINED, MASKED = {"fg": "green", "bold": True}, {"fg": "bright_black"}


def lines_of(
    documents: Documents, number: int, vocabulary: Vocabulary | None, loss: str, compat: str | None, colour: bool
) -> Iterator[str]:
    """One document as a few lines of text.

    Args:
        documents: the token files.
        number: number of the document.
        vocabulary: the tokenizer; without it only ids are shown.
        loss: see `loss_masks.label_mask`.
        compat: neox or megatron-llm, whose mask is shown instead of ours; None for ours.
        colour: whether trained tokens are green; else they are between » and «.
    """
    tokens, _, _ = documents.span(number, number + 1)
    mask = documents.trained(number, number + 1, loss)
    other = None if compat is None else _other(documents, number, compat)
    shown = mask if other is None else other
    summary = f"{int(shown.sum())} trained"
    if documents.silent and loss != "all":
        hint = "--loss all" if vocabulary is not None else "--control-tokens, or --tokenizer"
        shown, summary = np.zeros_like(mask), f"it is not known which of them are trained: {hint}"
    yield f"document {number}, {len(tokens)} tokens, {summary}"
    if vocabulary is not None:
        _require(tokens, vocabulary, documents)
        yield "  text    " + _runs(shown, colour, lambda low, high: vocabulary.decode(tokens[low:high].tolist()))
        pieces = vocabulary.pieces(tokens.tolist())
        yield "  pieces  " + _runs(shown, colour, lambda low, high: " ".join(pieces[low:high]))
    yield "  ids     " + _runs(shown, colour, lambda low, high: " ".join(map(str, tokens[low:high].tolist())))
    if other is not None and not np.array_equal(mask, other):
        places = np.flatnonzero(mask != other)
        yield f"  differs from ours at {len(places)} tokens: {_listed(places)}"


def _other(documents: Documents, number: int, compat: str) -> Mask:
    tokens, _, place = documents.span(number, number + 1)
    if compat == "megatron-llm":
        if documents.roles is None:
            raise RefusedError(
                f"{documents.indexed.prefix} has no roles: the mask of Megatron-LLM needs P-text and P-role"
            )
        return megatron_llm_mask(documents.roles.tokens[place])
    user, assistant = documents.control.get("user"), documents.control.get("assistant")
    if user is None or assistant is None:
        raise RefusedError(
            f"{documents.indexed.prefix} has no control tokens for user and assistant",
            "name them: --control-tokens user=7,assistant=8",
        )
    mask: Mask = fork_mask(tokens[None, :], [user, user], [assistant])[0]
    return mask


def _runs(mask: Mask, colour: bool, text: Any) -> str:
    """The texts of runs of consecutive trained or masked tokens, joined and marked."""
    parts, low = [], 0
    for trained, group in groupby(mask.tolist()):
        high = low + len(list(group))
        part = text(low, high)
        if colour:
            parts.append(click.style(part, **(TRAINED if trained else MASKED)))
        else:
            parts.append(f"»{part}«" if trained else part)
        low = high
    return " ".join(parts)


def _require(tokens: NDArray[Any], vocabulary: Vocabulary, documents: Documents) -> None:
    if documents.roles is not None:
        return  # special tokens of roles may be beyond the last piece
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary.size:
        raise RefusedError(
            f"{documents.indexed.prefix} has the token {int(tokens.max())}, {vocabulary.path} has {vocabulary.size}: "
            "it is not the tokenizer that made it"
        )


def _listed(places: Sequence[int] | NDArray[Any]) -> str:
    return ", ".join(str(int(place)) for place in places[:10]) + (", …" if len(places) > 10 else "")
