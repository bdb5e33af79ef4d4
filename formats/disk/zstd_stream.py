"""Reads extents of a file that are compressed with zstd, forwards and in little memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.handle import Handle, read_at
from formats.errors import SourceError, UnsupportedError

END = 4096
STEP = 1 << 18


class Stream(NamedTuple):
    """A compressed extent of a file, in bytes. Offsets of fragments in a stream count decompressed bytes."""

    start: int
    length: int

    def ends(self, fd: Handle, path: Path) -> tuple[Callable[[int, int], bytes], int]:
        """Read the stream once, and keep its beginning and its end.

        Returns:
            A function that returns (offset, count) bytes of beginning or end, and the decompressed size.

        Raises:
            SourceError: the stream is damaged.
        """
        reader, head, tail, size = Reader(fd, path, self), b"", b"", 0
        while piece := reader.take(STEP):
            head += piece[: END - len(head)]
            tail = (tail + piece)[-END:]
            size += len(piece)

        def read(offset: int, count: int) -> bytes:
            if offset + count <= len(head):
                return head[offset : offset + count]
            if offset >= size - len(tail):
                return tail[offset - size + len(tail) :][:count]
            raise UnsupportedError(f"the member at byte {offset} of a compressed archive is in its middle")

        return read, size


class Reader:
    """Reads a stream forwards; a step backwards starts again. `fd` may be opened anew between two reads."""

    def __init__(self, fd: Handle, path: Path, stream: Stream) -> None:
        self.fd, self.path, self.stream = fd, path, stream
        self.position = 0
        self.decoder = self._begin()

    def _begin(self) -> Any:
        try:
            import zstandard
        except ImportError:
            raise UnsupportedError(
                f"{self.path} is compressed with zstd, which needs the package zstandard", "pip install zstandard"
            ) from None
        self.position, self.damage = 0, zstandard.ZstdError
        window = io.BufferedReader(_Extent(self), STEP)
        return zstandard.ZstdDecompressor().stream_reader(window, read_across_frames=True)

    def take(self, count: int) -> bytes:
        """The next decompressed bytes; fewer at the end."""
        try:
            piece: bytes = self.decoder.read(count)
        except self.damage as error:
            raise SourceError(f"{self.path}: the stream at byte {self.stream.start} is damaged: {error}") from None
        self.position += len(piece)
        return piece

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with decompressed bytes from an offset.

        Raises:
            SourceError: the stream is damaged, or ends before the buffer is full.
        """
        if offset < self.position:
            self.decoder = self._begin()
        while self.position < offset:
            if not self.take(min(STEP, offset - self.position)):
                break
        done = 0
        while done < len(buffer):
            piece = self.take(min(STEP, len(buffer) - done))
            if not piece:
                raise SourceError(
                    f"{self.path}: the stream at byte {self.stream.start} ends {len(buffer) - done} early"
                )
            buffer[done : done + len(piece)] = piece
            done += len(piece)


class _Extent(io.RawIOBase):
    """An extent of an open file, read without moving the file's position, because threads share the file."""

    def __init__(self, reader: Reader) -> None:
        stream = reader.stream
        self.reader, self.at, self.stop = reader, stream.start, stream.start + stream.length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = read_at(self.reader.fd, memoryview(buffer)[: self.stop - self.at], self.at)
        self.at += count
        return count
