"""Encodes records as token ids and a loss mask, with a chat template.

The text of a dialogue is encoded as transformers does (`apply_chat_template`), except that text of the template and
contents of turns are kept apart: a content that spells a control token stays text. A template marks its replies, or
each reply is the text that the template adds to its own prompt for that reply.

Facts: transformers 5.23.0 tokenization_utils_base.py, `apply_chat_template`: a token belongs to a generation block if
any of its characters does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError, SourceError
from train.data.tokens.encode import LAST_REPLY, REPLY, Encoded, end_bits, reply_bits
from train.data.tokens.records import Malformed, Record
from train.data.tokens.tokenizers import Fast
from train.data.tokens.turns import called_functions, replaced, texts, tool_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.assets.chat_template import Probe
    from converters.assets.jinja_sandbox import Rendered

PROBES = ("a", " a", "a ", "\n", "\n\nHello", "don't  stop", "ā", "2+2=4.", " \t x \n")
"""Texts that show whether a tokenizer's encoding of a text depends on a control token beside it."""
LOST = {
    "altered_documents": "a message",
    "lost_reasoning": "reasoning",
    "lost_tool_calls": "a tool call",
    "lost_tools": "a tool",
}
"""Key of the counts: the part of a record that a chat template leaves out or changes."""
SPLIT = "split_documents"
"""Key of the counts: number of documents beyond the first of each record."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Span = tuple[tuple[int, int], int]
"""A reply in a rendered text: its range in characters, and the mask bits of its tokens."""


class Document(NamedTuple):
    """A document as tokens.

    Attributes:
        ids: the token ids.
        mask: mask bits of each token, uint8.
        end: mask bits of the end-of-document token that may be appended.
    """

    ids: list[int]
    mask: NDArray[np.uint8]
    end: int


@dataclass(frozen=True)
class TemplateEncoder:
    """Encodes dialogues with a chat template.

    Attributes:
        vocabulary: the tokenizer.
        template: the text of the chat template.
        eod: id of the token that is appended to documents without it at their end, None to append none.
        date: the date that `strftime_now` takes for today, as YYYY-MM-DD; None for today.
        separable: whether a text beside a control token gets the same tokens as the text alone.
        marks: whether the template marks replies; otherwise replies are found by their prompts.
        special: matches control tokens in a text.
    """

    vocabulary: Fast
    template: str
    eod: int | None
    date: str | None = None
    marks: bool = field(init=False)
    separable: bool = field(init=False)
    special: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        ids, special = self.vocabulary.ids, self.vocabulary.special
        names = sorted((name for name in self.vocabulary.added if special[ids[name]]), key=len, reverse=True)
        pattern = "|".join(map(re.escape, names)) or "(?!)"
        object.__setattr__(self, "marks", GENERATION.search(self.template) is not None)
        object.__setattr__(self, "special", re.compile(f"({pattern})"))
        object.__setattr__(self, "separable", all(map(self._separable, names[:64])))

    def __call__(self, records: Sequence[Record]) -> Encoded:
        """Encode records; a record that the template refuses becomes no document."""
        ids: list[Sequence[int]] = []
        masks: list[NDArray[np.uint8]] = []
        refused: list[tuple[int, str]] = []
        counts = Counter[str]()
        for place, record in enumerate(records):
            try:
                documents, lost = self._documents(record)
            except Malformed as reason:
                refused.append((place, reason.reason))
                continue
            if not documents[0][0]:
                refused.append((place, "nothing"))
                continue
            for token_ids, mask, end in documents:
                ending = [self.eod] if self.eod is not None and token_ids[-1] != self.eod else []
                ids.append([*token_ids, *ending])
                masks.append(np.append(mask, np.full(len(ending), end, np.uint8)))
            counts.update([*lost, *[SPLIT] * (len(documents) - 1)])
        sizes = [len(mask) for mask in masks]
        flat = np.fromiter(chain.from_iterable(ids), np.int32, sum(sizes))
        return Encoded(flat, sizes, np.concatenate(masks) if masks else np.empty(0, np.uint8), refused, counts)

    def prompt(self, record: Record) -> list[int]:
        """The prompt tokens for the next reply of a dialogue.

        Raises:
            Malformed: the template refuses the turns (with its error as the cause), or contents cannot be kept apart.
        """
        hidden = self._hidden(record)
        return self._tokens(self._render(hidden, asking=True)[0], hidden.shown)[0]

    def _documents(self, record: Record) -> tuple[list[Document], list[str]]:
        """The documents of a record, and the keys of `LOST` for what the template left out of the record."""
        if not record.roles:
            ids = self._plain(record.contents[0]).ids
            return [Document(ids, np.full(len(ids), REPLY | LAST_REPLY, np.uint8), REPLY | LAST_REPLY)], []
        hidden = self._hidden(record)
        text, spans = self._render(hidden)
        if self.marks:
            documents = [(text, self._marked(hidden, text, spans), end_bits(record))]
        else:
            documents = list(self._proved(hidden, text))
        encoded: list[Document] = []
        for text, marked, end in documents:
            ids, offsets = self._tokens(text, hidden.shown)
            if not self.marks:
                self._require_boundaries(text, offsets, ids, marked, hidden.shown)
            encoded.append(Document(ids, _masked(offsets, marked), end))
        return encoded, _lost(hidden.record, [text for text, _, _ in documents])

    def _hidden(self, record: Record) -> _Hidden:
        """A record whose texts cannot be taken for control tokens of the template.

        The first character of each spelled control token is replaced by a character that occurs nowhere, and restored
        after the template is rendered.
        """
        given = [record.messages, record.tools, record.variables]
        whole = "\n".join(texts(given))
        if not self.special.search(whole):
            return _Hidden(record, {})
        if not self.separable:
            raise Malformed("literal")
        marks = {first: _unused(whole, number) for number, first in enumerate(sorted(self._firsts))}

        def hide(text: str) -> str:
            while self.special.search(text):  # a token may be inside another
                text = self.special.sub(lambda match: marks[match[0][0]] + match[0][1:], text)
            return text

        turns, tools, variables = (replaced(value, hide) for value in given)
        contents = [hide(text) for text in record.contents]
        changed = record._replace(contents=contents, turns=turns, tools=tools, variables=variables)
        return _Hidden(changed, {ord(there): first for first, there in marks.items()})

    def _tokens(self, text: str, shown: Mapping[int, str]) -> tuple[list[int], NDArray[Any]]:
        """Token ids of a rendered text, and the character range of each token, int[n, 2]."""
        if not shown:
            encoding = self.vocabulary.marking.encode(text, add_special_tokens=False)
            if int(self.vocabulary.special[encoding.ids].sum()) != len(self.special.findall(text)):
                raise Malformed("literal")  # the tokenizer's normalizer or model makes a control token of other text
            return encoding.ids, np.array(encoding.offsets).reshape(-1, 2)
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
        return ids, np.array(offsets).reshape(-1, 2)

    def _marked(self, hidden: _Hidden, text: str, spans: Sequence[tuple[int, int]]) -> list[Span]:
        """The generation blocks of a rendered text, each with the mask bits of its tokens.

        A reply may have several, such as one for its reasoning: those behind the prompt for the last reply are of it.

        Args:
            hidden: the record.
            text: the rendered template.
            spans: character ranges of generation blocks.

        Raises:
            Malformed: a reply is excluded from the training, and blocks do not match replies one to one; or the
                dialogue does not begin with the prompt for its last reply, and blocks are more or fewer than replies.
        """
        record, bits = hidden.record, reply_bits(hidden.record)
        if record.left_out:
            contents = [record.contents[number].strip() for number in bits]
            if len(spans) != len(contents) or any(
                reply not in text[slice(*span)] for reply, span in zip(contents, spans, strict=True)
            ):
                raise Malformed("blocks")
        if len(spans) == len(bits):
            return list(zip(spans, bits.values(), strict=True))
        prompt = self._render(hidden, max(bits), asking=True)[0]
        if not text.startswith(prompt):
            raise Malformed("prompt")
        return [(span, REPLY | LAST_REPLY if span[1] > len(prompt) else REPLY) for span in spans]

    def _proved(self, hidden: _Hidden, text: str) -> Iterator[tuple[str, list[Span], int]]:
        """Documents of a dialogue, each with its replies, for templates that do not mark them.

        A reply is the text that the template adds to its own prompt for that reply: rendered up to the reply, the
        dialogue has to begin with the prompt. The whole dialogue trains each reply that it shows in the same way. A
        reply that it shows otherwise, as Qwen3 shows earlier turns without their reasoning, gets a document of its own,
        which ends with that reply.

        Args:
            hidden: the record.
            text: the rendered dialogue.

        Yields:
            The text of a document, its replies as `_marked` gives them, and the mask bits of its end.

        Raises:
            Malformed: a dialogue does not begin with its prompt.
        """
        bits = reply_bits(hidden.record)
        last = max(bits)
        remaining = {number: self._reply(hidden, number) for number, bit in bits.items() if bit}
        while remaining:
            here = {number: reply for number, reply in remaining.items() if text.startswith(reply.text)}
            if here:
                spans = [((reply.begin, len(reply.text)), bits[number]) for number, reply in here.items()]
                yield text, spans, bits[last] if last in here else 0
            remaining = {number: reply for number, reply in remaining.items() if number not in here}
            if remaining:
                last = max(remaining)
                text = remaining[last].whole

    def _reply(self, hidden: _Hidden, number: int) -> _Reply:
        """A reply as the template shows it in the dialogue that ends with that reply."""
        prompt = self._render(hidden, number, asking=True)[0]
        text = self._render(hidden, number + 1)[0]
        if not text.startswith(prompt):
            raise Malformed("prompt")
        trimmed = text.rstrip()  # no model is asked for the new line after the token that ends its turn
        ends = [match.end() for match in self.special.finditer(trimmed)]
        ended = bool(ends) and ends[-1] == len(trimmed) > len(prompt)
        return _Reply(len(prompt), trimmed if ended else text, text)

    def _require_boundaries(
        self, text: str, offsets: NDArray[Any], ids: list[int], marked: Sequence[Span], shown: Mapping[int, str]
    ) -> None:
        """Check that the tokens before each reply are those of its prompt.

        Raises:
            Malformed: a token has characters of both prompt and reply, or the tokens differ.
        """
        for (begin, _), _ in marked:
            first = max((match.end() for match in self.special.finditer(text, 0, begin)), default=0)
            first = first if self.separable else 0
            prompt = self._tokens(text[first:begin], shown)[0]
            low = int(np.searchsorted(offsets[:, 0], first))
            if ids[low : low + len(prompt)] != prompt or (offsets[low:, 0] < begin).sum() != len(prompt):
                raise Malformed("prompt")

    def _plain(self, text: str) -> Any:
        """The encoding of a text, which must not contain a control token."""
        encoding = self.vocabulary.plain.encode(text, add_special_tokens=False)
        if self.vocabulary.special[encoding.ids].any():
            raise Malformed("literal")
        return encoding

    @property
    def _firsts(self) -> set[str]:
        return {name[0] for name, special in self.vocabulary.added.items() if special and name}

    def _render(self, hidden: _Hidden, stop: int | None = None, asking: bool = False) -> Rendered:
        from converters.assets.jinja_sandbox import render

        named, record = self.vocabulary.named, hidden.record
        dated = {} if self.date is None else {"strftime_now": datetime.fromisoformat(self.date).strftime}
        try:
            return render(
                self.template, record.messages[:stop], bos_token=named.get("bos"), eos_token=named.get("eos"),
                add_generation_prompt=asking, tools=record.tools, variables={**record.variables, **dated},
            )  # fmt: skip
        except SourceError as error:
            raise Malformed("template") from error

    def _separable(self, name: str) -> bool:
        """Whether text beside a special token gets the same tokens as the text alone."""
        number = self.vocabulary.ids[name]
        inside = self.vocabulary.marking.encode_batch([name + text + name for text in PROBES], add_special_tokens=False)
        alone = self.vocabulary.encode(list(PROBES))
        return all(encoding.ids == [number, *ids.tolist(), number] for encoding, ids in zip(inside, alone, strict=True))


class _Reply(NamedTuple):
    """A dialogue that ends with a reply.

    Attributes:
        begin: number of characters of the reply's prompt.
        text: the dialogue up to the token that ends the reply.
        whole: the whole dialogue.
    """

    begin: int
    text: str
    whole: str


class _Hidden(NamedTuple):
    """A record whose texts spell no control token, and the characters to restore by their replacements."""

    record: Record
    shown: Mapping[int, str]


def _lost(record: Record, rendered: Sequence[str]) -> list[str]:
    """The keys of `LOST` for parts that a template leaves out or changes. White space around a part is not compared."""
    needed: dict[str, Sequence[str]] = {"altered_documents": record.contents}
    if record.turns or record.tools:
        needed["lost_reasoning"] = [turn["thinking"] for turn in record.turns if "thinking" in turn]
        needed["lost_tool_calls"] = [text for turn in record.turns for text in called_functions(turn)]
        needed["lost_tools"] = [str(tool_name(tool)) for tool in record.tools or ()]
    return [kind for kind, parts in needed.items() if not all(_is_in(part.strip(), rendered) for part in parts)]


def _is_in(part: str, rendered: Sequence[str]) -> bool:
    """Whether a rendered text has a part, literally or as JSON spells the part."""
    spelled = json.dumps(part, ensure_ascii=False)[1:-1]
    return any(part in text or spelled in text for text in rendered)


def _unused(text: str, number: int) -> str:
    """A character of the private use area that is not in a text; a different one for each number below 64."""
    for point in range(0xE000 + number, 0xF8FF, 64):
        if chr(point) not in text:
            return chr(point)
    raise Malformed("literal")


def _masked(offsets: NDArray[Any], marked: Sequence[Span]) -> NDArray[np.uint8]:
    """The mask of tokens: the bits of the blocks that a token overlaps; 0 if one of these blocks is not trained.

    Args:
        offsets: character range of each token, int[n, 2].
        marked: character ranges of generation blocks, and their mask bits.
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
    """Check that a chat template suits training: its replies can be located, and end with a special token.

    Returns:
        The token that ends a reply.

    Raises:
        RefusedError: the template does not; the message names the reason.
    """
    seen, ending = probed(vocabulary, template)
    faults = seen.faults(ending) if seen.two[1] else seen.strange_prompts()
    if ending is None:
        faults.append("the chat template ends a reply with no special token, so that a model would never stop")
    if faults:
        raise RefusedError(faults[0], "templates that can be trained: --chat-template chatml, llama3 or control")
    return str(ending)


def probed(vocabulary: Fast, template: str) -> tuple[Probe, str | None]:
    """The probe of a chat template, and the token that ends a reply, None if there is none.

    Raises:
        SourceError: the template does not render, or exceeds its limits.
        RefusedError: the template does not fit this tokenizer.
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
