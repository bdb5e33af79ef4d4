"""Chat templates: the shipped ones, the probing of any template, and a model's files after a template was applied.

A chat template renders a dialogue as text. A model stops at the end of its reply only if the token that ends a turn
(the terminator) is a token of the tokenizer, was trained, and is an end-of-sequence id of the generation config. All
three are found by rendering, not by reading the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from converters.assets.jinja_sandbox import Dialogue, Rendered, guarded
from converters.assets.json_edit import decoded, removed, replaced
from converters.assets.token_files import (  # fmt: skip
    CONFIG,
    DECODER,
    GENERATION,
    NAMED_TEMPLATES,
    OLD_TEMPLATES,
    SLOW,
    SPLIT,
    TEMPLATE,
    TOKENIZER_CONFIG,
    WRITTEN,
    Assets,
    content,
    eos_ids,
    generation_settings,
    named_tokens,
    object_of,
    rebuilt_tokens,
    split_tokens,
    templates_in,
    token_entries,
    token_ids,
    tokens_outside,
)
from converters.assets.tokenizer_json import NAME, Vocabulary, read_vocabulary, rebuilt_ids, with_flags, with_tokens
from formats.errors import RefusedError, SourceError, UsageError, some

MAX_TEMPLATE = 1 << 20
"""Bytes of a template file."""


class Template(NamedTuple):
    """A shipped template: its file, the special tokens it needs, and those of them that end a reply."""

    file: str
    tokens: tuple[str, ...]
    terminators: tuple[str, ...]


TEMPLATES: Mapping[str, Template] = {
    "control": Template("control.jinja", ("<|user|>", "<|assistant|>"), ("<|assistant|>",)),
    "chatml": Template("chatml.jinja", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",)),
    "llama3": Template("llama3.jinja", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ("<|eot_id|>",)),
}
MARKER = re.compile(r"<[|\uff5c][^\s<>|\uff5c]+[|\uff5c]>")
"""Text in a template that can only be a token: `<|im_end|>` is never meant as plain text."""
QUESTIONS, REPLIES = ("How many are 2 and 3?", "And 4 more?"), ("That makes 5.", "Then 9.")


def load_template(name_or_path: str) -> str:
    """The text of a shipped template, or of a file.

    Raises:
        UsageError: the argument names neither, or the file is no text or too large.
    """
    shipped = TEMPLATES.get(name_or_path)
    path = Path(__file__).parent / "templates" / shipped.file if shipped else Path(name_or_path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and a chat template is a file", f"{path / TEMPLATE}, for instance")
    if not path.is_file():
        raise UsageError(
            f"{name_or_path} is neither a shipped chat template nor a file", f"shipped are {', '.join(TEMPLATES)}"
        )
    content = path.read_bytes()
    if len(content) > MAX_TEMPLATE:
        raise UsageError(f"{path} has {len(content)} bytes, too many for a chat template")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: {error.reason} at byte {error.start}") from None


@dataclass(frozen=True)
class Probe:
    """The texts that a template renders for a dialogue of two turns.

    Attributes:
        one: the dialogue after the first reply.
        two: the dialogue after the second.
        prompts: the texts that ask for the first and the second reply.
        led: the text with a system turn before the others, empty if the template refuses one.
        names: the variables that the template looks up, such as `bos_token`.
    """

    one: Rendered
    two: Rendered
    prompts: tuple[str, str]
    led: str
    names: frozenset[str]

    def markers(self) -> tuple[str, ...]:
        """The tokens of the form <|name|> that the template writes, in their order."""
        return tuple(dict.fromkeys(MARKER.findall(self.two[0] + " " + self.led)))

    def terminator(self, tokens: Iterable[str]) -> str | None:
        """The first of some tokens that follows the first reply: a model that writes this token has ended its turn.

        The first reply is used, since an eos may follow the last one.
        """
        text, stop = self.two[0], self._reply(0)[1]
        end = text.find(QUESTIONS[1], stop)
        rest = text[stop : end if end >= 0 else len(text)]
        places = [(place, -len(token), token) for token in tokens if token and (place := rest.find(token)) >= 0]
        return min(places)[2] if places else None

    def faults(self, ending: str | None) -> list[str]:
        """The faults of the template for a training that is to learn replies, and nothing but replies, as sentences.

        Args:
            ending: the template's terminator.
        """
        text, spans = self.two
        if not spans:
            return ["the chat template has no {% generation %} block, by which most trainers tell replies apart"]
        faults = []
        if not all(_within(*self._reply(number), spans) for number in range(2)):
            faults.append("the generation blocks of the chat template do not hold every reply")
        begin, stop = self._reply(0)
        if ending is not None and not _within(begin, text.find(ending, stop) + len(ending), spans):
            faults.append(
                f"{ending} lies outside the generation block, so that training does not teach a model to stop"
            )
        if any(text.find(question) in range(*span) for question in QUESTIONS for span in spans):
            faults.append("a generation block of the chat template holds a question, which would be trained")
        return [*faults, *self.strange_prompts()]

    def strange_prompts(self) -> list[str]:
        """The faults for a training that tells replies from prompts without generation blocks, as sentences."""
        if self.one[0].startswith(self.prompts[0]) and self.two[0].startswith(self.prompts[1]):
            return []
        return ["the prompt that the chat template makes for a reply is no beginning of what it trains"]

    def _reply(self, number: int) -> tuple[int, int]:
        begin = self.two[0].find(REPLIES[number])
        if begin < 0:
            raise RefusedError(
                f"the chat template leaves out a reply, or changes it: {REPLIES[number]!r}, which it was tried with, "
                "is not in what it writes",
                "a template that writes replies as they are: --chat-template chatml",
            )
        return begin, begin + len(REPLIES[number])


def _within(begin: int, stop: int, spans: Iterable[tuple[int, int]]) -> bool:
    return any(low <= begin and stop <= high for low, high in spans)


def probe(template: str, *, bos_token: str | None, eos_token: str | None) -> Probe:
    """Render a dialogue of two turns in a guarded process.

    Raises:
        SourceError: the template does not render, or not within its limits.
        RefusedError: the template writes a token that the tokenizer does not name.
    """
    turns = [
        {"role": role, "content": text}
        for pair in zip(QUESTIONS, REPLIES, strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    dialogues = [Dialogue(turns[:2]), Dialogue(turns), Dialogue(turns[:1], True), Dialogue(turns[:3], True)]
    dialogues.append(Dialogue([{"role": "system", "content": "Be brief."}, *turns], optional=True))
    try:
        (single, double, first, second, led), names = guarded(
            template, dialogues, bos_token=bos_token, eos_token=eos_token
        )
    except SourceError as error:
        lacking = [name for name, token in (("bos", bos_token), ("eos", eos_token)) if token is None]
        asked = next((name for name in lacking if re.search(rf"\b'?{name}_token'? is undefined", str(error))), None)
        if asked is None:
            raise
        raise RefusedError(
            f"the chat template writes {asked}_token, and the tokenizer has none",
            f'"{asked}_token": "TOKEN" in tokenizer_config.json names it; the template chatml needs none',
        ) from error
    return Probe(single, double, (first[0], second[0]), led[0], names)


# --- a model's files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """A model's small files after a chat template was applied.

    Attributes:
        texts: files that are new or changed: relative name to bytes.
        removed: files that have to be deleted, because they hold other templates.
        terminator: the token that ends a reply.
        added: tokens that the tokenizer did not have, in the order of their ids. Each needs an embedding row.
        length: the tokenizer's length with these.
        rows: how many rows the embedding has.
        notes: what changed, one sentence each.
    """

    texts: Mapping[str, bytes]
    removed: tuple[str, ...]
    terminator: str
    added: tuple[str, ...]
    length: int
    rows: int
    notes: tuple[str, ...]

    @property
    def rows_needed(self) -> int:
        """How many rows the embedding has to have; more than `rows` if it has to grow."""
        return max(self.rows, self.length) if self.added else self.rows


def apply_template(assets: Assets, template: str, rows: int, trained: Sequence[str] = ()) -> Applied:
    """Give a model a chat template, the tokens that it needs and the ids at which generation stops.

    Args:
        assets: the model's files: relative name to path.
        template: the text of a chat template, see `load_template`.
        rows: how many rows the model's embedding has.
        trained: tokens that the model's training knew and these files lack, in the order of their ids.

    Raises:
        SourceError: a file or the template is broken.
        RefusedError: there is no tokenizer.json, it has more tokens than the embedding has rows, no token ends a reply,
            a token cannot be added, another token was trained in its place or has its id in transformers, or
            transformers may give tokens other ids than tokenizer.json.
    """
    if NAME not in assets:
        slow = next((name for name in SLOW if name in assets), None)
        raise RefusedError(
            f"a chat template needs {NAME}, and the model has {slow or 'no tokenizer at all'}",
            "make one: convert tokenizer MODEL OUT" if slow and slow.endswith(".model") else
            "give a model whose tokenizer was saved with save_pretrained",
        )  # fmt: skip
    named = named_tokens(assets)
    seen = probe(template, bos_token=named.get("bos"), eos_token=named.get("eos"))
    before = read_vocabulary(content(assets, NAME))
    _require_same_ids(assets, before)
    outside = tokens_outside(assets, before)
    missing = tuple(token for token in trained if token not in before.ids)
    used = f"{template} {[*named.values()]}"
    if before.lacks(rows, used) or (missing and before.length + len(missing) > rows):
        known = f"{before.length} entries" + (f" and lacks {len(missing)} of the training" if missing else "")
        raise RefusedError(
            f"the tokenizer has {known}, the embedding {rows} rows: they are not of one model",
            "take the tokenizer of the model that was trained",
        )
    ending = seen.terminator({*before.added, *seen.markers(), *named.values()})
    if ending is None:
        raise RefusedError("the chat template ends a reply with no special token, so that a model would never stop")
    edited, after = with_tokens(content(assets, NAME), [*seen.markers(), ending])
    after.require_single([*seen.markers(), ending])
    _require_matched(assets, edited, [*seen.markers(), ending])
    new = sorted((after.ids[token], token) for token in after.added if after.special(token) > before.special(token))
    changed = {token: number for number, token in new}
    added = tuple(token for token in changed if token not in before.ids)
    if added and outside:
        lacking = [f"{token} of {named_by}" for token, (named_by, _) in outside.items()]
        folder = str(assets[NAME].parent)
        raise RefusedError(
            f"{NAME} lacks {some(lacking, 3)}: transformers gives such tokens ids from {before.length} on, which "
            f"{', '.join(added)} of the chat template would get",
            f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained(FOLDER) puts them into {NAME}",
        )
    if missing and added != missing[: len(added)]:
        raise RefusedError(
            f"the chat template would add {', '.join(added)} to the tokenizer where the model was trained with "
            f"{', '.join(missing)}",
            "choose the template that it was trained with",
        )
    if not missing:
        _require_unnamed(assets, {changed[token]: token for token in added if token != ending})
    texts = {TEMPLATE: template.encode(), GENERATION: _generation_config(assets, after, ending, named), NAME: edited}
    texts |= _tokenizer_config(assets, after, changed)
    texts |= _added_tokens(assets, {token: changed[token] for token in added})
    changed_texts = {name: text for name, text in texts.items() if name not in assets or text != content(assets, name)}
    gone = tuple(name for name in assets if name.startswith(OLD_TEMPLATES))
    made = Applied(changed_texts, gone, ending, added, after.length, rows, ())
    notes = [*_notes(made, after, changed, "tokenizer.model" in assets, bool(missing)), *_replaced_templates(assets)]
    return replace(made, notes=tuple(notes))


def _require_same_ids(assets: Assets, known: Vocabulary) -> None:
    """Refuse a tokenizer whose added tokens have other ids in transformers, where it builds the tokenizer anew.

    Raises:
        RefusedError: an added token has another id, or is none.
        SourceError: a file is broken.
    """
    listed = rebuilt_tokens(assets)
    theirs = {entry["content"]: number for number, entry in known.entries().items()}
    if listed is None or {token: number for token, number in listed.items() if number is not None} == theirs:
        return
    ids = rebuilt_ids(content(assets, NAME), listed)
    others = [
        f"{token} ({number} in {NAME}) as {ids.get(token, 'plain text')}"
        for token, number in theirs.items()
        if ids.get(token) != number
    ]
    if others:
        raise RefusedError(
            f"{DECODER} of {TOKENIZER_CONFIG} does not list the added tokens of {NAME} with their ids: for most "
            f"classes of tokenizers, transformers 5 reads {some(others, 3)}",
            f"list each of them there, if the model was trained with the ids of {NAME}",
        )


def _require_matched(assets: Assets, edited: bytes, tokens: Sequence[str]) -> None:
    """Refuse tokens that transformers would not find in a text, because of what is said beside tokenizer.json.

    Raises:
        RefusedError: special tokens are to be split, or a token has flags with which it is not found beside letters.
    """
    if name := split_tokens(assets):
        raise RefusedError(
            f"{name} says {SPLIT}: transformers would encode {some([*dict.fromkeys(tokens)], 3)} of the chat template "
            "as plain text",
            f'"{SPLIT}": false there, unless the model was trained with special tokens as plain text',
        )
    entries = token_entries(assets)
    for token in dict.fromkeys(token for token in tokens if token in entries):
        file, key, flags = entries[token]
        with_flags(edited, flags).require_single([token], file, key)


def _require_unnamed(assets: Assets, added: Mapping[int, str]) -> None:
    """Refuse new tokens whose ids the model's files already give to a token that the tokenizer lacks.

    Raises:
        RefusedError: a file names such an id.
        SourceError: a file is broken.
    """
    for name in (CONFIG, GENERATION):
        settings = object_of(assets, name)
        for key in WRITTEN:
            for number in token_ids(settings.get(key), f"{key} of {name}"):
                if number in added:
                    raise RefusedError(
                        f"{name} says {key} = {number}, which no token of {NAME} has, and {added[number]} of the chat "
                        "template would get",
                        f"correct {name}, or take the tokenizer of the model that was trained",
                    )


def _generation_config(assets: Assets, known: Vocabulary, ending: str, named: Mapping[str, str]) -> bytes:
    """The bytes of the generation config, with the tokenizer's eos and the terminator among its eos ids."""
    ends = (named.get("eos", ending), ending)
    ids = list(dict.fromkeys([*eos_ids(assets), *(known.ids[token] for token in ends if token in known.ids)]))
    if GENERATION in assets:
        return replaced(decoded(content(assets, GENERATION), GENERATION), GENERATION, "eos_token_id", ids).encode()
    return (json.dumps(generation_settings(assets) | {"eos_token_id": ids}, indent=2) + "\n").encode()


