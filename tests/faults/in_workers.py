"""Runs a command of `convert` whose jobs are done by processes, however small: in_workers.py copied|new WORDS...

With HANGS=FILE in the environment the first copy that writes leaves its number in FILE, and hangs before it writes.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"


def main() -> None:
    """Make every job large enough, and each that a copy does last a while; then run the command."""
    from converters.cli import main as convert
    from converters.move import blocks, engine, workers

    engine.COPIED = engine.STARTED = (2, 1)
    if sys.argv.pop(1) == "new":
        engine.has_one_thread = lambda: False
    run_job = workers.run_job

    def slow(*words):
        time.sleep(0.2)
        return run_job(*words)

    workers.run_job = slow
    write_from = blocks.write_from

    def hanging(*words):
        with suppress(FileExistsError), Path(os.environ["HANGS"]).open("x") as file:
            file.write(str(os.getpid()))
            file.flush()
            time.sleep(60)
        write_from(*words)

    if "HANGS" in os.environ:
        blocks.write_from = hanging
    convert()


if __name__ == "__main__":
    main()
