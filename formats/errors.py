"""Every way a conversion can be refused: one sentence, a hint that can be pasted, and an exit code."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class VitruvianError(Exception):
    """Something the user can act on. `str(error)` is one sentence with names and numbers, `hint` what to do about it.

    A traceback shows the hint below it, from Python 3.11 on (PEP 678).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.__notes__ = [f"hint: {hint}"] if hint else []


class UsageError(VitruvianError):
    """The request contradicts itself or names something that does not exist."""

    exit_code = 2


class SourceError(VitruvianError):
    """The source cannot be read, is damaged or is incomplete."""

    exit_code = 3


class DamagedError(SourceError):
    """What was read of the source is not what was written: its checksum differs."""


class OptionNeededError(SourceError):
    """What is there can be read only with an option, such as the config that it lacks.

    `known` gives what the files tell without it, where a reader can say: their format, tensors, types and bytes.
    `assumed` names options and values with which `inspect` can look at it: what it prints does not depend on them.
    """

    def __init__(
        self, message: str, hint: str = "", known: Callable[[], Mapping[str, Any]] | None = None, **assumed: str
    ) -> None:
        super().__init__(message, hint)
        self.known = known
        self.assumed = assumed


class UnsupportedError(VitruvianError):
    """The source is sound, but holds something that has no layout here."""

    exit_code = 4


class RefusedError(VitruvianError):
    """The plan would lose, guess or duplicate something."""

    exit_code = 5


class VerificationError(VitruvianError):
    """Two things that must be equal are not."""

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


TOO_MANY = "more files have to be allowed: `ulimit -n 1024`, and above `ulimit -Hn` only an administrator can"
"""What to do where a process may not open a further file."""


def hint_of(error: OSError) -> str:
    """What to do about an error of the operating system; empty where nothing is known."""
    return TOO_MANY if error.errno in (errno.EMFILE, errno.ENFILE) else ""


def some(names: Sequence[str], most: int) -> str:
    """Names, the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def short(value: Any, limit: int = 80) -> str:
    """A value from a file, for a message: never long, whatever it is."""
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
