"""Shapes of records: the fields that may have the training text, and the format that reads them.

`--format auto` decides from this table. A record with fields of two rows has two readings; `auto` refuses the record,
because the other reading would be lost silently. Naming a format chooses one reading.

Facts: the fields of sets on the Hub: tatsu-lab/alpaca (`instruction`, `output`, and `text`), CohereLabs/aya_dataset
(`inputs`, `targets`), HuggingFaceH4/ultrafeedback_binarized (`chosen`, `rejected`, and `messages`); TRL's dataset
formats (`prompt`, `completion`); ms-swift 3 custom datasets (`query`, `response`; `rejected_response` beside
`messages`). `prompt` alone is not a shape: ultrachat_200k and no_robots repeat the first message in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from train.data.tokens.turn_flags import is_empty

MARKER = re.compile(r"<<<\|([^|<>]*)\|>>>")
FIELDS = ("conversations", "messages")
SPELLED = ("from", "value")
FORMS = ("control-text", "conversations", "sharegpt", "text", "mixed")
"""Formats of records. conversations reads plain text rows too; mixed also reads dialogues with markers."""


class Shape(NamedTuple):
    """The fields that a record of a shape has to have, and whether a format reads them."""

    fields: tuple[str, ...]
    is_read: bool = False


TEXT = "text"
"""Placeholder for the field with text, whose name --jsonl-keys specifies."""
SHAPES: tuple[Shape, ...] = (
    *(Shape((name,), is_read=True) for name in FIELDS),
    Shape((TEXT,), is_read=True),
    Shape(("prompt", "completion")),
    Shape(("prompt", "response")),
    Shape(("instruction", "output")),
    Shape(("instruction", "response")),
    Shape(("question", "answer")),
    Shape(("query", "response")),
    Shape(("inputs", "targets")),
    Shape(("input", "output")),
    Shape(("chosen", "rejected")),
)
BESIDE_TURNS = (
    "instruction", "input", "output", "query", "response", "completion", "chosen", "rejected", "rejected_response",
)  # fmt: skip
"""Fields that are each a second reading beside turns, unless the field repeats the text of a turn."""
NAMES = frozenset(name for shape in SHAPES for name in shape.fields) - {TEXT} | {*BESIDE_TURNS}


def shapes_of(record: Mapping[str, Any], key: str = TEXT) -> list[Shape]:
    """The shapes of a record; conversations and messages count as one, because their reader compares them.

    Args:
        record: the record with all its keys. Empty fields count as absent: tables have every field in every row.
        key: name of the field with text.
    """
    if len(record) == 1:  # the usual record, checked fast
        return [shape for shape in SHAPES if len(shape.fields) == 1 and _named(shape.fields[0], key) in record]
    shapes: list[Shape] = []
    for shape in SHAPES:
        if all(not is_empty(record.get(_named(name, key))) for name in shape.fields) and not (
            shape.fields[0] in FIELDS and shapes
        ):
            shapes.append(shape)
    if shapes and shapes[0].fields[0] in FIELDS:
        known = {name for shape in shapes for name in shape.fields}
        shapes += [Shape((name,)) for name in BESIDE_TURNS if name not in known and _says_more(record, name)]
    return shapes


def _says_more(record: Mapping[str, Any], name: str) -> bool:
    """Whether a field of a record with turns has text that no turn has."""
    value, turns = record.get(name), record[str(turns_field(record))]
    if is_empty(value) or value == turns:
        return False
    return not any(isinstance(turn, dict) and value in turn.values() for turn in turns or ())


def describe(shapes: list[Shape], key: str = TEXT) -> str:
    """Shapes as text for an error."""
    return " beside ".join(" and ".join(_named(name, key) for name in shape.fields) for shape in shapes)


def _named(name: str, key: str) -> str:
    return key if name == TEXT else name


def turns_field(record: Mapping[str, Any]) -> str | None:
    """The name of the field with turns, None if there is none; a non-empty one is preferred, null counts as absent."""
    present = [name for name in FIELDS if record.get(name) is not None]
    return next((name for name in present if not is_empty(record[name])), next(iter(present), None))


def form_of(value: Any, key: str = TEXT) -> str:
    """The format that `--format auto` detects from a record."""
    if not isinstance(value, dict):
        return "text"
    shapes = shapes_of(value, key)
    name = shapes[0].fields[0] if shapes else turns_field(value)
    if name in FIELDS:
        return "sharegpt" if _is_spelled(value[name]) else "conversations"
    text = value.get(key)
    return "control-text" if isinstance(text, str) and MARKER.search(text) else "text"


def form_of_all(values: Iterable[Any], key: str = TEXT) -> str:
    """The format that `--format auto` detects from the first records of all files.

    This is the format of the first record; but where plain text comes first, dialogues among the others are read too.
    """
    forms = list(dict.fromkeys(form_of(value, key) for value in values)) or [form_of(None)]
    dialogues = {*forms[1:]} if forms[0] == "text" else set()
    return {frozenset({"conversations"}): "conversations", frozenset({"control-text"}): "mixed",
            frozenset({"conversations", "control-text"}): "mixed"}.get(frozenset(dialogues), forms[0])  # fmt: skip


def _is_spelled(turns: Any) -> bool:
    """Whether turns have the keys of ShareGPT for speaker and text."""
    return bool(isinstance(turns, list) and turns and isinstance(turns[0], dict) and {*SPELLED} <= turns[0].keys())
