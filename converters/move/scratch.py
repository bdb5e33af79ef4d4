"""Decoded chunks of compressed arrays, kept as files: each chunk is decoded once and read in any order.

A chunk is compressed as a whole, and each chunk of a stacked array holds all layers: without files each layer's tensor
would decode all chunks again, or all chunks had to be in memory. Memory holds one chunk for each thread; the disk
holds all chunks decoded so far, until the files are closed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
from blake3 import blake3

from converters.move import casts
from converters.move.casts import WORDS, Array
from converters.plan.parts import Part
from converters.plan.plan import Job
from formats.checkpoint import Checkpoint
from formats.disk.chunks import Chunk, decoded
from formats.disk.safetensors import DTYPES, FLOATS, Fragment, write_from
from formats.errors import OutputError, SourceError

FOLDER = "decoded-"
"""How the name of a scratch folder begins."""


def clear(beside: Path) -> None:
    """Delete the scratch folders that killed runs have left in a folder, which no other process may be using."""
    for folder in beside.glob(f"{FOLDER}*"):
        shutil.rmtree(folder)


def room_for(sources: Iterable[Checkpoint], jobs: Iterable[Job]) -> int:
    """Bytes on the disk of all chunks that jobs read from sources, decoded."""
    if not any(placed.fragment.chunk for source in sources for placed in source.tensors[:1]):
        return 0  # at once, however many tensors there are
    fragments = (part.fragment for job in jobs for read in job.reads for part in _parts(read))
    chunks = {fragment.chunk: DTYPES[fragment.dtype] for fragment in fragments if fragment.chunk}
    return sum(size * prod(chunk.shape) for chunk, size in chunks.items())


def _parts(read: Job) -> Iterable[Part]:
    return chain(read.sources, *read.twins.values(), *read.replicas.values())


class Scratch:
    """A folder of decoded chunks, which threads and processes share.

    Args:
        beside: the folder in which the scratch folder is made when needed; None for the system's temporary folder.
        folder: an existing scratch folder that another process has made and will delete.
    """

    def __init__(self, beside: Path | None = None, folder: Path | None = None) -> None:
        self.beside, self.made, self.maker = beside, folder, 0
        self.known, self.lock = dict[Chunk, Path](), threading.RLock()

    @property
    def folder(self) -> Path:
        """The scratch folder, made on first use."""
        with self.lock:
            if self.made is None:
                self.made, self.maker = Path(tempfile.mkdtemp(prefix=FOLDER, dir=self.beside)), os.getpid()
            return self.made

    def decoded(self, fragment: Fragment, chunk: Chunk) -> Path:
        """Return the file with the decoded elements of a fragment's chunk.

        Raises:
            SourceError: the chunk is damaged, or of another element type or shape than the metadata records.
            OutputError: the file cannot be written, such as for lack of disk space.
        """
        path = self.known.get(chunk)
        if path is None:
            path = self.folder / blake3(repr(chunk).encode(errors="surrogateescape")).hexdigest(16)
            self._make(path, fragment, chunk)
            self.known[chunk] = path
        return path

    def _make(self, path: Path, fragment: Fragment, chunk: Chunk) -> None:
        """Decode a chunk into a file, unless another thread or process has done so; wait for one that is doing so."""
        if path.exists():
            return
        part = path.with_suffix(".part")
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not path.exists():
                    write_from(descriptor, _words(fragment, chunk).data.cast("B"), 0)
                    part.rename(path)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OutputError(
                f"{chunk.name} cannot be decoded into {self.folder}: {error.strerror}",
                f"it takes {fragment.nbytes} bytes and more: free some space, or, if nothing is written, name another "
                "folder with TMPDIR",
            ) from None

    def close(self) -> None:
        """Delete the scratch folder, if this object made it; a process that was forked since leaves it alone."""
        if self.made is not None and self.maker == os.getpid():
            shutil.rmtree(self.made, ignore_errors=True)


def _words(fragment: Fragment, chunk: Chunk) -> Array:
    """Return the elements of a chunk as words, with the chunk's change.

    Raises:
        SourceError: the chunk has another element size or number of elements than the metadata records.
    """
    values = decoded(chunk)
    size = DTYPES[fragment.dtype]
    if values.itemsize != size or values.size != prod(chunk.shape):
        raise SourceError(
            f"{chunk.store.folder} holds {chunk.name} as {values.dtype}{list(values.shape)}, its metadata says "
            f"{fragment.dtype}{list(chunk.shape)}"
        )
    words: Array = np.ascontiguousarray(values).reshape(-1).view(WORDS[size])
    if chunk.change is None:
        return words
    assert fragment.dtype in FLOATS
    factor, plus, _ = chunk.change
    changed = np.empty_like(words)
    for start in range(0, len(words), casts.PIECE):
        piece = slice(start, start + casts.PIECE)
        elements = casts.to_float(words[piece], fragment.dtype).astype(np.float64) * factor
        if plus:  # -0.0 + 0.0 is 0.0
            elements += plus
        casts.round_once(elements, fragment.dtype, chunk.name, changed[piece])
    return changed
