"""Runs a command of `convert` whose jobs are done by processes, however small: in_workers.py copied|new WORDS..."""

from __future__ import annotations

import os
import sys
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"


def main() -> None:
    """Make every job large enough, and each that a copy does last a while; then run the command."""
    from converters.cli import main as convert
    from converters.move import engine, workers

    engine.COPIED = engine.STARTED = (2, 1)
    if sys.argv.pop(1) == "new":
        engine.has_one_thread = lambda: False
    run_job = workers.run_job

    def slow(*words):
        time.sleep(0.2)
        return run_job(*words)

    workers.run_job = slow
    convert()


if __name__ == "__main__":
    main()
