"""Documents of token files with their loss masks, whichever program wrote the files.

* `PREFIX.bin` of ours, GPT-NeoX or Megatron: replies are between control tokens, or `PREFIX.mask` marks them.
* `P-text.bin` and `P-role.bin` of Megatron-LLM: a second pair of files has the role of each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError, SourceError, UsageError
from train.data.tokens.indexed import AGAIN, Indexed, chunks, idx_path, open_indexed, prefix_of
from train.data.tokens.loss_masks import ASSISTANT, Mask, label_mask
from train.data.tokens.sidecar import Facts, mask_path, read_facts
from train.data.tokens.tokenizers import Vocabulary, control_ids, made_with

MASK_MOST = 3
"""The largest byte of a mask: both bits, `encode.REPLY` and `encode.LAST_REPLY`."""
TEXT, ROLE = "-text", "-role"
"""Ends of the names of role bins."""


@dataclass(frozen=True)
class Documents:
    """The documents of token files, and what marks the replies in them.

    Attributes:
        indexed: the token files.
        facts: the sidecar, None for files of other programs.
        control: id of the control token of each role; empty if something else marks replies.
        stored: the bytes of `PREFIX.mask`, uint8[tokens], None without a mask.
        roles: files with the role of each token, None without role bins.
    """

    indexed: Indexed
    facts: Facts | None
    control: Mapping[str, int]
    stored: NDArray[np.uint8] | None
    roles: Indexed | None

    @property
    def silent(self) -> bool:
        """Whether nothing in the files marks which tokens are replies."""
        plain = self.facts is not None and self.facts.plain
        return not (self.control or plain) and self.stored is None and self.roles is None

    def span(self, first: int, stop: int) -> tuple[NDArray[Any], NDArray[np.int32], slice]:
        """Tokens and sizes of consecutive documents, and the range of these tokens in the file."""
        sizes = np.array(self.indexed.sizes[first:stop])
        begin = int(self.indexed.pointers[first]) // self.indexed.dtype.itemsize if first < stop else 0
        place = slice(begin, begin + int(sizes.sum(dtype=np.int64)))
        return self.indexed.tokens[place], sizes, place

    def trained(self, first: int, stop: int, loss: str = "assistant") -> Mask:
        """Which tokens of consecutive documents are trained, as labels.

        Args:
            first: number of the first document.
            stop: end of the range, exclusive.
            loss: see `loss_masks.label_mask`.
        """
        tokens, sizes, place = self.span(first, stop)
        sizes = sizes[sizes > 0]
        stored = None if self.stored is None else self._sound(place)
        if self.roles is not None:
            stored = _from_roles(self.roles.tokens[place], sizes)
        return label_mask(tokens, sizes, self.control, stored, loss)

    def _sound(self, place: slice) -> NDArray[np.uint8]:
        """The mask bytes of a range of tokens, checked.

        Raises:
            SourceError: a byte has a bit that a mask does not have.
        """
        assert self.stored is not None
        values = self.stored[place]
        if len(values) and int(values.max()) > MASK_MOST:
            where = int(np.argmax(values > MASK_MOST))
            raise SourceError(
                f"{mask_path(self.indexed.prefix)} has the value {int(values[where])} at byte {place.start + where}: "
                f"a mask has 0 to {MASK_MOST}",
                AGAIN,
            )
        return values


def require_mask_length(indexed: Indexed) -> None:
    """Check that the mask beside token files, if there is one, has a byte for each token.

    Raises:
        SourceError: the mask has another length.
    """
    path = mask_path(indexed.prefix)
    if path.is_file() and path.stat().st_size != indexed.total:
        raise SourceError(f"{path} has {path.stat().st_size} bytes for {indexed.total} tokens", AGAIN)


def _from_roles(roles: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.uint8]:
    """The mask bits of tokens from their roles: replies, and the last reply of each document."""
    replies = roles == ASSISTANT
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    begins = replies & ~np.concatenate([[False], replies[:-1]])
    begins[starts] = replies[starts]
    places = np.where(begins, np.arange(len(roles)), -1)
    last = np.arange(len(roles)) >= np.repeat(np.maximum.reduceat(places, starts), sizes)
    bits: NDArray[np.uint8] = (replies + 2 * (replies & last)).astype(np.uint8)
    return bits


def open_documents(
    path: Path, vocabulary: Vocabulary | None = None, control: Mapping[str, int] | None = None
) -> Documents:
    """Open token files.

    Args:
        path: the prefix, with or without `.bin` or `.idx`.
        vocabulary: the tokenizer, checked against the sidecar.
        control: ids of control tokens, for files without a sidecar and without a tokenizer.

    Raises:
        SourceError: a file is missing, or does not fit the others.
        RefusedError: the files were made with another tokenizer, or do not contain the given control tokens.
    """
    prefix = prefix_of(path)
    indexed, facts = open_indexed(prefix), read_facts(prefix)
    roles = _roles(indexed)
    stored = None
    if mask_path(prefix).is_file():
        stored = np.memmap(mask_path(prefix), np.uint8, "r")
        require_mask_length(indexed)
    elif facts is not None and (facts.template is not None or facts.masked):
        raise SourceError(
            f"{mask_path(prefix)} is not there: it marks the trained tokens of {prefix}", "tokenize again"
        )
    if vocabulary is not None:
        _check_vocabulary(indexed, facts, vocabulary)
    control_tokens = dict(control or {})
    if facts is not None:
        if control_tokens and control_tokens != {role: facts.control.get(role) for role in control_tokens}:
            raise UsageError(
                f"{prefix} has the control tokens {dict(facts.control)}, not {control_tokens}", "leave them out"
            )
        control_tokens = dict(facts.control)
    elif vocabulary is not None:
        control_tokens = control_ids(vocabulary, control_tokens)
    if facts is None and control:
        _check_control(indexed, control_tokens)
    return Documents(indexed, facts, control_tokens, stored, roles)


def _check_control(indexed: Indexed, control_tokens: Mapping[str, int]) -> None:
    """Check that the control tokens occur in the files: otherwise all tokens would be trained as plain text."""
    lacking = {role: number for role, number in control_tokens.items() if role in ("user", "assistant")}
    for _, tokens in chunks(indexed.tokens):
        lacking = {role: number for role, number in lacking.items() if not (tokens == number).any()}
        if not lacking:
            return
    for role, number in lacking.items():
        raise RefusedError(
            f"no token of {indexed.prefix} is {number}, the given control token of the {role}",
            f"`train show {indexed.prefix} --tokenizer FILE` shows ids",
        )


def other_bin(prefix: Path) -> Path | None:
    """The prefix of the other one of role bins: P-role of P-text, and the reverse; None if there is none."""
    for own, other in ((TEXT, ROLE), (ROLE, TEXT)):
        place = prefix.with_name(prefix.name.removesuffix(own) + other)
        if prefix.name.endswith(own) and idx_path(place).is_file():
            return place
    return None


def _roles(indexed: Indexed) -> Indexed | None:
    """The role file of Megatron-LLM beside `P-text`, None if there is none."""
    other = other_bin(indexed.prefix) if indexed.prefix.name.endswith(TEXT) else None
    if other is None:
        return None
    roles = open_indexed(other)
    if not np.array_equal(roles.sizes, indexed.sizes):
        raise SourceError(f"{other} and {indexed.prefix} have documents of different lengths")
    return roles


def _check_vocabulary(indexed: Indexed, facts: Facts | None, vocabulary: Vocabulary) -> None:
    if facts is not None and not made_with(facts, vocabulary):
        raise RefusedError(
            f"{indexed.prefix} was made with another tokenizer than {vocabulary.path}: "
            f"{facts.vocabulary} tokens, BLAKE3 {facts.tokenizer[:12]}, not {vocabulary.size}, {vocabulary.digest[:12]}"
        )
