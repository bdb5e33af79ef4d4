"""Compare files in the Hub's cache with their names, which are hashes of their contents.

    models--ORG--NAME/snapshots/COMMIT/FILE    a link to ../../blobs/HASH

HASH is the SHA-256 of a large file (LFS and Xet) and of any other file the SHA-1 that git gives a blob, of the content
after `blob SIZE` and a zero byte. Facts: huggingface_hub 2.4.0, file_download.py `_hf_hub_download_to_cache_dir`: the
name is the ETag, without quotes; a server of another kind may send other ETags.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from formats.disk.threads import Threads
from formats.errors import SourceError

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
OF_GIT = 40
"""Digits of a SHA-1."""
STEP = 1 << 20


def blobs(folder: Path) -> list[Path]:
    """The blobs of the Hub's cache that links below a folder lead to, and whose names are hashes.

    A blob may be a link itself, into a store that caches share, where it has another name.
    """
    links = (path for path in sorted(folder.rglob("*")) if path.is_symlink() and path.is_file())
    return list(dict.fromkeys(filter(None, map(blob, links))))


def blob(path: Path) -> Path | None:
    """The blob of the Hub's cache that a path is a link to; None if it is no link to one."""
    if not path.is_symlink():
        return None
    place = Path(os.path.normpath(path.parent.resolve() / path.readlink()))
    return place if place.parent.name == "blobs" and HASH.fullmatch(place.name) else None


def changed(places: Sequence[Path], threads: int, advance: Callable[[int], None]) -> list[Path]:
    """The blobs that are not what their names say.

    Args:
        places: the blobs.
        threads: blobs at a time.
        advance: called with the bytes that were read.

    Raises:
        SourceError: a blob cannot be read.
    """
    with Threads(threads) as pool:
        same = pool.map(lambda place: _hash(place, advance) == place.name, places)
        return [place for place, is_same in zip(places, same, strict=True) if not is_same]


def _hash(path: Path, advance: Callable[[int], None]) -> str:
    buffer = memoryview(bytearray(STEP))
    try:
        if len(path.name) == OF_GIT:
            hasher = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        else:
            hasher = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                hasher.update(buffer[:got])
                advance(got)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    return hasher.hexdigest()
