"""`convert` in this process, for fuzzers that run it many times a second."""

from __future__ import annotations

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

from converters import cli


def convert(*arguments: object) -> tuple[int | None, str]:
    """Run the command: its exit code, None for one that is no number, and what it said."""
    output, argv = io.StringIO(), sys.argv
    sys.argv = ["convert", *map(str, arguments)]
    try:
        with redirect_stdout(output), redirect_stderr(output):
            cli.main()
        code: int | None = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 0 if done.code is None else None
    finally:
        sys.argv = argv
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # `main` lets a closed pipe end the process
    return code, output.getvalue()
