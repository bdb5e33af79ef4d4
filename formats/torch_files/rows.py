"""Rows: consecutive objects of a pickle that differ only in numbers and texts, read as columns.

The metadata of a distributed checkpoint is a pickle of some objects for each piece, millions of them. Consecutive
objects have the same opcodes. A pattern is made of the bytes of an object that the unpickling machine has run, with
gaps where numbers and texts are, and all following objects that match the pattern are read at once, without an object
for each. Objects that do not match are run by the machine: the first object of each kind, and one that a frame cuts in
two.

Facts: the opcodes in Lib/pickletools.py, and the frames of 64 KiB and batches of 1000 that Modules/_pickle.c writes
(CPython 3.13).
"""

from __future__ import annotations

import mmap
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from formats.errors import SourceError
from formats.torch_files.pickle_values import Opaque

_PLAIN = frozenset(b")\x81\x94}(t\x85\x86\x87RubN")
"""Opcodes without an operand that may be in a pattern."""
_NUMBERS = {0x4B: 1, 0x4D: 2, 0x4A: 4}
"""Opcode of a number: the number of bytes of its operand."""
_NUMBER = rb"(K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_TEXT = rb"(h.|j.{4}|\x8c.[\x20-\x7e]*\x94)"
"""Matches a text: a reference to the memo, or a new text that gets a memo number."""
MOST_NUMBERS = 1 << 16
"""Maximum count of numbers whose values are cached."""
MOST_KINDS = 16
RELEASE_STEP = 1 << 24
"""Number of bytes read of a memory map after which their pages are released."""

Bytes = bytes | mmap.mmap


class Kind(NamedTuple):
    """The pattern of consecutive objects in a pickle.

    Attributes:
        pattern: matches the bytes of an object, with groups for its numbers and texts (gaps).
        names: class and attribute of each gap.
        numbered: how many memo numbers an object takes, not counting texts in gaps.
        texts: the gaps of texts, and how many memo numbers the object takes before each, likewise.
    """

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    numbered: int
    texts: tuple[tuple[int, int], ...]


@dataclass(eq=False, slots=True)
class Rows:
    """Consecutive objects of one kind, or pairs of a key and its value, as columns.

    Attributes:
        columns: the values of the gaps, by class and attribute: `MetadataIndex.offset` has a column for each dimension.
            Texts are given as indices into `texts`.
        texts: every text in a gap of the pickle.
    """

    columns: Mapping[str, Sequence[array[int]]]
    texts: Sequence[str]


