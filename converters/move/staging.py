"""The folder that a conversion writes in: what goes wrong there, in sentences."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.move.journal import JOURNAL, Journal
from converters.plan.request import Request
from formats.checkpoint import Target
from formats.errors import Interrupted, OutputError, VitruvianError, hint_of

NO_ROOM = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or that of the file system",
}


@contextmanager
def disk(request: Request) -> Iterator[None]:
    """Raise an OSError as an OutputError with a sentence, and a hint where something can be done about it."""
    try:
        yield
    except OSError as error:
        way = NO_ROOM.get(error.errno or 0)
        hint = f"{way}, then run the same command again to resume" if way else hint_of(error)
        raise OutputError(f"{error.filename or request.staging}: {error.strerror}", hint) from None


@contextmanager
def intact(target: Target, request: Request, journal: Journal) -> Iterator[None]:
    """Refuse to go on without the staging folder, or a file in it, and blame no other for an error that comes of that.

    Raises:
        OutputError: somebody has deleted it.
    """
    places = (request.root, *(file.path for file in target.files))
    try:
        yield
    except (OSError, VitruvianError) as error:
        gone = _deleted(places, request, journal)
        if gone is None or isinstance(error, Interrupted):
            raise
    else:
        gone = _deleted(places, request, journal)
    if gone is not None:
        hint = f"remove what is left of {request.staging}, and run the same command again"
        raise OutputError(f"{gone} was deleted while this conversion wrote into it", hint)


def _deleted(places: Iterable[Path], request: Request, journal: Journal) -> Path | None:
    """The staging folder, or the first of some places in it, if somebody has deleted it."""
    path = request.staging / JOURNAL
    if not (path.exists() and os.path.samestat(os.fstat(journal.locks[0]), path.stat())):
        return request.staging
    return next((place for place in places if not place.exists()), None)
