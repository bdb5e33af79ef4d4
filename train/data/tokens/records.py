"""Records: the turns of a line of training data, or the reason why it cannot be used.

A record is never repaired. Each fault has a name in `REASONS`, under which it is counted.

    {"text": "<<<|user|>>>…<<<|user|>>><<<|assistant|>>>…<<<|assistant|>>>"}    control-text: a marker on both sides
    {"conversations": [{"role": "user", "content": "…"}, …]}                    conversations ("messages" too)
    {"conversations": [{"from": "human", "value": "…"}, …]}                     sharegpt
    {"messages": [{"tool_calls": […], …}, …], "tools": […]}                  conversations for templates, see turns.py
    {"text": "…"}                                                               text, trained as a whole
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from train.data.tokens.shapes import FIELDS, MARKER, SPELLED, describe, shapes_of, turns_field
from train.data.tokens.turn_flags import REASONING, Unclear, check_record, check_text, is_empty, is_trained
from train.data.tokens.turns import Reads, message_of, reads, text_of, tools_of, variables_of

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
REASONS: Mapping[str, str] = {
    "json": "the line is not valid JSON (NaN and Infinity are not allowed)",
    "number": "the line has a number beyond the range of a 64-bit float, such as 1e400",
    "object": "the line is not a JSON object",
    "long": "the line is longer than 16 MiB",
    "field": "the field is missing",
    "type": "the field has the wrong type",
    "empty": "there is no text",
    "no marker": "a dialogue without markers",
    "marker": "a marker <<<|…|>>> in plain text",
    "odd": "a marker that opens a turn, without a marker that closes it",
    "pair": "a turn that is closed by another role's marker",
    "outside": "text outside turns: the text itself may contain a marker",
    "empty turn": "a turn without text",
    "role": "a role that has no control token, or no number in role bins",
    "no reply": "no turn of the assistant",
    "keys": "turns with from and value: --format sharegpt reads them",
    "more": "a turn with tool calls, reasoning or media, which would be lost",
    "tool call": "a tool call or a tool without a name or with arguments that are no JSON object, or odd reasoning",
    "unknown": "a turn has an unknown key, which may say what is trained",
    "weight": "the flag of a turn is neither 0 nor 1, neither false nor true, or flags contradict each other",
    "asked": "a turn of another role than the assistant is flagged as trained",
    "record": "the record sets for all its turns what is trained or how they are rendered, which is not supported here",
    "blocks": "a reply is excluded from the training, but the chat template does not mark each reply separately",
    "bins": "a reply is excluded from the training, which role bins and markers cannot express",
    "untrained": "no reply is trained",
    "both": "the record has conversations and messages, and they differ",
    "shapes": "the record can be read in two ways, one of which would be lost; --format chooses one",
    "recipe": "fields that no format reads; train fetch makes records of them, with a recipe that names the fields",
    "key": "a key is given twice in the record",
    "template": "the chat template refuses the turns",
    "prompt": "the prompt that the chat template makes for a reply is no beginning of the dialogue",
    "literal": "the text spells a control token, and the tokenizer cannot tell the two apart",
    "nothing": "nothing is left after tokenization",
}


class Record(NamedTuple):
    """A dialogue, or a text without roles, read from a line of training data.

    Attributes:
        roles: role of each turn; empty for plain text.
        contents: text of each turn; a single text if there are no roles.
        left_out: indices of replies that the record excludes from the training.
        turns: the turns as a chat template takes them; empty if these have nothing beside roles and contents.
        tools: the functions that the model may call, None if there are none.
        variables: further variables for the chat template.
    """

    roles: Sequence[str]
    contents: Sequence[str]
    left_out: frozenset[int] = frozenset()
    turns: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = MappingProxyType({})

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The turns as a chat template takes them."""
        pairs = zip(self.roles, self.contents, strict=True)
        return self.turns or [{"role": role, "content": text} for role, text in pairs]


