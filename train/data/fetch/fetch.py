"""Converts a source to one JSON line per record: filtered, made into turns, checked, counted; complete or absent.

The order is that of the source. Dropped records are counted by reason; nothing is repaired.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from converters.common.atomic import lock, sync_path
from formats.errors import OutputError, SourceError, UsageError
from train.data.fetch.recipe import Recipe, nearest
from train.data.fetch.reservoir import Sample
from train.data.fetch.sources import Source
from train.data.fetch.tables import Row
from train.data.tokens.records import REASONS, Malformed, Record, reader
from train.data.tokens.shapes import MARKER

OUR_REASONS: Mapping[str, str] = {
    "filter": "the conditions of the recipe do not hold",
    "duplicate": "an earlier record has the same prompt",
    "columns": "the line of a table has more or fewer cells than its header",
}
CHOSEN = ("filter", "duplicate")
"""Reasons to drop a record that the recipe asks for: the record has no fault."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Made(NamedTuple):
    """An output record.

    Attributes:
        line: the output of `json.dumps(…, ensure_ascii=False)`, with a line break.
        prompt: the first turn of the user; the whole text, if there are no turns.
    """

    line: bytes
    prompt: str


@dataclass
class Counts:
    """Numbers of records that were read, kept, dropped and written.

    Attributes:
        read: number of records of the source.
        kept: number of records that were not dropped; a sample is drawn from these.
        dropped: number of dropped records by reason.
        written: number of lines written.
        nbytes: size of the written lines, in bytes.
    """

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    written: int = 0
    nbytes: int = 0


def fetch(
    recipe: Recipe, source: Source, out: Path, force: bool, strict: bool, tell: Callable[[Counts], None]
) -> Counts:
    """Write the records that a recipe selects to a file.

    Args:
        recipe: the recipe.
        source: the opened source of the recipe.
        out: the file to write; it appears when it is complete.
        force: whether to replace an existing file.
        strict: whether to stop at the first malformed record.
        tell: called with the counts after every record.

    Raises:
        SourceError: the source is damaged, a record is malformed and strict is set, or nothing is left.
        OutputError: the file exists, or there is no room for it.
        UsageError: the file is also the input.
        NetworkError: the connection to the Hub is lost.
    """
    if out.exists() and any(Path(name).exists() and out.samefile(name) for name, _ in source.parts):
        raise UsageError(f"{out} is also the input")
    counts = Counts()
    lines = (record.line for record in made(recipe, source, counts, strict, tell))
    with published(out, force) as file:
        for line in lines if recipe.sample is None else _drawn(lines, recipe.sample, recipe.seed, out.parent):
            file.write(line)
            counts.written += 1
            counts.nbytes += len(line)
        if not counts.written:
            raise SourceError(f"nothing is left of {source.name}: {summary(counts)}")
    return counts


def made(
    recipe: Recipe, source: Source, counts: Counts, strict: bool = False, tell: Callable[[Counts], None] | None = None
) -> Iterator[Made]:
    """The records that a recipe selects, in the order of the source. The arguments are those of `fetch`.

    Raises:
        SourceError: a record is malformed and strict is set.
        UsageError: no record has a field that the recipe names.
    """
    make, seen = maker(recipe), set[bytes]()
    unseen, known = set(recipe.fields), dict[str, None]()
    for name, begin in source.parts:
        for number, row in enumerate(begin(), 1):
            counts.read += 1
            if tell is not None:
                tell(counts)
            if unseen and not isinstance(row, str):
                unseen.difference_update(row)
                known.update(dict.fromkeys(row))
            try:
                record = _one(row, recipe, make)
            except Malformed as error:
                counts.dropped[error.reason] += 1
                if strict:
                    raise SourceError(f"record {number} of {name}: {error}", "without --strict it is dropped") from None
                continue
            reason = "filter" if record is None else _twice(record, seen) if recipe.dedup else ""
            if reason or record is None:
                counts.dropped[reason] += 1
                continue
            counts.kept += 1
            yield record
    if unseen and known:
        missing = next(name for name in recipe.fields if name in unseen)
        raise UsageError(
            f"no record of {source.name} has the field {missing!r}{nearest(missing, known)}",
            f"its fields: {', '.join(list(known)[:20])}",
        )


