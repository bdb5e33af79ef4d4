"""Repeat requests that fail for a passing reason, with growing pauses, and at last raise an error in one sentence."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from formats.errors import NetworkError

Result = TypeVar("Result")
TRIES = 9
FIRST, LONGEST = 0.2, 15.0
"""Seconds of the first and of the longest pause; each pause is twice the one before: half a minute in all."""
LATER = (408, 425, 429)
NEVER = (501, 505)
"""HTTP statuses that are worth a retry besides 5xx, and those of 5xx that are not."""


class RetryError(Exception):
    """A request failed, and may work later: the reason, and the pause in seconds that the server asked for."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(line(why))
        self.pause = pause


def with_retries(what: str, act: Callable[[], Result], tries: int | None = None) -> Result:
    """Call a function, and call it again while it raises `RetryError`.

    Args:
        what: the address that the function asks, for the error.
        act: the function.
        tries: most calls, None for `TRIES`.

    Raises:
        NetworkError: the last call raised `RetryError` too.
    """
    tries = tries or TRIES
    for number in range(tries):
        try:
            return act()
        except RetryError as error:  # noqa: PERF203  # each round is a request
            if number == tries - 1:
                times = f", {tries} times" if tries > 1 else ""
                raise NetworkError(
                    f"{what} cannot be reached{times}: {error}", "the same command again resumes"
                ) from None
            pause = min(LONGEST, FIRST * 2**number) * random.uniform(0.5, 1)  # noqa: S311  # spreads many clients
            time.sleep(max(pause, min(error.pause, 8 * LONGEST)))
    raise AssertionError


def is_transient(status: int) -> bool:
    """Whether a request with this HTTP status may work later."""
    return (status >= 500 and status not in NEVER) or status in LATER


def line(text: str) -> str:
    """A text as one line of bounded length, with only the host of each address: the rest may hold a signature."""
    return " ".join(re.sub(r"(https?://[^/\s'\")]+)[^\s'\")]*", r"\1", text).split())[:240]
