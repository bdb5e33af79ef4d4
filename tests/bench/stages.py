"""Where the CPU-seconds of `convert` go: python -m tests.bench.stages [--rounds N] COMMAND SRC OUT OPTIONS … -q

Each thread's clock is read when it enters and leaves a function of STAGES; what a nested one takes is counted there
alone. Each round is a process of its own; OUT is deleted after it. The medians of each stage are printed, with what is
written and what is verified apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

STAGES = {
    "converters.library.conversion.carry_out": "rest",
    "converters.convert.fingerprint": "journal",
    "converters.move.journal.Journal.commit": "journal",
    "converters.move.journal.Journal.note": "journal",
    "converters.convert._reopened": "verify: open and plan",
    "converters.move.engine.run_job": "loop",
    "converters.move.blocks.Files.read_stored": "read",
    "converters.move.blocks.write_from": "write",
    "converters.move.job.scatter": "scatter",
    "converters.move.reading.gather": "gather",
    "converters.move.replicas.gather": "gather",
    "converters.move.replicas.Copies.settle": "replicas",
    "converters.move.casts.cast": "cast",
    "converters.move.source_checks.SourceChecks.passed": "CRC of the source",
    "converters.move.source_checks.SourceChecks.complete": "CRC of the source",
    "converters.move.crc32.Checksums.add": "CRC of the output",
    "converters.convert.finish_files": "CRC of the output",
    "converters.convert.publish": "publish",
}
"""Function: the stage that its time belongs to."""

spent, verifying = Counter[str](), threading.Event()
lock, inner = threading.Lock(), threading.local()


def timed(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
    """A function whose time, without that of other timed ones in it, is counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, inner.spent = getattr(inner, "spent", 0.0), 0.0
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.thread_time() - began
            count(stage, took - inner.spent)
            inner.spent = before + took

    return call


def count(stage: str, seconds: float) -> None:
    with lock:
        spent["verify: " + stage if verifying.is_set() and ":" not in stage else stage] += seconds


class Hasher:
    """A hash whose updates are counted."""

    def __init__(self, hasher: Any) -> None:
        self.update, self.hexdigest = timed(hasher.update, "hash"), hasher.hexdigest


def child() -> None:
    """One conversion, with every stage counted; what was found is the last line on stderr."""
    for path, stage in STAGES.items():
        place, _, name = path.rpartition(".")
        try:
            owner = import_module(place)
        except ModuleNotFoundError:
            module, _, owner_name = place.rpartition(".")
            owner = getattr(import_module(module), owner_name)
        setattr(owner, name, timed(getattr(owner, name), stage))
    from converters import cli, convert
    from converters.move import job

    make, verify = job.hasher, convert.verify_output

    def marked(*args: Any) -> None:
        verifying.set()
        verify(*args)
        verifying.clear()

    job.hasher = lambda made: Hasher(make(made))
    convert.verify_output = marked
    try:
        cli.main()
    finally:
        spent["all"] = time.process_time()
        sys.stderr.write(json.dumps(spent) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    runs: list[dict[str, float]] = []
    for _ in range(options.rounds):
        ran = subprocess.run(
            [sys.executable, "-m", "tests.bench.stages", "--child", *options.words],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            sys.exit(ran.stderr)
        runs.append(json.loads(ran.stderr.splitlines()[-1]))
        shutil.rmtree(options.words[2], ignore_errors=True)
    stages = sorted(
        {stage for seconds_of in runs for stage in seconds_of},
        key=lambda stage: -median(seconds_of.get(stage, 0) for seconds_of in runs),
    )
    total = median(seconds_of["all"] for seconds_of in runs)
    named = 0.0
    for stage in stages:
        seconds = median(seconds_of.get(stage, 0) for seconds_of in runs)
        named += seconds if stage != "all" else 0
        print(f"{stage:32} {seconds:6.2f}  {100 * seconds / total:4.0f} %")
    print(f"{'start, threads and end':32} {total - named:6.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        del sys.argv[1]
        child()
    else:
        main()
