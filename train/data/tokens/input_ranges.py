"""Cuts input files into ranges that are read independently: a worker takes a range at a time, a resumed run skips some.

JSON lines and plain text (a line is a document) are cut at bytes: a range has the lines that begin in it. Parquet is
cut at row groups; a compressed file is one range.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from math import isinf
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, overload

from formats.errors import SourceError, UnsupportedError, UsageError, short
from train.data.tokens.records import Malformed
from train.data.tokens.shapes import FIELDS, NAMES
from train.data.tokens.turn_flags import ALLOWED, MORE, SYSTEM

RANGE = 1 << 20
"""Number of bytes of a range."""
TOOLS = {".gz": "gzip", ".zst": "zstd"}
PACKED = tuple(TOOLS)
LONGEST = 16 << 20
"""Number of bytes of the longest line that is read; a longer line means a file of another format."""
BOM = b"\xef\xbb\xbf"
WIDE = {"UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "UTF-16": (b"\xff\xfe", b"\xfe\xff")}
"""Unsupported encoding: its byte order marks."""
KEY = re.compile(rb'(?<!\\)"[ \t\r]*:')
"""Matches the end of each key of an object in JSON text."""
BEGINS = {
    ".gz": (b"\x1f\x8b",),
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))),
}
"""Suffix: the first bytes of such a compressed file. A zstd file may begin with a skippable frame."""
STEP = {".gz": 1 << 16, ".zst": 1 << 12}
"""Number of bytes that are decompressed at a time, by suffix. 4 KiB of zstd become 128 MiB at most."""


PEEKED = 100
"""Number of records of a file from which `--format auto` detects the format."""


class Range(NamedTuple):
    """A part of an input file: bytes, or row groups; `stop` is -1 for a whole compressed file."""

    path: Path
    begin: int
    stop: int


class Ranges(Sequence[Range]):
    """All ranges of some files, made lazily: a terabyte has a million of them.

    Attributes:
        files: number of ranges of each file, by path.
    """

    def __init__(self, files: Mapping[Path, int]) -> None:
        self.files = files
        self.ends = list(accumulate(files.values()))

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def firsts(self) -> list[int]:
        """The number of the first range of each file."""
        return [end - count for end, count in zip(self.ends, self.files.values(), strict=True)]

    @overload
    def __getitem__(self, place: int) -> Range: ...
    @overload
    def __getitem__(self, place: slice) -> list[Range]: ...
    def __getitem__(self, place: int | slice) -> Range | list[Range]:
        """A range, or several."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        file = bisect_right(self.ends, place)
        path = list(self.files)[file]
        number = place - (self.ends[file] - self.files[path])
        return Range(path, number, number + 1) if _kind(path) == "parquet" else _cut(path, number)

    @property
    def nbytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(path.stat().st_size for path in self.files)

    def size(self, part: Range) -> int:
        """Size of a range, in bytes; all row groups of a file count as equally large."""
        whole = part.path.stat().st_size
        if part.stop < 0:
            return whole
        return whole // self.files[part.path] if _kind(part.path) == "parquet" else part.stop - part.begin


def _cut(path: Path, number: int) -> Range:
    if path.suffix in PACKED:
        return Range(path, 0, -1)
    return Range(path, number * RANGE, min((number + 1) * RANGE, path.stat().st_size))


