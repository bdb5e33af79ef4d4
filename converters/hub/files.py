"""A file to be published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """A file that is sent to the Hub.

    Attributes:
        name: the path in the repository.
        size: the size in bytes.
        sha256: the SHA-256 of the content.
        path: the local file; None for the card, whose text is generated.
    """

    name: str
    size: int
    sha256: str
    path: Path | None
