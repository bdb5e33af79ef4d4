"""Edit a JSON file in place: one member of the object changes, every other byte stays as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from formats.errors import SourceError, short

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Member(NamedTuple):
    """A member of an object: key, value, and their positions in the text; `start` is that of the key's quote."""

    key: str
    value: Any
    start: int
    value_start: int
    stop: int


def decoded(content: bytes, name: str) -> str:
    """The text of a JSON file.

    Raises:
        SourceError: the content is no UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{name} is no UTF-8: {error.reason} at byte {error.start}") from None


def members(text: str, name: str) -> Iterator[Member]:
    """The members of the object in a text, parsed lazily: text after the last member that is consumed is not read.

    Raises:
        SourceError: the text is no JSON object, or has a key twice.
    """
    seen: set[str] = set()
    position = _expect(text, _skip(text, 0), "{", name)
    while text[(position := _skip(text, position)) : position + 1] != "}":
        if seen:
            position = _skip(text, _expect(text, position, ",", name))
        key, stop = _value(text, position, name)
        if not isinstance(key, str) or key in seen:
            raise SourceError(f"{name} is not a valid JSON object: {short(key)} is no key, or appears twice")
        begin = _skip(text, _expect(text, _skip(text, stop), ":", name))
        value, stop = _value(text, begin, name)
        yield Member(key, value, position, begin, stop)
        seen.add(key)
        position = stop
    if (rest := _skip(text, position + 1)) != len(text):
        raise SourceError(f"{name} is not a valid JSON object: it continues at character {rest}, after its end")


def replaced(text: str, name: str, key: str, value: Any) -> str:
    """The text with another value for a key; a key that the object lacks becomes its first member."""
    start = _expect(text, _skip(text, 0), "{", name)
    first = next(members(text, name), None)
    unit = re.sub(r".*\n|[^ \t].*", "", text[start : first.start if first else start], flags=re.DOTALL)
    dumped = json.dumps(value, ensure_ascii=False, indent=unit or None).replace("\n", "\n" + unit)
    for member in members(text, name):
        if member.key == key:
            return text[: member.value_start] + dumped + text[member.stop :]
    written = f"{json.dumps(key, ensure_ascii=False)}: {dumped}"
    if first is None:
        return text[:start] + written + text[text.index("}") :]
    return text[: first.start] + written + "," + (text[start : first.start] or " ") + text[first.start :]


def removed(text: str, name: str, key: str) -> str:
    """The text without a member, and without the comma and the space that belonged to it."""
    before = None
    matches = iter(members(text, name))
    for member in matches:
        if member.key == key:
            if before is not None:
                return text[: before.stop] + text[member.stop :]
            after = next(matches, None)
            return text[: member.start] + text[after.start if after else _skip(text, member.stop) :]
        before = member
    return text


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _expect(text: str, position: int, character: str, name: str) -> int:
    if text[position : position + 1] != character:
        raise SourceError(f"{name} is not a valid JSON object: no {character!r} at character {position}")
    return position + 1


def _value(text: str, position: int, name: str) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is not valid JSON: {error}") from None