class Malformed(Exception):
    """Raised for a record that cannot be used. `reason` is a key of `REASONS`, `detail` names a part of the record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(REASONS[reason])
        self.reason, self.detail = reason, detail


Reader = Callable[[Any], Record]
SILENT = ("tool_calls", *REASONING)
"""Keys of a turn; a turn with one of them may be without text."""


GRAVE = ("unknown", "weight", "asked", "record", "both", "shapes", "key")
"""Reasons that abort: the data specifies something about the training that is not understood: no record is trusted."""


def reader(
    form: str,
    roles: Sequence[str],
    key: str = "text",
    any_turns: bool = False,
    template: str | None = None,
    auto: bool = False,
) -> Reader:
    """A function that reads records of a format.

    Args:
        form: one of `shapes.FORMS`.
        roles: roles that have a control token; empty if a chat template checks roles.
        key: name of the field with text.
        any_turns: whether turns may have no text and conversations no reply, as in role bins; plain text is then not a
            record.
        template: the chat template, which may read more of a turn than its role and its content.
        auto: whether the format was detected, so that the user did not choose among the fields of a record.

    Returns:
        A function that returns the record of a JSON value, or raises Malformed.
    """
    known = frozenset(roles)
    read = reads(template)
    turns = _conversation(known, any_turns, ("role", "content"), {}, read)
    shared = _conversation(known, any_turns, SPELLED, SHAREGPT, read)

    def control_text(value: Any) -> Record:
        content = _field(value, key, str)
        _judged(check_record, value, ())
        return _dialogue(content, known)

    def text(value: Any) -> Record:
        content = _field(value, key, str)
        if MARKER.search(content):
            raise Malformed("marker")
        _judged(check_text, value)
        return _plain(content)

    def mixed(value: Any) -> Record:
        if isinstance(value, dict) and turns_field(value) is None:
            return (control_text if MARKER.search(_field(value, key, str)) else text)(value)
        return turns(value)

    def conversations(value: Any) -> Record:
        if isinstance(value, dict) and value.get(key) is not None and turns_field(value) is None and not any_turns:
            return text(value)
        return turns(value)

    read_record: Reader = {
        "control-text": control_text,
        "conversations": conversations,
        "sharegpt": shared,
        "text": text,
        "mixed": mixed,
    }[form]
    return _unambiguous(read_record, key, auto) if auto or form == "mixed" else read_record


def _unambiguous(read: Reader, key: str, auto: bool) -> Reader:
    """Wrap a reader to refuse records of two shapes; with `auto` also records of a shape that no format reads."""

    def judged(value: Any) -> Record:
        if isinstance(value, dict):
            shapes = [shape for shape in shapes_of(value, key) if auto or shape.is_read]
            if len(shapes) > 1 and shapes[0].is_read:
                raise Malformed("shapes", describe(shapes, key))
            if shapes and not shapes[0].is_read:
                raise Malformed("recipe", describe(shapes, key))
        return read(value)

    return judged


def _judged(check: Callable[..., None], *of: Any) -> None:
    """Run a check, and raise its `Unclear` as Malformed."""
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
    """The record of a text with markers. Splitting gives: outside, opener, content, closer, outside, opener, …."""
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


def _checked(
    roles: Sequence[str],
    contents: Sequence[str],
    known: frozenset[str],
    any_turns: bool = False,
    silent: Sequence[bool] | None = None,
) -> Record:
    """The record of some turns, checked; `silent` marks the turns that may be without text."""
    if known and not known.issuperset(roles):
        raise Malformed("role")
    if any_turns:
        return Record(roles, contents)
    spoken = contents if silent is None else [text for text, quiet in zip(contents, silent, strict=True) if not quiet]
    if "" in spoken or any(map(str.isspace, spoken)):
        raise Malformed("empty turn")
    if "assistant" not in roles:
        raise Malformed("no reply")
    return Record(roles, contents)


def _is_silent(turn: Mapping[str, Any], speaker: str) -> bool:
    """Whether a turn may be without text: a tool may return nothing."""
    return turn[speaker] == "tool" or (len(turn) > 2 and not all(is_empty(turn.get(key)) for key in SILENT))


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
    known: frozenset[str], any_turns: bool, keys: tuple[str, str], names: Mapping[str, str], template: Reads
) -> Reader:
    """A reader of turns with these keys for speaker and text; `names` maps speakers to roles, where they differ."""

    def read(value: Any) -> Record:
        turns = _turns(value)
        try:
            return _read(value, turns)
        except Unclear as error:
            raise Malformed(error.reason, error.detail) from None

    def _read(value: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> Record:
        roles: list[Any] = [turn.get(keys[0]) for turn in turns]
        given: list[Any] = [text_of(turn.get(keys[1]), number) for number, turn in enumerate(turns, 1)]
        whole = [text is not None or bool(turn.get("tool_calls")) for text, turn in zip(given, turns, strict=True)]
        if None in roles or not all(whole):
            raise Malformed("keys" if keys != SPELLED and SPELLED[0] in turns[0] else "field")
        if not all(isinstance(content, str) for content in (*roles, *given) if content is not None):
            raise Malformed("type")
        if names and not names.keys() >= set(roles):
            raise Malformed("role")
        roles = [names.get(role, role) for role in roles]
        contents = [text or "" for text in given]
        systems = [text for role, text in zip(roles, contents, strict=True) if role == "system"]
        check_record(value, systems, template.fields)
        variables = variables_of(value) if template.fields else {}
        flags = [is_trained(turn, number, keys, template.keys) for number, turn in enumerate(turns, 1)]
        record = _checked(roles, contents, known, any_turns, [_is_silent(turn, keys[0]) for turn in turns])
        if any(flag is not None for flag in flags):
            record = record._replace(left_out=_left_out(roles, flags, any_turns))
        if not template.fields:
            return record
        messages = [
            message_of(turn, number, role, text, template.keys)
            for number, (turn, role, text) in enumerate(zip(turns, roles, given, strict=True), 1)
        ]
        tools = tools_of(value) if "tools" in template.fields else None
        plain = all(len(message) == 2 and message["content"] is not None for message in messages)
        return record._replace(turns=() if plain else messages, tools=tools, variables=variables)

    return read


def _left_out(roles: Sequence[str], flags: Sequence[bool | None], any_turns: bool) -> frozenset[int]:
    """The indices of replies that their record excludes from the training.

    Raises:
        Malformed: a turn of another role is marked as trained, no reply is trained, or role bins cannot express this.
    """
    for number, (role, flag) in enumerate(zip(roles, flags, strict=True), 1):
        if flag and role != "assistant":
            raise Malformed("asked", f"turn {number}, of the role {role!r}")
    replies = [number for number, role in enumerate(roles) if role == "assistant"]
    left_out = frozenset(number for number in replies if flags[number] is False)
    if left_out and any_turns:
        raise Malformed("bins")
    if replies and len(left_out) == len(replies):
        raise Malformed("untrained")
    return left_out
