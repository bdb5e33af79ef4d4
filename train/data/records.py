"""Records: what a line of training data says, as turns of roles, or why it cannot be used.

A record is never repaired. Whatever is wrong with it has one of the names in `REASONS`, under which it is counted.

    {"text": "<<<|user|>>>…<<<|user|>>><<<|assistant|>>>…<<<|assistant|>>>"}    control-text: a marker on both sides
    {"conversations": [{"role": "user", "content": "…"}, …]}                    conversations ("messages" too)
    {"conversations": [{"from": "human", "value": "…"}, …]}                     sharegpt
    {"text": "…"}                                                               text, trained as a whole
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MARKER = re.compile(r"<<<\|([^|<>]*)\|>>>")
FIELDS = ("conversations", "messages")
MORE = (
    "tools", "functions", "documents", "tool_calls", "tool_call_id", "function_call", "thinking", "reasoning",
    "reasoning_content", "images", "audio", "videos",
)  # fmt: skip
"""What a record or a turn may hold beside role and content that no model would be trained on here."""
SPELLED = ("from", "value")
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
REASONS: Mapping[str, str] = {
    "json": "the line is no JSON that can be read (NaN and Infinity are none)",
    "object": "the line is no JSON object",
    "long": "the line is longer than 16 MiB",
    "field": "the field is missing",
    "type": "the field has the wrong type",
    "empty": "there is no text",
    "no marker": "a dialogue without markers",
    "marker": "a marker <<<|…|>>> in plain text",
    "odd": "a marker that opens a turn and no marker that closes it",
    "pair": "a turn that another role's marker closes",
    "outside": "text outside turns: the text itself may hold a marker",
    "empty turn": "a turn without text",
    "role": "a role that has no control token, or no number in role bins",
    "no reply": "no turn of the assistant",
    "keys": "turns with from and value: --format sharegpt reads them",
    "more": "a turn with calls of tools, thoughts or media, which would be lost",
    "template": "the chat template refuses the turns",
    "literal": "the text holds a control token, and the tokenizer cannot keep the two apart",
    "nothing": "nothing is left after tokenization",
}


class Record(NamedTuple):
    """A dialogue, or a text without roles.

    Attributes:
        roles: who speaks, for each turn; empty for plain text.
        contents: what is said, for each turn; one text if there are no roles.
    """

    roles: Sequence[str]
    contents: Sequence[str]


class Malformed(Exception):
    """A record that cannot be used; `reason` is a key of `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(REASONS[reason])
        self.reason = reason


Reader = Callable[[Any], Record]


def reader(form: str, roles: Sequence[str], key: str = "text", any_turns: bool = False) -> Reader:
    """The function that reads records of a format.

    Args:
        form: one of `FORMS`.
        roles: roles that have a control token; empty if a chat template judges roles.
        key: the field that holds text.
        any_turns: whether turns may have no text and conversations no reply, as role bins have them; plain text is
            no record then.

    Returns:
        A function that takes a JSON value and gives its record, or raises Malformed.
    """
    known = frozenset(roles)
    turns = _conversation(known, any_turns, ("role", "content"), {})
    shared = _conversation(known, any_turns, SPELLED, SHAREGPT)

    def control_text(value: Any) -> Record:
        return _dialogue(_field(value, key, str), known)

    def text(value: Any) -> Record:
        found = _field(value, key, str)
        if MARKER.search(found):
            raise Malformed("marker")
        return _plain(found)

    def mixed(value: Any) -> Record:
        if isinstance(value, dict) and _named(value) is None:
            found = _field(value, key, str)
            return _dialogue(found, known) if MARKER.search(found) else _plain(found)
        return turns(value)

    def conversations(value: Any) -> Record:
        if isinstance(value, dict) and value.get(key) is not None and _named(value) is None and not any_turns:
            return text(value)
        return turns(value)

    return {
        "control-text": control_text,
        "conversations": conversations,
        "sharegpt": shared,
        "text": text,
        "mixed": mixed,
    }[form]


FORMS = ("control-text", "conversations", "sharegpt", "text", "mixed")
"""conversations takes plain text rows too; mixed also takes dialogues with markers."""


def form_of(value: Any, key: str = "text") -> str:
    """The format that a record has: what `--format auto` makes of the first one."""
    if isinstance(value, dict) and _named(value) is not None:
        return "conversations"
    text = value.get(key) if isinstance(value, dict) else None
    return "control-text" if isinstance(text, str) and MARKER.search(text) else "text"


def _named(value: dict[str, Any]) -> str | None:
    """The field that holds turns; null counts as absent, for tables have every field in every row."""
    return next((name for name in FIELDS if value.get(name) is not None), None)


def _field(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value, dict):
        raise Malformed("object")
    if key not in value:
        raise Malformed("field")
    if not isinstance(value[key], kind):
        raise Malformed("type")
    return value[key]


def _plain(text: str) -> Record:
    if not text.strip():
        raise Malformed("empty")
    return Record((), (text,))


def _dialogue(text: str, known: frozenset[str]) -> Record:
    """A text with markers. Splitting gives: outside, opener, content, closer, outside, opener, …."""
    parts = MARKER.split(text)
    openers, contents, closers = parts[1::4], parts[2::4], parts[3::4]
    if openers != closers:
        raise Malformed(_unbalanced(parts))
    if not openers:
        raise Malformed("no marker" if text.strip() else "empty")
    if "".join(parts[::4]).strip():
        raise Malformed("outside")
    return _checked(openers, contents, known)


def _unbalanced(parts: Sequence[str]) -> str:
    return "odd" if len(parts) % 4 != 1 else "pair"


def _checked(roles: Sequence[str], contents: Sequence[str], known: frozenset[str], any_turns: bool = False) -> Record:
    if known and not known.issuperset(roles):
        raise Malformed("role")
    if any_turns:
        return Record(roles, contents)
    if "" in contents or any(map(str.isspace, contents)):
        raise Malformed("empty turn")
    if "assistant" not in roles:
        raise Malformed("no reply")
    return Record(roles, contents)


def _turns(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        raise Malformed("object")
    name = _named(value)
    if name is None:
        raise Malformed("field")
    turns = value[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Malformed("type")
    if not turns:
        raise Malformed("empty")
    if any(held.get(more) for held in (value, *turns) for more in MORE):
        raise Malformed("more")
    return turns


def _conversation(known: frozenset[str], any_turns: bool, keys: tuple[str, str], names: Mapping[str, str]) -> Reader:
    """The reader of turns whose speaker and text have these keys; `names` has their roles, if not the same."""

    def read(value: Any) -> Record:
        turns = _turns(value)
        roles: list[Any] = [turn.get(keys[0]) for turn in turns]
        contents: list[Any] = [turn.get(keys[1]) for turn in turns]
        if None in roles or None in contents:
            raise Malformed("keys" if keys != SPELLED and SPELLED[0] in turns[0] else "field")
        if not all(isinstance(one, str) for one in (*roles, *contents)):
            raise Malformed("type")
        if names and not names.keys() >= set(roles):
            raise Malformed("role")
        return _checked([names.get(role, role) for role in roles], contents, known, any_turns)

    return read
