"""Records to token ids, and for chat templates the loss mask.

Without a chat template a turn is its role's control token, the content, and the control token again; every content is
encoded separately, as preprocess_sft.py of tilde-nlp's GPT-NeoX does: SentencePiece gives each content its own prefix.

In role bins a turn has the form of ChatML, and each token has the role of its turn.

With a chat template the text of a dialogue is encoded as transformers does (`apply_chat_template`), except that text of
the template and contents of turns are kept apart: a content that spells a control token stays text.

Facts: preprocess_sft.py (tilde-nlp/llm-gpt-neox 374a5c6, `Encoder.encode`); transformers 5.23.0
tokenization_utils_base.py, `apply_chat_template`: a token belongs to a generation block if any of its characters does;
xingyaoww/Megatron-LLM 1b07577, `format_message` of tools/preprocess_instruct_data.py, `Role` of
megatron/data/instruction_dataset.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError, SourceError
from train.data.tokens.records import Malformed, Record
from train.data.tokens.tokenizers import Fast, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.assets.chat_template import Probe

REPLY, LAST_REPLY = 1, 2
"""Bits of a mask: the token belongs to a reply; to the last reply."""
CHATML = ("<|im_start|>", "<|im_end|>")
ROLE_NUMBERS = {"system": 0, "user": 1, "assistant": 2}
"""Role numbers in role bins."""
PROBES = ("a", " a", "a ", "\n", "\n\nHello", "don't  stop", "ā", "2+2=4.", " \t x \n")
"""Texts that show whether a tokenizer's encoding of a text depends on a control token beside it."""


class Encoded(NamedTuple):
    """Documents as tokens.

    Attributes:
        ids: the tokens of all documents, int32.
        sizes: tokens of each document.
        mask: bits `REPLY` and `LAST_REPLY` of each token, uint8; in role bins the number of its role, uint16; None
            where control tokens always determine it.
        refused: index and reason of records that became no document.
        altered: documents in which the chat template leaves out or changes a message.
    """

    ids: NDArray[np.int32]
    sizes: list[int]
    mask: NDArray[np.uint8] | NDArray[np.uint16] | None
    refused: list[tuple[int, str]]
    altered: int = 0


Encoder = Callable[[Sequence[Record]], Encoded]


def control_encoder(
    vocabulary: Vocabulary, control: Mapping[str, int], eod: int | None, masked: bool = False
) -> Encoder:
    """The function that encodes dialogues with control tokens.

    Args:
        vocabulary: the tokenizer.
        control: role to the id of its token.
        eod: id of the end-of-document token, None for none.
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
        lengths: tokens of each content.
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
    """The bits of each reply by the number of its turn: 0 for one that is not trained, even if it is the last."""
    replies = [number for number, role in enumerate(record.roles) if role == "assistant"]
    bits = dict.fromkeys(replies, REPLY) | dict.fromkeys(replies[-1:], REPLY | LAST_REPLY)
    return bits | dict.fromkeys(record.left_out, 0)


def end_bits(record: Record) -> int:
    """The bits of the end-of-document token: those of the last reply."""
    return list(reply_bits(record).values() or [0])[-1] if record.left_out else REPLY | LAST_REPLY


def role_encoder(vocabulary: Vocabulary, opener: int, closer: int) -> Encoder:
    """The function that encodes conversations for role bins.

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


