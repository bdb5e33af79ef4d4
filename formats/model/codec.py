"""Settings as tables: a row names a setting and its keys in a framework, and is used for reading and for writing.

    layers           num_layers
    norm_epsilon     layernorm_epsilon|norm_epsilon
    tied             untie_embeddings_and_output_weights      opposite
    dense_layers     moe_layer_freq                           MoE frequency            moe

Columns are separated by two or more spaces: the setting, its keys, the codec, the condition under which the row holds.
A space separates keys that together spell one setting, `|` separates names of one key: a reader takes the first name
that has a value. `-` as keys means no key: the setting follows from others; `-` as setting means no setting: the keys
follow from other settings.

A codec is two small functions, each the inverse of the other; the inverse of a table is never written. The property
tests (`tests/property/test_settings.py`) go through every row in both directions. Every table has these:

    codec                   reads                                                 writes
    (none), same            the value                                             the value
    opposite                not the value                                         not the value
    = VALUE                 VALUE (JSON), also where the key is absent; refuses others    VALUE
    stated VALUE            VALUE (JSON); refuses others, and an absent key       VALUE
    write VALUE             nothing                                               VALUE (JSON)
    default VALUE           the value; VALUE (JSON) where it is absent or null    the value
    default heads           the same, with the number of heads                    the value
    default hidden / heads  the same, with the head dimension that follows        the value

A table adds codecs of its own, by name; those of several tables are `single`, `default` and `choice` below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from formats.errors import RefusedError, UnsupportedError, short
from formats.model.values import equal, positive_int

Spelled = Mapping[str, Any]
"""Keys of a framework and their values."""


class Context(NamedTuple):
    """The data that a codec may read besides its own keys.

    Attributes:
        values: the settings of the rows above when reading, all settings when writing.
        where: name of the file, for errors.
        file: all keys of the file that is read, or of the file that the written keys will be put into.
        notes: a reader adds a note for each value that it takes from a documented default.
    """

    values: Mapping[str, Any]
    where: str
    file: Spelled
    notes: list[str]


class Codec(NamedTuple):
    """How one setting is spelled in the keys of its row.

    Attributes:
        read: returns the setting's value, from the values of the row's keys that have one; raises for invalid values.
        write: returns all keys of the row, for a setting's value; raises RefusedError where the framework cannot
            express the value.
    """

    read: Callable[[Spelled, Context], Any]
    write: Callable[[Any, Context], Spelled]


Value = Callable[[Any, Context], Any]


def scalar(key: str, read: Value, write: Value) -> Codec:
    """A codec of one key: `read` gets the key's value, None if the key has none."""
    return Codec(
        lambda spelled, context: read(spelled.get(key), context),
        lambda value, context: {key: write(value, context)},
    )


class Row(NamedTuple):
    """One line of a table. `keys` has a tuple of names for each key, of which the first is the usual name."""

    setting: str
    keys: tuple[tuple[str, ...], ...]
    codec: Codec
    condition: str = ""


Maker = Callable[..., Codec]
"""Makes a codec from the usual names of a row's keys."""


def single(read: Value, write: Value = lambda value, _: value) -> Maker:
    """A codec of one key, with None for no value; further keys of the row are only read."""
    return lambda key, *_: scalar(key, read, write)


def same(key: str) -> Codec:
    """The codec of a key whose value is the setting's value."""
    return scalar(key, lambda value, _: value, lambda value, _: value)


def opposite(key: str) -> Codec:
    """The codec of a key whose value is the negated setting."""
    turn = lambda value, _: None if value is None else not value  # noqa: E731 (its own inverse)
    return scalar(key, turn, turn)


def default(value_of: Callable[[Context], Any]) -> Maker:
    """A codec of a key with a default, which `value_of` returns where the key is absent or null."""
    return single(lambda value, context: value_of(context) if value is None else value)


def choice(*spellings: tuple[Any, Any]) -> Maker:
    """A codec of one key that has one of some values; without the key it is the first.

    Args:
        spellings: (value of the key, value of the setting).
    """

    def of(key: str) -> Codec:
        def read(_: Any, context: Context) -> Any:
            spelled = context.file.get(key, spellings[0][0])
            for known, value in spellings:
                if equal(spelled, known):
                    return value
            only = f"{key} = {short(spelled)} is not supported, only {spellings[0][0]!r}"
            raise UnsupportedError(f"{context.where}: {only}")

        return scalar(
            key, read, lambda value, _: next((known for known, of in spellings if of == value), spellings[0][0])
        )

    return of


