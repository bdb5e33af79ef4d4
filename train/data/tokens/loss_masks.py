"""Loss masks: which labels are trained. All masks are booleans at the position of the token that is the label.

A label is trained iff, counted within its document:
* with control tokens: it is not in a turn of another role than the assistant (markers included), and does not open a
  turn. The marker that closes a reply, the end of the document and plain text are trained.
* with a chat template: it belongs to a generation block, as marked in `PREFIX.mask`.
The first token of a document is never a label. There is no padding.

`fork_mask` and `megatron_llm_mask` are the masks of two other programs, for users who continue a run of theirs.

Facts: tilde-nlp/llm-gpt-neox 374a5c6 megatron/utils.py, `get_ltor_masks_and_position_ids`; xingyaoww/Megatron-LLM
megatron/data/instruction_dataset.py, `instruction_collator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.tokens.encode import LAST_REPLY, REPLY, ROLE_NUMBERS

Tokens = NDArray[Any]
Mask = NDArray[np.bool_]


def label_mask(
    tokens: Tokens,
    sizes: NDArray[Any],
    control: Mapping[str, int],
    stored: NDArray[np.uint8] | None = None,
    loss: str = "assistant",
) -> Mask:
    """The loss mask of whole documents.

    Args:
        tokens: documents, concatenated, int[n].
        sizes: number of tokens of each document, none of them 0, int[d].
        control: id of the control token of each role; not used if there is a stored mask.
        stored: bits of `PREFIX.mask`, uint8[n], None without a mask.
        loss: which labels are trained: those of every reply (`assistant`), of the last reply (`last_turn`), or `all`.

    Returns:
        bool[n]: whether each token, as a label, is trained.
    """
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    if loss == "all":
        mask = np.ones(len(tokens), bool)
    elif stored is not None:
        mask = (stored & (LAST_REPLY if loss == "last_turn" else REPLY)) != 0
    else:
        mask = _control_mask(tokens, sizes, starts, control, loss == "last_turn")
    mask[starts] = False
    return mask


def _control_mask(
    tokens: Tokens, sizes: NDArray[Any], starts: NDArray[np.int64], control: Mapping[str, int], last: bool
) -> Mask:
    mask = np.ones(len(tokens), bool)
    for role, number in control.items():
        marks = tokens == number
        odd = _counts(marks, sizes, starts) & 1 == 1
        if role != "assistant":
            mask &= ~(odd | marks)
            continue
        opens = marks & odd
        mask &= ~opens
        if last:
            places = np.where(opens, np.arange(len(tokens)), -1)
            mask &= np.arange(len(tokens)) > np.repeat(np.maximum.reduceat(places, starts), sizes)
    return mask


def _counts(marks: Mask, sizes: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of marks in each document up to and including each token."""
    counted = np.cumsum(marks, dtype=np.int64)
    return counted - np.repeat(counted[starts] - marks[starts], sizes)


def fork_mask(
    rows: Tokens,
    pairs: Sequence[int] = (),
    alternating: Sequence[int] = (),
    individual: Sequence[int] = (),
    after_eod: int | None = None,
) -> Mask:
    """The mask of tilde-nlp's GPT-NeoX: marks are counted along the row, and padding is trained.

    Args:
        rows: packed rows, int[b, t].
        pairs: `loss_mask_pairs`: opener and closer in turn; if both are equal, occurrences alternate.
        alternating: `loss_mask_alternating_individual`: every odd occurrence is masked.
        individual: `loss_mask_individual`: tokens that are masked at any position.
        after_eod: the end-of-document token, with `eod_mask_loss`: the label after it is masked.

    Returns:
        bool[b, t]; the first column, which is not a label, is False.
    """
    blocked = np.zeros(rows.shape, bool)
    for opener, closer in zip(pairs[::2], pairs[1::2], strict=True):
        inside = _odd(rows == opener) if opener == closer else _open(rows, opener, closer)
        blocked |= inside
        blocked[:, 1:] |= inside[:, :-1]
    for number in alternating:
        marks = rows == number
        blocked |= marks & _odd(marks)
    for number in individual:
        blocked |= rows == number
    if after_eod is not None:
        blocked[:, 1:] |= rows[:, :-1] == after_eod
    blocked[:, 0] = True
    return ~blocked


def _odd(marks: Mask) -> Mask:
    inside: Mask = np.cumsum(marks, axis=1) & 1 == 1
    return inside


def _open(rows: Tokens, opener: int, closer: int) -> Mask:
    inside: Mask = np.cumsum(rows == opener, axis=1) > np.cumsum(rows == closer, axis=1)
    return inside


def megatron_llm_mask(roles: Tokens) -> Mask:
    """The mask of Megatron-LLM, which is taken at the input token, and so is one label late.

    Args:
        roles: a row of role ids, int[t], 2 for the assistant.

    Returns:
        bool[t]: whether Megatron-LLM trains each token as a label.
    """
    mask = np.zeros(len(roles), bool)
    mask[1:] = roles[:-1] == ASSISTANT
    return mask


ASSISTANT = ROLE_NUMBERS["assistant"]
