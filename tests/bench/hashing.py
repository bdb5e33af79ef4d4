"""Read every file of some folders once and hash it: python -m tests.bench.hashing FOLDER …"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from blake3 import blake3

STEP = 1 << 20


def main() -> None:
    buffer = memoryview(bytearray(STEP))
    for path in (path for folder in sys.argv[1:] for path in Path(folder).rglob("*") if path.is_file()):
        hasher = blake3()
        with path.open("rb", buffering=0) as file:
            while count := os.readv(file.fileno(), [buffer]):
                hasher.update(buffer[:count])
        hasher.hexdigest()


if __name__ == "__main__":
    main()