def ranges(paths: Iterable[Path]) -> Ranges:
    """Cut input files into ranges.

    Raises:
        SourceError: a file is missing, empty, or one JSON value instead of lines.
        UsageError: the format of a file is not known, a file is named twice, or there is nothing to read.
    """
    ranges_of: dict[Path, int] = {}
    places: dict[Path, Path] = {}
    for path in paths:
        first = places.setdefault(_resolved(path), path)
        if path in ranges_of or first != path:
            raise UsageError(f"{path} is named twice" + (f", first as {first}" if first != path else ""))
        if not path.is_file():
            raise SourceError(f"{path} is not a file" if path.exists() else f"{path} is not there")
        nbytes = path.stat().st_size
        if not nbytes:
            raise SourceError(f"{path} is empty")
        kind = _kind(path)
        if kind == "parquet":
            ranges_of[path] = _parquet(path).num_row_groups
        elif path.suffix in PACKED:
            _require_packed(path)
            ranges_of[path] = 1
        else:
            with path.open("rb") as file:
                head = file.read(4096)
            _require_unpacked(path, head)
            _require_utf8(path, head)
            if kind == "json":
                _require_lines(path, head)
            ranges_of[path] = -(-nbytes // RANGE)
    if not sum(ranges_of.values()):
        raise UsageError("there is nothing to read: no input was named, or only parquet files without rows")
    return Ranges(ranges_of)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of symbolic links
        return path


def _require_packed(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if not head.startswith(BEGINS[path.suffix]):
        raise SourceError(
            f"{path} is not compressed with {TOOLS[path.suffix]}: it begins with {head!r}", "rename it if it is not"
        )


def _require_unpacked(path: Path, head: bytes) -> None:
    """Refuse a compressed file whose name lacks the suffix of its compression."""
    suffix = next((suffix for suffix, marks in BEGINS.items() if head.startswith(marks)), None)
    if suffix is not None:
        raise SourceError(
            f"{path} is compressed with {TOOLS[suffix]}, and its name does not end in {suffix}",
            f"mv {quote(str(path))} {quote(str(path) + suffix)}",
        )


def _kind(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in PACKED]
    last = suffixes[-1] if suffixes else ""
    if last == ".parquet":
        return "parquet"
    if last in (".txt", ".text"):
        return "text"
    if last in (".csv", ".tsv"):
        raise UsageError(f"{path} is a table", "make records of it: train fetch, with a recipe that names its columns")
    return "json"


def _require_utf8(path: Path, head: bytes) -> None:
    """Refuse UTF-16 and UTF-32, by their byte order mark or their zero bytes."""
    encoding = next((name for name, marks in WIDE.items() if head.startswith(marks)), "")
    if not encoding and len(head) > 3 and any(head[:64:2]) != any(head[1:64:2]):
        encoding = "UTF-16"
    if encoding:
        raise SourceError(
            f"{path} is {encoding}, not UTF-8", f"iconv -f {encoding} -t UTF-8 {path} > utf8{path.suffix}"
        )


def _require_lines(path: Path, head: bytes) -> None:
    head = head.removeprefix(BOM).lstrip()
    if head.startswith(b"["):
        raise SourceError(f"{path} is one JSON array, not a record on each line", f"jq -c '.[]' {path} > lines.jsonl")
    if head.startswith((b"{\n", b"{\r\n")):
        raise SourceError(f"{path} is one JSON object over several lines", f"jq -c . {path} > lines.jsonl")


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UnsupportedError(f"{path} is parquet, which needs pyarrow", "pip install 'vitruvian[data]'") from None
    try:
        return ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise SourceError(f"{path} is not a parquet file: {error}") from None


def values(part: Range, key: str) -> Iterator[Any]:
    """The JSON value of each line or row of a range, in order: None for a blank line, Malformed for an invalid one."""
    kind = _kind(part.path)
    if kind == "parquet":
        yield from _rows(part, dict.fromkeys((key, *FIELDS, *sorted(NAMES), *MORE, *ALLOWED, *SYSTEM, "label")))
        return
    load = _loader(kind, key)
    for line in _lines(part):
        if len(line) > LONGEST:
            yield Malformed("long")
        else:
            yield load(line) if line and not line.isspace() else None


def _rows(part: Range, columns: Iterable[str]) -> list[dict[str, Any]]:
    """The rows of a row group of Parquet, with the given columns only."""
    from pyarrow import ArrowException

    file = _parquet(part.path)
    try:
        table = file.read_row_group(part.begin, columns=list(columns))
        if not table.num_columns:
            return [{} for _ in range(file.metadata.row_group(part.begin).num_rows)]
        rows: list[dict[str, Any]] = table.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        reason = short(" ".join(str(error).split()), 200)
        raise SourceError(f"{part.path} is damaged in row group {part.begin}: {reason}") from None
    return [{name: present(value) for name, value in row.items()} for row in rows]


def present(value: Any) -> Any:
    """A cell without the keys whose value is null: a column of structs has every key in every row."""
    match value:
        case dict():
            return {name: present(inner) for name, inner in value.items() if inner is not None}
        case list():
            return [present(inner) for inner in value]
    return value


def json_reader() -> Callable[[bytes], Any]:
    """A function that reads a line of JSON: Malformed if the line is invalid, null, or has a key twice."""
    from orjson import JSONDecodeError, loads

    def read(line: bytes) -> Any:
        try:
            content = loads(line)
        except JSONDecodeError:
            return Malformed(_unreadable(line))
        if content is None:  # None means a blank line
            return Malformed("object")
        try:
            twice = key_twice(line, content)
        except RecursionError:  # orjson allows deeper nesting
            return Malformed("json")
        return content if twice is None else Malformed("key", repr(twice))

    return read


def _loader(kind: str, key: str) -> Callable[[bytes], Any]:
    def text(line: bytes) -> Any:
        try:
            return {key: line.rstrip(b"\r").decode()}
        except UnicodeDecodeError:
            return Malformed("json")

    return json_reader() if kind == "json" else text


def _unreadable(line: bytes) -> str:
    """Why orjson cannot read a line: `number` if it is JSON except for a number out of range, else `json`."""
    beyond: list[str] = []

    def number(text: str) -> float:
        if isinf(value := float(text)):
            beyond.append(text)
        return value

    try:
        json.loads(line, parse_int=number, parse_float=number)
    except (ValueError, RecursionError):
        return "json"
    return "number" if beyond else "json"


def key_twice(text: bytes, content: Any) -> str | None:
    """A key that is given twice in an object of some JSON, None if there is none; orjson silently takes the last value.

    A fast check counts the keys in the text first: quotation marks in strings follow a backslash, those of keys do not,
    unless a key ends in a backslash.
    """
    if len(KEY.findall(text)) == _keys(content) and b'\\\\"' not in text:
        return None
    seen: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        counted = Counter(name for name, _ in items)
        seen.extend(name for name, number in counted.items() if number > 1)
        return dict(items)

    json.loads(text, object_pairs_hook=pairs, parse_int=str)
    return seen[0] if seen else None


def _keys(value: Any) -> int:
    """Number of keys of a JSON value, over all its objects."""
    if isinstance(value, dict):
        return len(value) + sum(map(_keys, value.values()))
    return sum(map(_keys, value)) if isinstance(value, list) else 0


def _lines(part: Range) -> Iterator[bytes]:
    """The lines that begin in a range, without line breaks. A line that is too long is truncated."""
    if part.stop < 0:
        with _decompressed(part.path) as file:
            _require_utf8(part.path, file.peek(64)[:64])
            yield from _streamed(file)
        return
    with part.path.open("rb") as file:
        file.seek(max(0, part.begin - 1))
        block = file.read(part.stop - max(0, part.begin - 1))
        if not part.begin:
            block = block.removeprefix(BOM)
        else:
            cut = block.find(b"\n")
            if cut < 0:
                return
            block = block[cut + 1 :]
        if not block:
            return
        lines = block.split(b"\n")
        last = lines.pop()
        yield from lines
        if last:
            yield last + file.readline(LONGEST + 1 - len(last)).rstrip(b"\n")


def _streamed(file: io.BufferedReader) -> Iterator[bytes]:
    first = True
    while line := file.readline(LONGEST + 2):
        if first:
            line, first = line.removeprefix(BOM), False
        yield line.rstrip(b"\n")
        while len(line) > LONGEST and not line.endswith(b"\n"):  # skip the rest of a line that is too long
            line = file.readline(LONGEST + 2)
            if not line:
                return


def _decompressed(path: Path) -> io.BufferedReader:
    return io.BufferedReader(_Unpacked(path), 1 << 16)


class _Unpacked(io.RawIOBase):
    """The decompressed content of a file.

    A truncated file is an error: zstandard's own reader does not report it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.done, self.left = path, 0, memoryview(b"")
        self.pieces = _gunzipped(path) if path.suffix == ".gz" else _unzstd(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or the beginning of the buffer, and return the number of bytes."""
        if not self.left:
            try:
                self.left = memoryview(next(self.pieces, b""))
            except EOFError:
                nbytes = self.path.stat().st_size
                raise SourceError(
                    f"{self.path} is cut short: its {nbytes} bytes end within a compressed stream, after {self.done} "
                    "decompressed bytes were read",
                    "copy or download it again",
                ) from None
            except (zlib.error, gzip.BadGzipFile, _Damaged) as error:
                raise SourceError(
                    f"{self.path} is damaged after {self.done} decompressed bytes: {error}", "copy or download it again"
                ) from None
            self.done += len(self.left)
        many = min(len(buffer), len(self.left))
        buffer[:many], self.left = self.left[:many], self.left[many:]
        return many

    def close(self) -> None:
        """Close the file."""
        self.pieces.close()
        super().close()


class _Damaged(Exception):
    """Raised for a damaged zstd file."""


def _gunzipped(path: Path) -> Generator[bytes, None, None]:
    with gzip.GzipFile(path) as file:
        while piece := file.read(STEP[".gz"]):
            yield piece


def _unzstd(path: Path) -> Generator[bytes, None, None]:
    """The decompressed content of all frames. Raises EOFError if the last frame is incomplete."""
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError:
        raise UnsupportedError(f"{path} is compressed with zstd", "pip install 'vitruvian[zstd]'") from None
    frame = None
    with path.open("rb") as file:
        while block := file.read(STEP[".zst"]):
            while block:
                frame = frame or ZstdDecompressor().decompressobj()
                try:
                    piece = frame.decompress(block)
                except ZstdError as error:
                    raise _Damaged(error) from None
                if piece:
                    yield piece
                block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError


def first_values(parts: Ranges, key: str) -> Iterator[Any]:
    """The first valid values of the first range of each file, at most `PEEKED` of each."""
    for number in parts.firsts:
        usable = (value for value in values(parts[number], key) if value is not None)
        yield from islice((value for value in usable if not isinstance(value, Malformed)), PEEKED)
