"""Asking again: what fails for a while is tried with pauses that grow, and given up in a sentence."""

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
"""Seconds of the first pause; each is twice the one before, up to the longest: half a minute in all."""
LATER = (408, 425, 429)
NEVER = (501, 505)
"""Refusals that may be over when one asks again, as may the server's own errors (5xx), but these."""


class Again(Exception):
    """What was asked for failed, and may work later: why, and the seconds that the server wants to be left alone."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(line(why))
        self.pause = pause


def patiently(what: str, act: Callable[[], Result], tries: int | None = None) -> Result:
    """Do something, again and again while it raises `Again`.

    Args:
        what: what it is about, for the error.
        act: what is done.
        tries: how often at most, None for `TRIES`.

    Raises:
        NetworkError: it did not work in all that time.
    """
    tries = tries or TRIES
    for number in range(tries):
        try:
            return act()
        except Again as error:  # noqa: PERF203  # each round is a request
            if number == tries - 1:
                times = f", {tries} times" if tries > 1 else ""
                raise NetworkError(
                    f"{what} cannot be reached{times}: {error}", "the same command again resumes"
                ) from None
            pause = min(LONGEST, FIRST * 2**number) * random.uniform(0.5, 1)  # noqa: S311  # spreads many clients
            time.sleep(max(pause, min(error.pause, 8 * LONGEST)))
    raise AssertionError


def is_passing(status: int) -> bool:
    """Whether a refusal may be over when one asks again."""
    return (status >= 500 and status not in NEVER) or status in LATER


def line(text: str) -> str:
    """One line of bounded length, of each address the host alone: the rest may be signed."""
    return " ".join(re.sub(r"(https?://[^/\s'\")]+)[^\s'\")]*", r"\1", text).split())[:240]
