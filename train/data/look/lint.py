"""What is wrong with training data before it is tokenized: every finding with its file and line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.errors import SourceError
from train.data.tokens.encode import Encoder
from train.data.tokens.input_ranges import Ranges, ranges, values
from train.data.tokens.records import Malformed, Reader, Record, reader
from train.data.tokens.shapes import form_of

NOTES = {
    "token": "contents that spell a control token; they stay text",
    "twice": "records that stand there twice",
    "left out": "records with a reply that they leave out of the training",
}
"""Findings that drop nothing."""
OVER = "documents longer than a row"
SHOWN = 5
"""Places that are told for each finding."""


@dataclass
class Findings:
    """What was found.

    Attributes:
        records: how many there are, malformed ones included.
        unread: why files could not be read.
        form: the format of all files, decided by the first record as `train tokenize` does.
        counts: finding to how often.
        places: finding to the first places, `FILE:LINE`.
    """

    records: int = 0
    unread: list[SourceError] = field(default_factory=list)
    form: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def note(self, finding: str, place: str) -> None:
        """Count a finding."""
        self.counts[finding] += 1
        shown = self.places.setdefault(finding, [])
        if len(shown) < SHOWN:
            shown.append(place)


def lint(
    paths: Iterable[Path],
    *,
    form: str = "auto",
    roles: Sequence[str],
    key: str = "text",
    encode: Encoder | None = None,
    longest: int | None = None,
    template: str | None = None,
) -> Findings:
    """Read files and tell what tokenization would drop, and what else is strange.

    Args:
        paths: the files.
        form: one of `shapes.FORMS`, or auto.
        roles: those that have a control token; empty if a chat template judges them.
        key: the field that holds text.
        encode: tokenization, to count tokens.
        longest: tokens of the longest document that fits a row.
        template: the chat template that they are for.
    """
    found = Findings()
    seen: set[int] = set()
    read: Reader | None = None
    for path in paths:
        try:
            parts = ranges([path])
        except SourceError as error:
            found.unread.append(error)
            continue
        for number, value in _numbered(parts, key):
            place = f"{path}:{number + 1}"
            found.records += 1
            try:
                if isinstance(value, Malformed):
                    raise value
                if read is None:
                    found.form = form_of(value, key) if form == "auto" else form
                    read = reader(found.form, roles, key, template=template, auto=form == "auto")
                record = read(value)
            except Malformed as error:
                found.note(error.reason, place + (f", {error.detail}" if error.detail else ""))
                continue
            for note in _notes(record, roles, seen, encode, longest):
                found.note(note, place)
    return found


def _numbered(parts: Ranges, key: str) -> Iterator[tuple[int, Any]]:
    """Values of a file that are not blank, with their line from 0."""
    number = 0
    for part in parts:
        for value in values(part, key):
            if value is not None:
                yield number, value
            number += 1


def _notes(
    record: Record, roles: Sequence[str], seen: set[int], encode: Encoder | None, longest: int | None
) -> Iterator[str]:
    if any(f"<|{role}|>" in text for role in roles for text in record.contents):
        yield "token"
    if record.left_out:
        yield "left out"
    known = hash((tuple(record.roles), tuple(record.contents), record.left_out))
    if known in seen:
        yield "twice"
    seen.add(known)
    if encode is not None and longest is not None:
        encoded = encode([record])
        if encoded.refused:
            yield encoded.refused[0][1]
        elif encoded.sizes[0] > longest:
            yield "over"