@dataclass(frozen=True)
class TemplateEncoder:
    """Encodes dialogues with a chat template.

    Attributes:
        vocabulary: the tokenizer.
        template: the text of the chat template.
        eod: id of the token to append to documents that do not end with it, None for none.
    """

    vocabulary: Fast
    template: str
    eod: int | None
    separable: bool = field(init=False)
    special: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        ids, special = self.vocabulary.ids, self.vocabulary.special
        names = sorted((name for name in self.vocabulary.added if special[ids[name]]), key=len, reverse=True)
        pattern = "|".join(map(re.escape, names)) or "(?!)"
        object.__setattr__(self, "special", re.compile(f"({pattern})"))
        object.__setattr__(self, "separable", all(map(self._separable, names[:64])))

    def __call__(self, records: Sequence[Record]) -> Encoded:
        """Encode records; those that the template refuses become no document."""
        ids: list[Sequence[int]] = []
        masks: list[NDArray[np.uint8]] = []
        refused: list[tuple[int, str]] = []
        altered = 0
        for place, record in enumerate(records):
            try:
                token_ids, mask, whole = self._document(record)
            except Malformed as reason:
                refused.append((place, reason.reason))
                continue
            if not token_ids:
                refused.append((place, "nothing"))
                continue
            if self.eod is not None and token_ids[-1] != self.eod:
                token_ids, mask = [*token_ids, self.eod], np.append(mask, np.uint8(end_bits(record)))
            ids.append(token_ids)
            masks.append(mask)
            altered += not whole
        sizes = [len(mask) for mask in masks]
        flat = np.fromiter(chain.from_iterable(ids), np.int32, sum(sizes))
        return Encoded(flat, sizes, np.concatenate(masks) if masks else np.empty(0, np.uint8), refused, altered)

    def prompt(self, record: Record) -> list[int]:
        """The prompt tokens for the next reply of a dialogue.

        Raises:
            Malformed: the template refuses the turns (its error is the cause), or contents cannot be kept apart.
        """
        return self._document(record, asking=True)[0]

    def _document(self, record: Record, asking: bool = False) -> tuple[list[int], NDArray[np.uint8], bool]:
        """Tokens and mask of one record, and whether every message is in them as a whole."""
        if not record.roles:
            ids = self._plain(record.contents[0]).ids
            return ids, np.full(len(ids), REPLY | LAST_REPLY, np.uint8), True
        spelled = [self.special.search(text) for text in record.contents]
        if not any(spelled):
            text, spans = self._render(record.roles, record.contents, asking)
            encoding = self.vocabulary.marking.encode(text, add_special_tokens=False)
            if int(self.vocabulary.special[encoding.ids].sum()) != len(self.special.findall(text)):
                raise Malformed("literal")  # the tokenizer's normalizer or model makes a control token of other text
            mask = _masked(np.array(encoding.offsets).reshape(-1, 2), _marked(record, text, spans))
            return encoding.ids, mask, _is_whole(record.contents, text)
        if not self.separable:
            raise Malformed("literal")
        return self._apart(record, asking)

    def _apart(self, record: Record, asking: bool) -> tuple[list[int], NDArray[np.uint8], bool]:
        """Encode a record whose contents spell control tokens, keeping them apart from those of the template.

        In the contents the first character of each spelled token is replaced by a character that occurs nowhere, and
        restored after the template is rendered.
        """
        whole = "".join(record.contents)
        hidden = {first: _unused(whole, number) for number, first in enumerate(sorted(self._firsts))}
        disguised = list(record.contents)
        while any(map(self.special.search, disguised)):  # one may be inside another
            disguised = [self.special.sub(lambda match: hidden[match[0][0]] + match[0][1:], text) for text in disguised]
        text, spans = self._render(record.roles, disguised, asking)
        shown = {ord(there): first for first, there in hidden.items()}
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for number, part in enumerate(self.special.split(text)):
            if number % 2:
                ids.append(self.vocabulary.ids[part])
                offsets.append((position, position + len(part)))
            elif part:
                encoding = self._plain(part.translate(shown))
                ids += encoding.ids
                offsets += [(position + low, position + high) for low, high in encoding.offsets]
            position += len(part)
        marked = _marked(record._replace(contents=disguised), text, spans)
        return ids, _masked(np.array(offsets).reshape(-1, 2), marked), _is_whole(disguised, text)

    def _plain(self, text: str) -> Any:
        """The encoding of a text, which must not contain a control token."""
        encoding = self.vocabulary.plain.encode(text, add_special_tokens=False)
        if self.vocabulary.special[encoding.ids].any():
            raise Malformed("literal")
        return encoding

    @property
    def _firsts(self) -> set[str]:
        return {name[0] for name, special in self.vocabulary.added.items() if special and name}

    def _render(self, roles: Sequence[str], contents: Sequence[str], asking: bool) -> tuple[str, list[tuple[int, int]]]:
        from converters.assets.jinja_sandbox import render

        special_tokens = self.vocabulary.named
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        try:
            return render(
                self.template, messages, bos_token=special_tokens.get("bos"), eos_token=special_tokens.get("eos"),
                add_generation_prompt=asking,
            )  # fmt: skip
        except SourceError as error:
            raise Malformed("template") from error

    def _separable(self, name: str) -> bool:
        """Whether text beside a special token is encoded as it is alone."""
        number = self.vocabulary.ids[name]
        inside = self.vocabulary.marking.encode_batch([name + text + name for text in PROBES], add_special_tokens=False)
        alone = self.vocabulary.encode(list(PROBES))
        return all(encoding.ids == [number, *ids.tolist(), number] for encoding, ids in zip(inside, alone, strict=True))


