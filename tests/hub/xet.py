"""Real Xet storage in a folder: hf_xet chunks and deduplicates into it as it would into the Hub's service.

huggingface_hub sends large files through Xet unless HF_HUB_DISABLE_XET is set. hf_xet takes `local://FOLDER` for the
address of a service. What it stores it lists in shards: https://huggingface.co/docs/xet/en/shard.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ENTRY = 48
END = b"\xff" * 32
VERIFIED, WITH_SHA256 = 1 << 31, 1 << 30


FETCH = """
import sys
from hf_xet import XetFileInfo, XetSession
endpoint, name, size, path = sys.argv[1:]
with XetSession().new_file_download_group(endpoint=endpoint) as group:
    group.start_download_file(XetFileInfo(name, int(size)), path)
"""


class Stored(NamedTuple):
    """A file in a shard."""

    sha256: str
    xet: str
    size: int


def _hex(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def stored(shard: bytes) -> Iterator[Stored]:
    """The files that a shard lists."""
    at = ENTRY  # the header
    while shard[at : at + 32] != END:
        xet = _hex(shard[at : at + 32])
        flags, count = struct.unpack_from("<II", shard, at + 32)
        size = sum(struct.unpack_from("<I", shard, at + ENTRY * (1 + i) + 36)[0] for i in range(count))
        at += ENTRY * (1 + count * (2 if flags & VERIFIED else 1))
        if flags & WITH_SHA256:
            yield Stored(_hex(shard[at : at + 32]), xet, size)
            at += ENTRY


class Cas:
    """A folder that hf_xet writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"local://{folder}"

    def fetch(self, sha256: str, path: Path) -> bool:
        """Put a stored file together again, from a copy: the process that stores has locked its index.

        In a process of its own: hf_xet 1.8 sometimes takes the one that asked down with it.
        """
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(self.folder, copy, dirs_exist_ok=True)
            for shard in Path(copy).rglob("shards/*.mdb"):
                for entry in stored(shard.read_bytes()):
                    if entry.sha256 == sha256:
                        argv = [f"local://{copy}", entry.xet, str(entry.size), str(path)]
                        subprocess.run([sys.executable, "-c", FETCH, *argv], check=True, timeout=60)
                        return True
        return False