def stated(value: Any) -> Maker:
    """A codec of one key that has to be there, with one value: what the framework takes without it is another."""

    def of(key: str) -> Codec:
        def read(spelled: Any, context: Context) -> Any:
            if not equal(spelled, value):
                present = "is not there" if spelled is None else f"= {short(spelled)}"
                raise UnsupportedError(f"{context.where}: {key} {present}; of such a model only {value!r} is supported")
            return value

        return scalar(key, read, lambda *_: value)

    return of


def fixed(*allowed: Any, error: Callable[[Any, Context], RefusedError]) -> Maker:
    """A codec of a setting without a key: reads the first of the allowed values, writes nothing.

    Args:
        allowed: the values that may be written.
        error: the error for another value.
    """

    def write(value: Any, context: Context) -> Spelled:
        if value not in allowed:
            raise error(value, context)
        return {}

    return lambda: Codec(lambda *_: allowed[0], write)


def _head_dim(context: Context) -> int:
    hidden, heads = (positive_int(context.values[name], name, context.where) for name in ("hidden", "heads"))
    return hidden // heads


CODECS: Mapping[str, Maker] = {
    "": same,
    "same": same,
    "opposite": opposite,
    "default heads": default(lambda context: context.values["heads"]),
    "default hidden / heads": default(_head_dim),
}
"""The codecs that every table has, by name."""
WITH_VALUE: Mapping[str, Callable[[Any], Maker]] = {
    "=": lambda value: choice((value, value)),
    "stated": stated,
    "write": lambda value: single(lambda *_: None, lambda *_: value),
    "default": lambda value: default(lambda _: value),
}
"""The codecs that every table has and whose names end with a value in JSON, by the first word."""


def _maker(name: str, codecs: Mapping[str, Maker]) -> Maker:
    if maker := {**CODECS, **codecs}.get(name):
        return maker
    word, _, value = name.partition(" ")
    return WITH_VALUE[word](json.loads(value))


def rows(table: str, codecs: Mapping[str, Maker]) -> tuple[Row, ...]:
    """Parse a table.

    Args:
        table: the text of the table, a row per line.
        codecs: maker of a codec from the names of the keys, by the name in the third column, of the table's own codecs.
    """
    parsed = []
    for line in table.strip().splitlines():
        setting, spelling, codec, condition = (*re.split(r"\s{2,}", line.strip()), "", "")[:4]
        keys = tuple(tuple(key.split("|")) for key in spelling.split() if key != "-")
        parsed.append(Row(setting, keys, _maker(codec, codecs)(*(names[0] for names in keys)), condition))
    return tuple(parsed)


def read(
    table: Iterable[Row],
    spelled: Spelled,
    conditions: Collection[str],
    where: str,
    known: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """The settings of the rows that hold, read from a framework's keys. Raises what a codec raises for invalid values.

    Args:
        table: the rows.
        spelled: the keys and their values.
        conditions: the conditions that hold.
        where: name of the file, for errors.
        known: settings that have no row, which codecs may read.
        notes: list that gets a note for each value that a codec takes from a documented default.
    """
    values: dict[str, Any] = dict(known or {})
    context = Context(values, where, spelled, [] if notes is None else notes)
    for row in table:
        if not row.condition or row.condition in conditions:
            given = {
                names[0]: spelled[name]
                for names in row.keys
                for name in reversed(names)
                if spelled.get(name) is not None
            }
            setting = row.codec.read(given, context)
            values |= {row.setting: setting} if row.setting != "-" else {}
    return values


def write(
    table: Iterable[Row],
    values: Mapping[str, Any],
    conditions: Collection[str],
    where: str,
    file: Spelled | None = None,
) -> dict[str, Any]:
    """The keys of the rows that hold, under each of their names, for the settings of a model; `file` will get them."""
    spelled: dict[str, Any] = {}
    context = Context(values, where, file or {}, [])
    for row in table:
        if not row.condition or row.condition in conditions:
            written = row.codec.write(values.get(row.setting), context)
            spelled |= {name: written[names[0]] for names in row.keys for name in names if names[0] in written}
    return spelled
