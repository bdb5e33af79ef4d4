"""The errors of the project: each has a message of one sentence, a hint that can be pasted, and an exit code."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

UNBROKEN = re.compile(r"\S{4096,}|[^\s/]{256,}")
"""What is no path (4095 bytes at most) and no name of a file (255 bytes), but of a tensor or a key, from a file that
says anything."""


def _cut(name: re.Match[str]) -> str:
    return f"{name[0][:80]}… ({len(name[0])} characters)"


class VitruvianError(Exception):
    """An error that the user can act on. `str(error)` is one sentence with names and numbers, `hint` the way out.

    A name of a tensor may be as long as a file likes: a sentence has the beginning of it.
    A traceback shows the hint below the message, from Python 3.11 on (PEP 678).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(UNBROKEN.sub(_cut, message))
        self.hint = hint
        self.__notes__ = [f"hint: {hint}"] if hint else []


class UsageError(VitruvianError):
    """The request contradicts itself or names something that does not exist."""

    exit_code = 2


class ShortMemoryError(UsageError):
    """The system gives this process no further memory."""


class SourceError(VitruvianError):
    """The source cannot be read, is damaged or is incomplete."""

    exit_code = 3


class DamagedError(SourceError):
    """The checksum of bytes of the source differs from the one that was recorded when they were written."""


class OptionNeededError(SourceError):
    """The source can be read only with an option, such as the config that the source lacks.

    `known` returns what the files tell without the option, where a reader can: their format, tensors, types and bytes.
    `assumed` has options and values with which `inspect` can open the source: its output does not depend on them.
    """

    def __init__(
        self, message: str, hint: str = "", known: Callable[[], Mapping[str, Any]] | None = None, **assumed: str
    ) -> None:
        super().__init__(message, hint)
        self.known = known
        self.assumed = assumed


class UnsupportedError(VitruvianError):
    """The source is valid, but holds something that has no layout here."""

    exit_code = 4


class RefusedError(VitruvianError):
    """The plan would lose, guess or duplicate something."""

    exit_code = 5


class ContradictionError(RefusedError):
    """Two descriptions of one model differ in its settings."""


class VerificationError(VitruvianError):
    """Two values that have to be equal differ, such as two copies of a tensor."""

    exit_code = 6


class OutputError(VitruvianError):
    """The output exists, or there is no room for it."""

    exit_code = 7


class NetworkError(VitruvianError):
    """The Hub cannot be reached or does not answer as it should; the same command may work later."""

    exit_code = 8


class Interrupted(VitruvianError):
    """Stopped by a signal; running the same command again resumes where it stopped."""

    exit_code = 75


MORE_FILES = "more files have to be allowed: `ulimit -Sn $(ulimit -Hn)`, and above that only an administrator can"
"""What to do where a process may not open a further file."""
LESS = "lower -j and --memory where the command has them, or raise the limit of memory (`ulimit -v`)"
"""What to do where the system gives no further memory."""


def hint_of(error: OSError) -> str:
    """What to do about an error of the operating system; empty where nothing is known."""
    return MORE_FILES if error.errno == errno.EMFILE else ""


def short_memory(what: str) -> ShortMemoryError:
    """The error of a process that gets no further memory. `what`: a clause that says for what it was, or for whom."""
    return ShortMemoryError(f"memory is short: {what}", LESS)


def some(names: Sequence[str], most: int) -> str:
    """The first `most` of some names, joined by commas, and the number of the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in rising order, such as `0-31,40`."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def count(number: int, one: str, several: str) -> str:
    """So many of something, with its verb: `1 tensor is`, `2 tensors are`."""
    return f"{number} {one if number == 1 else several}"


def short(value: Any, limit: int = 80) -> str:
    """A value from a file as text for a message, cut to about `limit` characters."""
    match value:
        case str():
            return repr(value[:limit]) + ("…" if len(value) > limit else "")
        case int() if value.bit_length() > 200:
            return f"an integer of {value.bit_length()} bits"
        case None | bool() | int() | float():
            return repr(value)
        case list() | tuple() if len(value) <= 4 and all(isinstance(item, int | float | str) for item in value):
            return "[" + ", ".join(short(item, limit // 4) for item in value) + "]"
        case _:
            return f"a {type(value).__name__}"
