"""Settings as tables: a row names a setting and its keys in a framework, and is used for reading and for writing.

    layers           num_layers
    norm_epsilon     layernorm_epsilon|norm_epsilon
    tied             untie_embeddings_and_output_weights      opposite
    dense_layers     moe_layer_freq                           zero_in_dense_layers     moe

Columns are separated by two or more spaces: the setting, its keys, the codec, the condition under which the row holds.
A space separates keys that together spell one setting, `|` separates names of one key: a reader takes the first name
that has a value. `-` as keys means no key: the setting follows from others; `-` as setting means no setting: the keys
follow from other settings.
A codec is two small functions, each the inverse of the other; the inverse of a table is never written. The property
tests (`tests/property/test_settings.py`) go through every row in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

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


def same(key: str) -> Codec:
    """The codec of a key whose value is the setting's value."""
    return scalar(key, lambda value, _: value, lambda value, _: value)


def opposite(key: str) -> Codec:
    """The codec of a key whose value is the negated setting."""
    turn = lambda value, _: None if value is None else not value  # noqa: E731 (its own inverse)
    return scalar(key, turn, turn)


def rows(table: str, codecs: Mapping[str, Maker]) -> tuple[Row, ...]:
    """Parse a table.

    Args:
        table: the text of the table, a row per line.
        codecs: maker of a codec from the names of the keys, by the name in the third column.
    """
    parsed = []
    for line in table.strip().splitlines():
        setting, spelling, codec, condition = (*re.split(r"\s{2,}", line.strip()), "", "")[:4]
        keys = tuple(tuple(key.split("|")) for key in spelling.split() if key != "-")
        parsed.append(Row(setting, keys, {"": same, **codecs}[codec](*(names[0] for names in keys)), condition))
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
