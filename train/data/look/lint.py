"""Finds faults of training data before it is tokenized: every finding with its file and line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.errors import SourceError
from train.data.tokens.encode import Encoder
from train.data.tokens.input_ranges import Ranges, first_values, ranges, values
from train.data.tokens.records import Malformed, Record, reader
from train.data.tokens.shapes import form_of_all
from train.data.tokens.template_encoder import LOST, SPLIT
from train.data.tokens.tokenizers import ROLES
from train.data.tokens.workers import Job, encoder, job_reader

NOTES = {
    "token": "contents that spell a control token; they stay text",
    "twice": "records that occur twice",
    **{kind: f"records of which the chat template leaves out or changes {what}" for kind, what in LOST.items()},
    SPLIT: "documents that are added, for replies that the chat template shows otherwise in a longer one",
    "left out": "records that exclude a reply from the training",
}
"""Kind of finding for which no record is dropped: its description."""
OVER = "documents longer than a row"
SHOWN = 5
"""Number of places that are listed for each kind of finding."""


@dataclass
class Findings:
    """What `lint` found.

    Attributes:
        records: number of records, including malformed ones.
        unread: errors of files that could not be read.
        form: the format of all files, decided by the first record as `train tokenize` does.
        counts: number of findings by kind.
        places: the first places, `FILE:LINE`, by kind of finding.
    """

    records: int = 0
    unread: list[SourceError] = field(default_factory=list)
    form: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def note(self, finding: str, place: str) -> None:
        """Count a finding, and keep its place if it is among the first."""
        self.counts[finding] += 1
        shown = self.places.setdefault(finding, [])
        if len(shown) < SHOWN:
            shown.append(place)


def lint(
    paths: Iterable[Path],
    *,
    form: str = "auto",
    key: str = "text",
    job: Job | None = None,
    longest: int | None = None,
) -> Findings:
    """Read files and report the records that tokenization would drop, and other findings.

    Args:
        paths: the files.
        form: one of `shapes.FORMS`, or auto.
        key: the field that has the text.
        job: how `train tokenize` would encode the records; each is encoded, because some faults show only then. None
            checks the records only.
        longest: number of tokens of the longest document that fits a row; used with a job only.
    """
    findings = Findings(form="" if job is None else job.form)
    seen: set[int] = set()
    read = None if job is None else job_reader(job)
    encode = None if job is None else encoder(job)
    files = [(path, parts) for path in paths if (parts := _cut(path, findings.unread)) is not None]
    if read is None:
        first = (value for _, parts in files for value in first_values(parts, key))
        findings.form = form_of_all(first, key) if form == "auto" else form
        read = reader(findings.form, ROLES, key, auto=form == "auto")
    for path, parts in files:
        for number, value in _numbered(parts, key):
            place = f"{path}:{number + 1}"
            findings.records += 1
            try:
                if isinstance(value, Malformed):
                    raise value
                record = read(value)
            except Malformed as error:
                findings.note(error.reason, place + (f", {error.detail}" if error.detail else ""))
                continue
            for note in _notes(record, seen, encode, longest):
                findings.note(note, place)
    return findings


def _cut(path: Path, unread: list[SourceError]) -> Ranges | None:
    """The ranges of a file; None if it cannot be read: the error is then added to `unread`."""
    try:
        return ranges([path])
    except SourceError as error:
        unread.append(error)
        return None


def _numbered(parts: Ranges, key: str) -> Iterator[tuple[int, Any]]:
    """Values of the lines of a file that are not blank, with the line number from 0."""
    number = 0
    for part in parts:
        for value in values(part, key):
            if value is not None:
                yield number, value
            number += 1


def _notes(record: Record, seen: set[int], encode: Encoder | None, longest: int | None) -> Iterator[str]:
    if any(f"<|{role}|>" in text for role in ROLES for text in record.contents):
        yield "token"
    if record.left_out:
        yield "left out"
    known = hash(repr(record))
    if known in seen:
        yield "twice"
    seen.add(known)
    if encode is not None:
        encoded = encode([record])
        yield from Counter(encoded.counts).elements()
        if encoded.refused:
            yield encoded.refused[0][1]
        elif longest is not None and encoded.sizes[0] > longest:
            yield "over"
