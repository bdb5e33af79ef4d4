"""Encodes records as token ids, with control tokens or for role bins, and marks which tokens are replies.

Without a chat template a turn is its role's control token, the content, and the control token again; every content is
encoded separately, as preprocess_sft.py of tilde-nlp's GPT-NeoX does: SentencePiece gives each content its own prefix.

In role bins a turn has the form of ChatML, and each token has the role of its turn.

`template_encoder.py` encodes records with a chat template.

Facts: preprocess_sft.py (tilde-nlp/llm-gpt-neox 374a5c6, `Encoder.encode`); xingyaoww/Megatron-LLM 1b07577,
`format_message` of tools/preprocess_instruct_data.py, `Role` of megatron/data/instruction_dataset.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.tokens.records import Record
from train.data.tokens.tokenizers import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

REPLY, LAST_REPLY = 1, 2
"""Bits of a mask: the token belongs to a reply; the token belongs to the last reply of its document."""
CHATML = ("<|im_start|>", "<|im_end|>")
ROLE_NUMBERS = {"system": 0, "user": 1, "assistant": 2}
"""Role: its number in role bins."""


class Encoded(NamedTuple):
    """Documents as tokens.

    Attributes:
        ids: the tokens of all documents, int32.
        sizes: number of tokens of each document.
        mask: bits `REPLY` and `LAST_REPLY` of each token, uint8; in role bins the number of the token's role, uint16;
            None where control tokens determine the mask.
        refused: index and reason of each record that became no document.
        counts: numbers of occurrences of the keys of `LOST`, and of `SPLIT`, in `template_encoder.py`.
    """

    ids: NDArray[np.int32]
    sizes: list[int]
    mask: NDArray[np.uint8] | NDArray[np.uint16] | None
    refused: list[tuple[int, str]]
    counts: Mapping[str, int] = MappingProxyType({})


Encoder = Callable[[Sequence[Record]], Encoded]


def control_encoder(
    vocabulary: Vocabulary, control: Mapping[str, int], eod: int | None, masked: bool = False
) -> Encoder:
    """A function that encodes dialogues with control tokens.

    Args:
        vocabulary: the tokenizer.
        control: id of the control token of each role.
        eod: id of the end-of-document token, None to append none.
        masked: whether to return the mask too, because records may exclude replies from the training.
    """
    marks = {role: np.array([number], np.int32) for role, number in control.items()}
    end = np.array([] if eod is None else [eod], np.int32)
    guarded = bool(vocabulary.special.any())

    def encode(records: Sequence[Record]) -> Encoded:
        encoded = iter(vocabulary.encode([text for record in records for text in record.contents]))
        pieces: list[NDArray[np.int32]] = [end[:0]]
        bits: list[int] = []
        runs: list[int] = []
        sizes, refused = [], []
        for place, record in enumerate(records):
            encoded_contents = [next(encoded) for _ in record.contents]
            size = sum(map(len, encoded_contents)) + 2 * len(record.roles)
            if not size or (guarded and any(vocabulary.special[ids].any() for ids in encoded_contents)):
                refused.append((place, "literal" if size else "nothing"))
                continue
            if record.roles:
                pieces += chain.from_iterable(
                    (marks[role], ids, marks[role]) for role, ids in zip(record.roles, encoded_contents, strict=True)
                )
            else:
                pieces += encoded_contents
            pieces.append(end)
            sizes.append(size + len(end))
            if masked:
                for bit, run in _runs_of(record, [len(ids) for ids in encoded_contents], len(end)):
                    bits.append(bit)
                    runs.append(run)
        mask = np.repeat(np.array(bits, np.uint8), runs) if masked else None
        return Encoded(np.concatenate(pieces), sizes, mask, refused)

    return encode


def _runs_of(record: Record, lengths: Sequence[int], ending: int) -> Iterator[tuple[int, int]]:
    """Run lengths of the mask of a record with control tokens, (bits, tokens), equal to `loss_masks.label_mask`.

    Args:
        record: the record.
        lengths: number of tokens of each content.
        ending: number of tokens that end the document.
    """
    if not record.roles:
        yield REPLY | LAST_REPLY, sum(lengths) + ending
        return
    bits = reply_bits(record)
    for number, length in enumerate(lengths):
        yield 0, 1
        yield bits.get(number, 0), length + 1
    yield end_bits(record), ending


def reply_bits(record: Record) -> dict[int, int]:
    """The mask bits of each reply, by the number of its turn: 0 for a reply that is not trained, even the last one."""
    replies = [number for number, role in enumerate(record.roles) if role == "assistant"]
    bits = dict.fromkeys(replies, REPLY) | dict.fromkeys(replies[-1:], REPLY | LAST_REPLY)
    return bits | dict.fromkeys(record.left_out, 0)


def end_bits(record: Record) -> int:
    """The mask bits of the end-of-document token: those of the last reply, if the record excludes replies."""
    return list(reply_bits(record).values() or [0])[-1] if record.left_out else REPLY | LAST_REPLY


def role_encoder(vocabulary: Vocabulary, opener: int, closer: int) -> Encoder:
    """A function that encodes conversations for role bins.

    A turn is <|im_start|>, the name of its role and its content in one piece, <|im_end|> and the end of a line.

    Args:
        vocabulary: the tokenizer.
        opener: id of <|im_start|>.
        closer: id of <|im_end|>.
    """
    end = (closer, *vocabulary.encode(["\n"])[0])

    def encode(records: Sequence[Record]) -> Encoded:
        turns = [turn for record in records for turn in zip(record.roles, record.contents, strict=True)]
        encoded = vocabulary.encode([f"{role}\n{content}" for role, content in turns])
        lengths = np.array([1 + len(ids) + len(end) for ids in encoded], np.int64)
        ids = chain.from_iterable((opener, *ids, *end) for ids in encoded)
        numbers = np.array([ROLE_NUMBERS[role] for role, _ in turns], "<u2")
        places = np.cumsum([0, *(len(record.roles) for record in records)])
        sizes = np.diff(np.concatenate([[0], np.cumsum(lengths)])[places]).tolist()
        return Encoded(np.fromiter(ids, np.int32, lengths.sum()), sizes, np.repeat(numbers, lengths), [])

    return encode