def _is_whole(contents: Sequence[str], text: str) -> bool:
    """Whether a rendered text has every message, white space around it apart, which many templates strip."""
    return all(content.strip() in text for content in contents)


def _unused(text: str, number: int) -> str:
    """A character of the private use area that is not in a text; a different one for each number below 64."""
    for point in range(0xE000 + number, 0xF8FF, 64):
        if chr(point) not in text:
            return chr(point)
    raise Malformed("literal")


def _marked(record: Record, text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Generation blocks, each with the bits of its tokens.

    Args:
        record: the record.
        text: the rendered template.
        spans: generation blocks, in characters.

    Raises:
        Malformed: a reply is excluded from the training, and blocks do not match replies one to one.
    """
    if not record.left_out:
        return [(span, REPLY | (LAST_REPLY if number == len(spans) else 0)) for number, span in enumerate(spans, 1)]
    replies = reply_bits(record)
    replies_text = [record.contents[number].strip() for number in replies]
    if len(spans) != len(replies_text) or any(
        reply not in text[slice(*span)] for reply, span in zip(replies_text, spans, strict=True)
    ):
        raise Malformed("blocks")
    return list(zip(spans, replies.values(), strict=True))


def _masked(offsets: NDArray[Any], marked: Sequence[tuple[tuple[int, int], int]]) -> NDArray[np.uint8]:
    """The mask of tokens: bits of the blocks that they overlap; 0 if one of these is not trained.

    Args:
        offsets: character range of each token, int[n, 2].
        marked: generation blocks, in characters, and their bits.
    """
    mask = np.zeros(len(offsets), np.uint8)
    low, high = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    for bits in (True, False):
        for (begin, stop), span_bits in marked:
            if begin < stop and bool(span_bits) is bits:
                inside = (low < stop) & (high > begin)
                mask[inside] = mask[inside] | span_bits if span_bits else 0
    return mask


def check_template(vocabulary: Fast, template: str) -> str:
    """Check that a chat template can be trained with: replies are marked, and end with a special token.

    Returns:
        The token that ends a reply.

    Raises:
        RefusedError: it cannot; the message says why.
    """
    seen, ending = probed(vocabulary, template)
    faults = seen.faults(ending)
    if ending is None:
        faults.append("the chat template ends a reply with no special token, so that a model would never stop")
    if faults:
        raise RefusedError(faults[0], "templates that can be trained: --chat-template chatml, llama3 or control")
    return str(ending)


def probed(vocabulary: Fast, template: str) -> tuple[Probe, str | None]:
    """The probe of a chat template, and the token that ends a reply, if there is one.

    Raises:
        SourceError: the template does not render, or exceeds its limits.
        RefusedError: it does not fit this tokenizer.
    """
    from converters.assets.chat_template import probe

    special_tokens = vocabulary.named
    seen = probe(template, bos_token=special_tokens.get("bos"), eos_token=special_tokens.get("eos"))
    unknown_variables = sorted(
        name for name in seen.names if name.endswith("_token") and name not in ("bos_token", "eos_token")
    )
    if unknown_variables:
        raise RefusedError(
            f"the chat template asks for {unknown_variables[0]}, which is not passed to it", "write the token itself"
        )
    strange = [token for token in seen.markers() if vocabulary.id_of(token) is None]
    if strange:
        raise RefusedError(
            f"the chat template writes {', '.join(strange)}, which {vocabulary.path} does not have as special tokens",
            "a model's folder gets them from `convert assets OUT --chat-template NAME`, or, where its embedding lacks "
            "rows, from `convert hf2hf MODEL NEW --chat-template NAME`, a SentencePiece model from "
            f"`convert tokenizer MODEL FOLDER --add {' '.join(f'--control {token!r}' for token in strange)}`",
        )
    vocabulary.known.require_single(seen.markers(), str(vocabulary.path))
    return seen, seen.terminator({*vocabulary.added, *seen.markers(), *special_tokens.values()})