def maker(recipe: Recipe) -> Callable[[Mapping[str, Any]], Made]:
    """A function that makes the output record of a record of the source, or raises Malformed."""
    roles = dict(recipe.roles)
    judge = reader(recipe.form, tuple({*roles.values(), *(role for role, _ in recipe.speakers)}))

    def text(record: Mapping[str, Any]) -> tuple[dict[str, Any], None]:
        assert recipe.text is not None
        return {"text": recipe.text.fill(record)}, None

    def spoken(record: Mapping[str, Any]) -> tuple[dict[str, Any], Record]:
        turns = [
            {"role": role, "content": template.fill(record)}
            for role, template in recipe.speakers
            if role != "system" or _has_system_prompt(template.fields, record)
        ]
        return _written(turns, recipe.form)

    def conversation(record: Mapping[str, Any]) -> tuple[dict[str, Any], Record]:
        assert recipe.conversations is not None
        return _written(_turns(record.get(recipe.conversations), recipe.turns, roles), recipe.form)

    shape = text if recipe.text else conversation if recipe.conversations else spoken

    def make(record: Mapping[str, Any]) -> Made:
        value, turns = shape(record)
        read_back = judge(value if turns is None or "text" in value else {"conversations": turns.messages})
        if turns is not None and (list(read_back.roles), list(read_back.contents)) != (turns.roles, turns.contents):
            raise Malformed("marker")  # the text would read back as other turns
        prompt = (
            read_back.contents[list(read_back.roles).index("user")]
            if "user" in read_back.roles
            else read_back.contents[0]
        )
        value.update({name: record[name] for name in recipe.keep if record.get(name) is not None})
        return Made(_line(value), prompt)

    return make


def summary(counts: Counts) -> str:
    """The counts as one line of text."""
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in counts.dropped.most_common())
    return f"{counts.read:,} read, {counts.kept:,} kept, {counts.dropped.total():,} dropped" + (
        f" ({dropped})" if dropped else ""
    )


def explanations(counts: Counts) -> list[str]:
    """Explanations of the reasons for which records were dropped, a line for each."""
    meanings = {**REASONS, **OUR_REASONS}
    return [f"{reason}: {meanings[reason]}" for reason in counts.dropped if reason not in CHOSEN]


# --- records ---------------------------------------------------------------------------------------------------------


class _Unfit(Malformed):
    """Raised for a row that its reader could not read, with a reason of `REASONS` or `OUR_REASONS`."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, {**REASONS, **OUR_REASONS}[reason])
        self.reason = reason


def _one(row: Row, recipe: Recipe, make: Callable[[Mapping[str, Any]], Made]) -> Made | None:
    """The output record of a row, None if a condition of the recipe does not hold."""
    if isinstance(row, str):
        raise _Unfit(row)
    return make(row) if all(condition.holds(row) for condition in recipe.where) else None


def _twice(record: Made, seen: set[bytes]) -> str:
    """`duplicate` if the prompt was seen before, else empty. Per prompt, a hash of 16 bytes takes about 100 bytes."""
    digest = blake2b(record.prompt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return "duplicate"
    seen.add(digest)
    return ""


def _has_system_prompt(fields: tuple[str, ...], record: Mapping[str, Any]) -> bool:
    """Whether a record has a system prompt, which is optional."""
    values = [record.get(name) for name in fields]
    return not all(value is None or (isinstance(value, str) and not value.strip()) for value in values)


def _turns(value: Any, keys: tuple[str, str], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The turns of a field: role, content, and all other keys, which `train tokenize` heeds or refuses."""
    if value is None:
        raise Malformed("field")
    speaker, content = keys
    if isinstance(value, dict) and isinstance(value.get(speaker), list) and isinstance(value.get(content), list):
        columns = {name: column for name, column in value.items() if column is not None}
        sizes = {len(column) if isinstance(column, list) else -1 for column in columns.values()}
        if len(sizes) > 1:  # `datasets` turns a Sequence of dicts into a dict of lists
            raise Malformed("type")
        value = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise Malformed("type")
    if not value:
        raise Malformed("empty")
    records = []
    for turn in value:
        who, text = turn.get(speaker), turn.get(content)
        if who is None or text is None:
            raise Malformed("keys" if {"from", "value"} <= turn.keys() and speaker == "role" else "field")
        if not isinstance(who, str) or not isinstance(text, str):
            raise Malformed("type")
        if who not in roles:
            raise Malformed("role")
        others = {name: item for name, item in turn.items() if name not in keys and item is not None}
        if not others.keys().isdisjoint(("role", "content")):
            raise Malformed("unknown")
        records.append({"role": roles[who], "content": text, **others})
    return records


