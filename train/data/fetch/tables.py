"""Reads local files of records exactly: every cell of a table is text, and types are never guessed.

The library `datasets` guesses the types of columns (5.2.0, packaged_modules/csv and json): the word NA becomes null,
007 becomes 7, and a date becomes another text. `datasets` reads sets on the Hub only, whose types are already fixed.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from formats.errors import SourceError, UsageError, short
from train.data.fetch.recipe import SUFFIXES, Recipe, expanded, nearest
from train.data.tokens.input_ranges import json_reader, key_twice, present
from train.data.tokens.records import Malformed

Row = Mapping[str, Any] | str
"""A record, or the reason why the row has none: a key of `REASONS` in records or of `OUR_REASONS` in fetch."""
LONGEST = 64 << 20
BATCH = 256
BOM = b"\xef\xbb\xbf"


def files_of(recipe: Recipe) -> list[Path]:
    """The files that a recipe names, in the order of the recipe; the files of a glob pattern are sorted by name.

    Raises:
        UsageError: a file does not exist, or has no suffix of a known format.
    """
    paths: list[Path] = []
    for source in recipe.source:
        path = expanded(source)
        matches = [Path(match) for match in sorted(glob(str(path)))] if has_magic(str(path)) else [path]  # noqa: PTH207
        missing = [match for match in matches if not match.is_file()]
        if missing or not matches:
            raise UsageError(f"there is no file {missing[0] if missing else path}", "train fetch RECIPE --source FILE")
        paths += matches
    for path in paths:
        if not path.name.lower().removesuffix(".gz").endswith(SUFFIXES):
            raise UsageError(f"{path} has none of the suffixes {' '.join(SUFFIXES)}")
    return paths


def require(fields: Sequence[str], known: Sequence[str], place: object) -> None:
    """Check that a table has all columns that a recipe reads.

    Raises:
        UsageError: a column does not exist.
    """
    for name in fields:
        if name not in known:
            raise UsageError(
                f"{place} has no field {short(name)}{nearest(name, known)}",
                f"its fields: {', '.join(known[:20])}{' …' if len(known) > 20 else ''}",
            )


def rows(path: Path, quotes: bool | None, fields: Sequence[str]) -> Iterator[Row]:
    """The records of a file.

    Args:
        path: the file; its suffix determines the format, and .gz may follow.
        quotes: whether a field of a table may be quoted; None for .csv only.
        fields: the columns to read; a table has to have all of them, a JSON line need not.

    Raises:
        SourceError: the file is damaged.
        UsageError: a table lacks a column.
    """
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    readers: Mapping[str, Callable[[Path], Iterator[Row]]] = {
        ".csv": partial(_table, separator=",", quotes=quotes is not False, fields=fields),
        ".tsv": partial(_table, separator="\t", quotes=bool(quotes), fields=fields),
        ".json": _json,
        ".jsonl": _lines,
        ".ndjson": _lines,
        ".parquet": partial(_parquet, fields=fields),
    }
    try:
        yield from readers[suffix](path)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SourceError(f"{path} is not UTF-8: it has the byte 0x{byte:02x}", "iconv -f LATIN1 -t UTF-8") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise SourceError(f"{path} is damaged: {error}") from None


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _table(path: Path, separator: str, quotes: bool, fields: Sequence[str]) -> Iterator[Row]:
    """The records of a table with a header. Without `quotes` (.tsv, as registered with IANA) a quote is plain text."""
    csv.field_size_limit(LONGEST)
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        table = csv.reader(
            text, delimiter=separator, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE, strict=True
        )
        try:
            header = next(table, [])
            _check_header(path, header)
            require(fields, header, path)
            for cells in table:
                if len(cells) == len(header):
                    yield dict(zip(header, cells, strict=True))
                elif cells:
                    yield "columns"
        except csv.Error as error:
            raise SourceError(
                f"{path}, line {table.line_num}: {error}", "quotes: false in the recipe, if quotes are plain characters"
            ) from None


def _check_header(path: Path, header: Sequence[str]) -> None:
    if not header:
        raise SourceError(f"{path} has no header: its first line has to name the columns")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise SourceError(f"{path} has two columns named {short(twice)}")


def _json(path: Path) -> Iterator[Row]:
    """The records of one JSON array of objects, which is read as a whole; or of JSON lines."""
    with _opened(path) as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
    if not start.startswith(b"["):
        yield from _lines(path)
        return
    import orjson

    with _opened(path) as file:
        text = file.read().removeprefix(BOM)
    try:
        content = orjson.loads(text)
        twice = key_twice(text, content)
    except (orjson.JSONDecodeError, RecursionError) as error:  # orjson allows deeper nesting
        raise SourceError(f"{path} is not JSON: {error}") from None
    if twice is not None:
        raise SourceError(f"{path} has an object with the key {short(twice)} twice", "keep one of them")
    for value in content:
        yield value if isinstance(value, dict) else "object"


def _lines(path: Path) -> Iterator[Row]:
    read = json_reader()
    with _opened(path) as file:
        for line in _bounded(file):
            if line is None:
                yield "long"
            elif line.strip():
                value = read(line)
                fault = value.reason if isinstance(value, Malformed) else "object"
                yield value if isinstance(value, dict) else fault


def _bounded(file: IO[bytes]) -> Iterator[bytes | None]:
    """The lines of a file, None for a line longer than `LONGEST`."""
    first = True
    while line := file.readline(LONGEST + 1):
        whole = len(line) <= LONGEST
        while not line.endswith(b"\n") and len(line) > LONGEST and (line := file.readline(LONGEST + 1)):
            pass
        yield (line.removeprefix(BOM) if first else line) if whole else None
        first = False


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    if path.name.lower().endswith(".gz"):
        raise UsageError(f"{path} has to be unpacked first", f"gunzip {path}")
    with path.open("rb") as file:
        yield from parquet_rows(file, fields, str(path))


def arrow_row(row: Mapping[str, Any]) -> Row:
    """A row of Arrow, whose structs have every key in every row, without those that are null."""
    return {name: present(value) for name, value in row.items()}


def parquet_rows(file: IO[bytes], fields: Sequence[str], place: str) -> Iterator[Row]:
    """The records of a Parquet file, one column chunk of a row group at a time.

    The scanner of Arrow's datasets, which `datasets` streams with, reads ahead of a slow consumer: it used 900 MB of
    memory for a file of 400 MB (pyarrow 26.0.1, with any of its options).

    Args:
        file: the file, which may be remote.
        fields: the columns to read.
        place: name of the file in errors.

    Raises:
        SourceError: the file is damaged.
        UsageError: the file lacks a column.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file, pre_buffer=False) as parquet:
            require(fields, parquet.schema_arrow.names, place)
            for batch in parquet.iter_batches(BATCH, columns=list(fields), use_threads=False):
                yield from map(arrow_row, batch.to_pylist())
    except pa.ArrowException as error:
        raise SourceError(f"{place} is damaged or not a Parquet file: {str(error).splitlines()[0][:200]}") from None
