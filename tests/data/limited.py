"""Runs `train` with a limit on the size of every file: python -m tests.data.limited BYTES WORDS..."""

from __future__ import annotations

import resource
import sys


def main() -> None:
    """Set the limit, then run."""
    from train import cli

    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    sys.argv = ["train", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