def _written(turns: list[dict[str, Any]], form: str) -> tuple[dict[str, Any], Record]:
    """Turns in the output format of the recipe, and the same turns as a Record."""
    record = Record([turn["role"] for turn in turns], [turn["content"] for turn in turns])
    if form == "conversations":
        return {"conversations": turns}, record
    if reader("conversations", ())({"conversations": turns}).left_out:
        raise Malformed("bins")
    if any(MARKER.search(text) for text in record.contents):
        raise Malformed("marker")
    marked = (f"<<<|{role}|>>>{text}<<<|{role}|>>>" for role, text in zip(record.roles, record.contents, strict=True))
    return {"text": "".join(marked)}, record


def _line(value: Mapping[str, Any]) -> bytes:
    """A record as a JSON line. Raises Malformed if a field of `keep` cannot be written as JSON."""
    try:
        return (json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain) + "\n").encode()
    except (ValueError, RecursionError):  # NaN, half of a surrogate pair, or too deep nesting
        raise Malformed("type") from None


def _plain(value: Any) -> Any:
    """The text of a kept field that JSON has no type for, such as a date."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# --- output ----------------------------------------------------------------------------------------------------------


def _drawn(lines: Iterator[bytes], count: int, seed: int, folder: Path) -> Iterator[bytes]:
    """The lines of a sample; candidates are in an unnamed temporary file, so a killed process leaves no file."""
    with tempfile.TemporaryFile(dir=folder) as file:
        sample = Sample(count, seed, file)
        for line in lines:
            sample.offer(line)
        yield from sample.lines()


@contextmanager
def published(out: Path, force: bool) -> Iterator[IO[bytes]]:
    """Open a file that appears when it is complete. Until then it is OUT.tmp, which only one process writes.

    Raises:
        OutputError: the file exists, another process writes it, or there is no room.
    """
    check_free(out, force)
    target = Path(os.path.realpath(out))
    staged = target.with_name(target.name + ".tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(staged, out) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            check_free(out, force)
            staged.rename(target)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OutputError(f"there is no room for {out}: {error.strerror}; nothing was written") from None
    sync_path(target.parent)


@contextmanager
def _locked(staged: Path, out: Path) -> Iterator[IO[bytes]]:
    """Open an empty file that is locked by this process, and deleted after an error."""
    handle = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(handle, "wb") as file:  # noqa: PTH123  # it is open
        lock(handle, staged)
        if not staged.exists() or not os.path.samestat(os.fstat(handle), staged.stat()):
            raise OutputError(f"another process has just written {out}")
        try:
            file.truncate(0)
            yield file
        except BaseException:
            staged.unlink(missing_ok=True)
            raise


def check_free(out: Path, force: bool) -> None:
    """Check that a file may be written.

    Raises:
        OutputError: the file exists, and `force` is not set.
        UsageError: the path is not a file.
    """
    try:
        mode = out.stat().st_mode
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UsageError(f"{out} is in something that is not a folder") from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{out} is not a file: OUT has to be one", f"{out / 'NAME.jsonl'}")
    if not force:
        raise OutputError(f"{out} exists", "--force replaces it")
