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

from train.data.tokens.shapes import FIELDS, MARKER, SPELLED, shapes_of, turns_field
from train.data.tokens.shapes import told as told_shapes
from train.data.tokens.turn_flags import Unclear, check_record, check_text, is_empty, told

READ = re.compile(r"""(\w+)(?:\.|\[["'])(\w+)""")
NO_TURN = re.compile("loop|ns$|namespace|tool|function|param")
"""What a chat template reads of something, and the names of what is no turn."""
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
REASONS: Mapping[str, str] = {
    "json": "the line is no JSON that can be read (NaN and Infinity are none)",
    "number": "the line has a number beyond what a 64-bit float can hold, such as 1e400",
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
    "unknown": "a turn has a key that is not known, and may say what is trained",
    "weight": "a turn says that it is trained with neither 0 nor 1, neither false nor true, or says both",
    "asked": "a turn of another role than the assistant's says that it is trained",
    "record": "the record says of all its turns what is trained or how they are written, which is not known here",
    "blocks": "a reply that is not trained, and the chat template does not mark each reply by itself",
    "bins": "a reply that is not trained, which neither role bins nor markers can tell",
    "untrained": "no reply that is trained",
    "both": "the record has conversations and messages, and they differ",
    "shapes": "the record can be read in two ways, one of which would be lost; --format says which is meant",
    "recipe": "fields that no format reads; train fetch makes records of them, a recipe says which field is what",
    "key": "a key is given twice in the record",
    "template": "the chat template refuses the turns",
    "literal": "the text holds a control token, and the tokenizer cannot keep the two apart",
    "nothing": "nothing is left after tokenization",
}


class Record(NamedTuple):
    """A dialogue, or a text without roles.

    Attributes:
        roles: who speaks, for each turn; empty for plain text.
        contents: what is said, for each turn; one text if there are no roles.
        left_out: numbers of the replies that are not trained because the record says so.
    """

    roles: Sequence[str]
    contents: Sequence[str]
    left_out: frozenset[int] = frozenset()


class Malformed(Exception):
    """A record that cannot be used; `reason` is a key of `REASONS`, `detail` says what of the record it is."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(REASONS[reason])
        self.reason, self.detail = reason, detail


Reader = Callable[[Any], Record]


GRAVE = ("unknown", "weight", "asked", "record", "both", "shapes", "key")
"""Reasons that end the work: what the data says of the training is not understood, so no other record is trusted."""


def reader(
    form: str,
    roles: Sequence[str],
    key: str = "text",
    any_turns: bool = False,
    template: str | None = None,
    auto: bool = False,
) -> Reader:
    """The function that reads records of a format.

    Args:
        form: one of `shapes.FORMS`.
        roles: roles that have a control token; empty if a chat template judges roles.
        key: the field that holds text.
        any_turns: whether turns may have no text and conversations no reply, as role bins have them; plain text is
            no record then.
        template: the chat template, which may read more of a turn than its role and its content.
        auto: whether nobody named the format, so that nobody chose among the fields of a record.

    Returns:
        A function that takes a JSON value and gives its record, or raises Malformed.
    """
    known = frozenset(roles)
    read = frozenset(key for base, key in READ.findall(template or "") if not NO_TURN.search(base))
    turns = _conversation(known, any_turns, ("role", "content"), {}, read)
    shared = _conversation(known, any_turns, SPELLED, SHAREGPT, read)

    def control_text(value: Any) -> Record:
        found = _field(value, key, str)
        _judged(check_record, value, ())
        return _dialogue(found, known)

    def text(value: Any) -> Record:
        found = _field(value, key, str)
        if MARKER.search(found):
            raise Malformed("marker")
        _judged(check_text, value)
        return _plain(found)

    def mixed(value: Any) -> Record:
        if isinstance(value, dict) and turns_field(value) is None:
            return (control_text if MARKER.search(_field(value, key, str)) else text)(value)
        return turns(value)

    def conversations(value: Any) -> Record:
        if isinstance(value, dict) and value.get(key) is not None and turns_field(value) is None and not any_turns:
            return text(value)
        return turns(value)

    found: Reader = {
        "control-text": control_text,
        "conversations": conversations,
        "sharegpt": shared,
        "text": text,
        "mixed": mixed,
    }[form]
    return _unambiguous(found, key, auto) if auto or form == "mixed" else found


def _unambiguous(read: Reader, key: str, auto: bool) -> Reader:
    """A reader that refuses records of two shapes; with auto also those of a shape that nothing reads."""

    def judged(value: Any) -> Record:
        if isinstance(value, dict):
            shapes = [shape for shape in shapes_of(value, key) if auto or shape.is_read]
            if len(shapes) > 1 and shapes[0].is_read:
                raise Malformed("shapes", told_shapes(shapes, key))
            if shapes and not shapes[0].is_read:
                raise Malformed("recipe", told_shapes(shapes, key))
        return read(value)

    return judged


def _judged(check: Callable[..., None], *of: Any) -> None:
    """Refuse what a check does not understand."""
    try:
        check(*of)
    except Unclear as error:
        raise Malformed(error.reason, error.detail) from None


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
    name = turns_field(value)
    if name is None:
        raise Malformed("field")
    turns = value[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Malformed("type")
    if not turns:
        raise Malformed("empty")
    if any(not is_empty(value.get(other)) and value[other] != turns for other in FIELDS):
        raise Malformed("both", " and ".join(FIELDS))
    return turns


def _conversation(
    known: frozenset[str], any_turns: bool, keys: tuple[str, str], names: Mapping[str, str], template: frozenset[str]
) -> Reader:
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
        roles = [names.get(role, role) for role in roles]
        try:
            check_record(value, [text for role, text in zip(roles, contents, strict=True) if role == "system"])
            flags = [told(turn, number, keys, template) for number, turn in enumerate(turns, 1)]
        except Unclear as error:
            raise Malformed(error.reason, error.detail) from None
        record = _checked(roles, contents, known, any_turns)
        if all(flag is None for flag in flags):
            return record
        return record._replace(left_out=_left_out(roles, flags, any_turns))

    return read


def _left_out(roles: Sequence[str], flags: Sequence[bool | None], any_turns: bool) -> frozenset[int]:
    """The replies that their record leaves out of the training.

    Raises:
        Malformed: something else than a reply is to be trained, no reply is, or role bins cannot tell.
    """
    for number, (role, flag) in enumerate(zip(roles, flags, strict=True), 1):
        if flag and role != "assistant":
            raise Malformed("asked", f"turn {number}, of the role {role!r}")
    replies = [number for number, role in enumerate(roles) if role == "assistant"]
    found = frozenset(number for number in replies if flags[number] is False)
    if found and any_turns:
        raise Malformed("bins")
    if replies and len(found) == len(replies):
        raise Malformed("untrained")
    return found