class Memo(dict[int, Any]):
    """The memo of a pickle: its objects by their memo number, without the objects of rows.

    Attributes:
        count: the memo number of the next object.
        rows: for each run of rows, the half-open range of memo numbers of its objects, and its half-open byte range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.rows: list[tuple[int, int, int, int]] = []

    def add(self, value: Any) -> None:
        """Give an object the next memo number."""
        self[self.count] = value
        self.count += 1


class _StartedObject(NamedTuple):
    """An object that is not complete: its first byte, the object, and the heights of stack and marks before it."""

    start: int
    value: Opaque
    stack: int
    marks: int


class Reader:
    """Reads the objects of some classes as rows.

    Args:
        classes: for the class that a row ends with, that of an object or of a value, the class that the row begins
            with: the same class, or the class of the value's key.
        fields: the attributes of these classes.
    """

    def __init__(self, classes: Mapping[str, str], fields: frozenset[str]) -> None:
        self.classes, self.first, self.fields = classes, frozenset(classes.values()), fields
        self.started: dict[str, _StartedObject] = {}
        self.texts, self.numbers = _Texts(), _Numbers()
        self.kinds: dict[str, list[Kind]] = {}
        self.released = 0

    def start_object(self, data: Bytes, at: int, stack: Sequence[Any], marks: Sequence[int], memo: Memo) -> None:
        """Record where the object on the stack begins, if its class has a memo number; `at` is after its NEWOBJ."""
        value = stack[-1]
        if isinstance(value, Opaque) and value.name in self.first:
            self.started.pop(value.name, None)
            for start, code in ((at - 4, 0x68), (at - 7, 0x6A)):
                of = memo.get(int.from_bytes(data[start + 1 : at - 2], "little"))
                if start > 0 and data[start] == code and isinstance(of, Opaque) and of.name == value.name:
                    self.started[value.name] = _StartedObject(start, value, len(stack) - 1, len(marks))

    def read_following(self, data: Bytes, at: int, stack: list[Any], marks: Sequence[int], memo: Memo) -> int:
        """Read the rows that follow the object on top of the stack, which ends at `at`, and push them onto the stack.

        The rows have the same form as that object. Returns the byte after the last row.
        """
        value = stack[-1]
        begun = self.started.pop(self.classes.get(value.name, ""), None)
        if begun is None:
            return at
        sample = (value,) if begun.value is value else (begun.value, value)
        if (*stack[begun.stack :],) != sample or begun.marks != len(marks):
            return at
        kind, known = self._kind(data, begun.start, at, memo), self.kinds.setdefault(value.name, [])
        if kind is not None and kind not in known and len(known) < MOST_KINDS:
            known.append(kind)
        end, columns_of = self._read(data, at, known, memo)
        for columns in columns_of:
            stack += [Rows(columns, self.texts.strings)] * len(sample)
        if isinstance(data, mmap.mmap) and end - self.released > RELEASE_STEP:
            let_go = end // mmap.PAGESIZE * mmap.PAGESIZE
            data.madvise(mmap.MADV_DONTNEED, self.released, let_go - self.released)
            self.released = let_go
        return end

    def _kind(self, data: Bytes, at: int, end: int, memo: Memo) -> Kind | None:
        """The pattern of the objects in a byte range; None if a pattern cannot describe these objects."""
        names, parts = list[str](), list[bytes]()
        numbered, texts = 0, list[tuple[int, int]]()
        owner = field = ""
        while at < end:
            code, start = data[at], at
            at += 1
            if code in _NUMBERS or code == 0x8A:
                at += _NUMBERS[code] if code in _NUMBERS else 1 + data[at]
                names.append(f"{owner}.{field}")
                parts.append(_NUMBER)
                continue
            if code in (0x68, 0x6A, 0x8C):
                at += {0x68: 1, 0x6A: 4}.get(code, 1 + data[at])
                raw = data[start + 1 : at]
                value = raw[1:].decode() if code == 0x8C else memo.get(int.from_bytes(raw, "little"))
                if isinstance(value, str) and value not in self.fields:
                    if code == 0x8C and data[at] != 0x94:
                        return None
                    at += code == 0x8C
                    texts.append((len(names), numbered))
                    names.append(f"{owner}.{field}")
                    parts.append(_TEXT)
                    continue
                if isinstance(value, str):
                    field = value
                elif not isinstance(value, Opaque) or value.args:  # an object that occurs twice
                    return None
                elif value.name in self.classes or value.name in self.first:
                    owner = value.name
            elif code not in _PLAIN:
                return None
            numbered += code == 0x94
            parts.append(re.escape(data[start:at]))
        return _compiled(b"".join(parts), tuple(names), numbered, tuple(texts)) if names else None

    def _read(
        self, data: Bytes, at: int, kinds: Sequence[Kind], memo: Memo
    ) -> tuple[int, list[dict[str, list[array[int]]]]]:
        """Read the following rows. Returns the byte after the last row, and the columns of each kind.

        Raises:
            SourceError: a row has something other than a text where a text belongs.
        """
        end, first, rows_of_kinds = at, memo.count, [list[tuple[bytes, ...]]() for _ in kinds]
        turns = list(zip(kinds, rows_of_kinds, strict=True))
        while row := self._next(data, end, turns, memo):
            end = row
        if end > at:
            memo.rows.append((first, memo.count, at, end))
        return end, [self._columns(kind, rows, memo) for kind, rows in zip(kinds, rows_of_kinds, strict=True) if rows]

    def _next(self, data: Bytes, at: int, turns: list[tuple[Kind, list[tuple[bytes, ...]]]], memo: Memo) -> int:
        """Read one row, trying the kind of the last row first. Returns the byte after the row, 0 if there is no row."""
        for turn, (kind, rows) in enumerate(turns):
            match = kind.pattern.match(data, at)
            if match and (not kind.texts or self._name(match.groups(), kind, memo)):
                if turn:
                    turns.insert(0, turns.pop(turn))
                rows.append(match.groups())
                memo.count += kind.numbered
                return match.end()
        return 0

    def _name(self, row: tuple[bytes, ...], kind: Kind, memo: Memo) -> bool:
        """Give the new texts of a row their memo numbers. False if this is no row: a text has another length."""
        texts = [(row[gap], before) for gap, before in kind.texts if row[gap][0] == 0x8C]
        if any(raw[1] != len(raw) - 3 for raw, _ in texts):
            return False
        for raw, before in texts:
            memo[memo.count + before] = raw[2:-1].decode()
            memo.count += 1
        return True

    def _columns(self, kind: Kind, rows: Sequence[tuple[bytes, ...]], memo: Memo) -> dict[str, list[array[int]]]:
        columns: dict[str, list[array[int]]] = {}
        texts = {gap for gap, _ in kind.texts}
        for gap, values in enumerate(zip(*rows, strict=True)):
            read: Iterable[int] = map(self.numbers.__getitem__, values)
            if gap in texts:
                read = [self.texts.number(raw, memo) for raw in values]
            columns.setdefault(kind.names[gap], []).append(array("i" if gap in texts else "q", read))
        return columns


class _Texts(dict[bytes, int]):
    """The index in `strings` of each text, by the opcode that fetches the text from the memo, or that contains it."""

    def __init__(self) -> None:
        super().__init__()
        self.strings, self.numbers = list[str](), dict[str, int]()

    def number(self, raw: bytes, memo: Memo) -> int:
        """The index in `strings` of the text of an opcode."""
        if raw not in self:
            value = raw[2:-1].decode() if raw[0] == 0x8C else memo.get(int.from_bytes(raw[1:], "little"))
            if not isinstance(value, str):
                raise SourceError("the pickle holds something else where a text belongs")
            self[raw] = self.numbers.setdefault(value, len(self.strings))
            self.strings += [value] * (self[raw] == len(self.strings))
        return self[raw]


class _Numbers(dict[bytes, int]):
    """The values of numbers, by the opcode that contains the number."""

    def __missing__(self, raw: bytes) -> int:
        if len(self) > MOST_NUMBERS:
            self.clear()
        value = int.from_bytes(raw[2:] if raw[0] == 0x8A else raw[1:], "little", signed=raw[0] in (0x4A, 0x8A))
        self[raw] = value
        return value


@lru_cache(maxsize=64)
def _compiled(pattern: bytes, names: tuple[str, ...], numbered: int, texts: tuple[tuple[int, int], ...]) -> Kind:
    return Kind(re.compile(pattern, re.DOTALL), names, numbered, texts)