def _tokenizer_config(assets: Assets, known: Vocabulary, changed: Mapping[str, int]) -> dict[str, bytes]:
    """The tokenizer config without a chat template; with all added tokens, where transformers 4 has listed some."""
    if TOKENIZER_CONFIG not in assets:
        return {}
    text = removed(decoded(content(assets, TOKENIZER_CONFIG), TOKENIZER_CONFIG), TOKENIZER_CONFIG, "chat_template")
    tokens = object_of(assets, TOKENIZER_CONFIG).get(DECODER)
    if isinstance(tokens, dict) and changed:
        entries = {str(number): entry for number, entry in known.entries().items()}
        for key in entries.keys() & tokens.keys():
            special = {"special": True} if entries[key]["content"] in changed else {}
            entries[key] = tokens[key] | special if isinstance(tokens[key], dict) else entries[key]
        text = replaced(text, TOKENIZER_CONFIG, DECODER, tokens | entries)
    return {TOKENIZER_CONFIG: text.encode()}


def _added_tokens(assets: Assets, added: Mapping[str, int]) -> dict[str, bytes]:
    """The added_tokens.json that older tokenizers have, with the new tokens added."""
    name = "added_tokens.json"
    if name not in assets or not added:
        return {}
    return {name: (json.dumps(object_of(assets, name) | dict(added), indent=2, ensure_ascii=False) + "\n").encode()}


