"""A file to be published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """A file that is sent.

    Attributes:
        name: its path in the repository.
        size: bytes.
        sha256: of its bytes.
        path: where it is; None for the card, which is text.
    """

    name: str
    size: int
    sha256: str
    path: Path | None
