"""A hash of samples of files, which tells whether the files are still those that a conversion began with.

Another file may have the same size and time (`cp -p`, `rsync -t`, a tar archive). Hashing all bytes would take as long
as the conversion: samples at fixed places tell another model, whose weights differ nearly everywhere. For files of
torch.save the CRC-32 of every tensor is compared too (`journal.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from formats.disk.handle import opened, pread, size_of
from formats.disk.threads import Threads
from formats.errors import SourceError

SAMPLE = 4 << 10
"""Bytes of a sample: a page."""
SAMPLES = 4096
"""Samples of all files together: less than a second on a parallel file system."""
FEWEST, MOST = 3, 256
"""Samples of one file: at least its beginning, middle and end."""
THREADS = 8


def samples_of(paths: Sequence[Path]) -> list[str]:
    """A hash of the samples of each file, of all its bytes where they are few.

    Raises:
        SourceError: a file cannot be read.
    """
    each = min(MOST, max(FEWEST, SAMPLES // max(1, len(paths)))) | 1  # so that one is in the middle
    with Threads(THREADS) as pool:
        return list(pool.map(partial(_sampled, count=each), paths))


def _sampled(path: Path, count: int) -> str:
    hasher = blake3()
    try:
        with opened(path) as handle:
            if not isinstance(handle, int):
                return handle.identity
            last = max(0, size_of(handle) - SAMPLE)
            steps = min(count - 1, -(-last // SAMPLE))
            for start in [last * step // steps for step in range(steps + 1)] if steps else [0]:
                hasher.update(pread(handle, SAMPLE, start))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    return hasher.hexdigest()
