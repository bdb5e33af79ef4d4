"""Runs a command of `convert` and kills itself, as `kill -9` would, at the N-th call that changes the disk.

python killed_command.py N WORDS...
"""

from __future__ import annotations

import sys

from tests.faults.killed_at import killing


def main() -> None:
    """Wrap the calls, then run the command."""
    count = killing(int(sys.argv[1]))
    sys.argv[1:2] = []
    from converters.cli import main as convert

    try:
        convert()
    finally:
        sys.stdout.write(f"{count.calls} {count.writes}")


if __name__ == "__main__":
    main()
