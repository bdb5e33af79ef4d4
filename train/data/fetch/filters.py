"""Conditions that select records, and templates that make text of their fields.

Nothing in a recipe is ever executed: a test is a key of `TESTS`, a template is text with names of fields in braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from formats.errors import UsageError, short
from train.data.tokens.records import Malformed

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


def _comparable(cell: Any, expected: Any) -> Any:
    """The value of a field in the type of the recipe's value, as text that is a number can be compared with a number.

    Raises:
        UsageError: the two types can never be equal, which is a mistake in the recipe.
    """
    if isinstance(cell, date):  # datetime too
        cell = cell.isoformat()
    if isinstance(expected, bool) or isinstance(cell, bool):
        fits = isinstance(cell, bool) and isinstance(expected, bool)
    elif isinstance(expected, str):
        fits = isinstance(cell, str)
    elif isinstance(cell, str):
        return float(cell) if NUMBER.fullmatch(cell.strip()) else None
    else:
        fits = isinstance(cell, int | float)
    if not fits:
        raise UsageError(
            f"it holds {short(cell)}, which can never be compared with {short(expected)}",
            "text has quotes in a recipe, numbers and true and false have none",
        )
    return cell


def _is(cell: Any, expected: Any) -> bool:
    if cell is None or expected is None:
        return cell is expected
    return bool(_comparable(cell, expected) == expected)


def _in(cell: Any, expected: Any) -> bool:
    return any(_is(cell, item) for item in expected)


def _like(cell: Any, expected: Any) -> bool:
    return cell is not None and fnmatchcase(_comparable(cell, expected), expected)


def _min(cell: Any, expected: Any) -> bool:
    value = None if cell is None else _comparable(cell, expected)
    return value is not None and bool(value >= expected)


def _max(cell: Any, expected: Any) -> bool:
    value = None if cell is None else _comparable(cell, expected)
    return value is not None and bool(value <= expected)


TESTS: Mapping[str, tuple[Callable[[Any, Any], bool], bool, str]] = {
    "is":       (_is, True, "value"),
    "not":      (_is, False, "value"),
    "in":       (_in, True, "list"),
    "not_in":   (_in, False, "list"),
    "like":     (_like, True, "pattern"),
    "not_like": (_like, False, "pattern"),
    "min":      (_min, True, "bound"),
    "max":      (_max, True, "bound"),
}  # fmt: skip
"""Name: the test, its required result, and the kind of value that the test takes. A pattern has *, ? and […], and is
case-sensitive.

A null field fails `in`, `like`, `min` and `max`; so `not`, `not_in` and `not_like` hold for it.
"""


class Condition(NamedTuple):
    """A test of one field of a record.

    Attributes:
        field: name of the field.
        test: a key of `TESTS`.
        value: the value that the field is compared with.
    """

    field: str
    test: str
    value: Any

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Whether a record passes the test.

        Raises:
            UsageError: the value in the recipe has another type than the field.
        """
        test, answer, _ = TESTS[self.test]
        try:
            return test(record.get(self.field), self.value) is answer
        except UsageError as error:
            raise UsageError(f"where {self.field}: {error}", error.hint) from None


class Template(NamedTuple):
    """Text with placeholders for fields of a record.

    Attributes:
        texts: the text before, between and after the fields.
        fields: names of the fields, one less than texts.
    """

    texts: tuple[str, ...]
    fields: tuple[str, ...]

    def fill(self, record: Mapping[str, Any]) -> str:
        """The text for a record.

        Raises:
            Malformed: a field is missing, null or not text; or all fields are empty.
        """
        filled, empty = [self.texts[0]], True
        for name, text in zip(self.fields, self.texts[1:], strict=True):
            value = record.get(name)
            if not isinstance(value, str):
                raise Malformed("field" if value is None else "type")
            filled += (value, text)
            empty = empty and not value.strip()
        if empty:
            raise Malformed("empty turn")
        return "".join(filled)


def template(text: str) -> Template:
    """Parse a template: `{name}` is a field, `{{` and `}}` are braces; text without any brace is the name of a field.

    Raises:
        UsageError: a brace has no partner, or no field is named.
    """
    if "{" not in text and "}" not in text:
        return Template(("", ""), (text,))
    texts, fields, last = [""], list[str](), 0
    for match in FIELD.finditer(text):
        texts[-1] += text[last : match.start()]
        last = match.end()
        if match[1] is not None:
            fields.append(match[1])
            texts.append("")
        elif len(match[0]) == 2:
            texts[-1] += match[0][0]
        else:
            raise UsageError(f"{short(text)} has a {match[0]} without a partner", "write {{ and }} for braces in text")
    texts[-1] += text[last:]
    if not fields:
        raise UsageError(f"{short(text)} names no field", 'a template is such as "{prompt}{input}"')
    return Template(tuple(texts), tuple(fields))