def _notes(made: Applied, known: Vocabulary, changed: Mapping[str, int], slow: bool, trained: bool) -> Iterator[str]:
    yield f"a reply ends with {made.terminator}, id {known.ids[made.terminator]}; generation stops there"
    if made.added:
        token_ids = ", ".join(f"{token} ({changed[token]})" for token in made.added)
        yield f"the tokenizer gets {token_ids} and then has {made.length} entries"
        if made.length > made.rows:
            yield f"the embedding has {made.rows} rows and needs {made.rows_needed}"
        elif trained:
            yield "the embedding has their rows, as they were trained"
        else:
            yield "the embedding has rows for them, whose values are those of its padding: train them"
        if slow:
            yield "tokenizer.model lacks them: a program that reads it and not tokenizer.json splits them up"
    promoted = sorted(changed.keys() - set(made.added))
    if promoted:
        yield f"{', '.join(promoted)} become special tokens, which they were not"


def _replaced_templates(assets: Assets) -> Iterator[str]:
    """Notes on the templates that a new one replaces besides the default."""
    inside = templates_in(object_of(assets, TOKENIZER_CONFIG).get("chat_template"))
    files = [name for name in assets if name.startswith(NAMED_TEMPLATES)]
    named = {*inside, *(PurePosixPath(name).stem for name in files)} - {"default"}
    if named:
        yield (
            f"named chat templates that are not carried, since the new one is the only one: {', '.join(sorted(named))}"
        )
    if OLD_TEMPLATES[0] in assets:
        yield f"{OLD_TEMPLATES[0]} is not carried: it holds the template that is replaced"
