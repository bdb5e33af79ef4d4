"""`make fuzz`: random cases of every attack, until the time is over.

python -m tests.fuzz --minutes 20              all attacks, seeds from the clock
python -m tests.fuzz configs --seed 4711       one case again
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.fuzz import attacks

LIMIT = 180
"""Seconds after which a case counts as hanging."""


def case(name: str, seed: int) -> tuple[str, str]:
    """The outcome of one case, and what is wrong, if anything is."""

    def hang(*_: Any) -> None:
        raise AssertionError(f"it did not end within {LIMIT} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as folder:
            return attacks()[name](seed, Path(folder)), ""
    except BaseException:  # noqa: BLE001 -- a SystemExit that nobody caught is a finding too
        return "FOUND", traceback.format_exc()
    finally:
        signal.alarm(0)


def main() -> int:
    """Run them. Exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help="attacks; default: all")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, help="the seed of one case to run again")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.names or [*attacks()]
    if options.seed is not None:
        return max(_again(name, options.seed) for name in names)
    base = random.SystemRandom().randrange(10**9)
    end, number, found = time.monotonic() + 60 * options.minutes, 0, 0
    outcomes: Counter[tuple[str, str]] = Counter()
    print(f"{len(names)} attacks, {options.minutes:g} minutes, seeds from {base}", flush=True)
    # Workers are replaced, since frameworks that fail keep memory.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=200) as pool:
        running: dict[Future[tuple[str, str]], tuple[str, int]] = {}
        while running or time.monotonic() < end:
            while len(running) < 2 * options.jobs and time.monotonic() < end:
                name, seed = names[number % len(names)], base + number
                running[pool.submit(case, name, seed)] = name, seed
                number += 1
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                name, seed = running.pop(future)
                outcome, trace = future.result()
                outcomes[name, outcome] += 1
                if trace:
                    found += 1
                    print(f"\n{trace}again: python -m tests.fuzz {name} --seed {seed}\n", flush=True)
    for (name, outcome), count in sorted(outcomes.items()):
        print(f"{name:>16}  {outcome:<24} {count}")
    print(f"{number} cases, {found} found, seeds {base} to {base + number - 1}")
    return 1 if found else 0


def _again(name: str, seed: int) -> int:
    outcome, trace = case(name, seed)
    print(trace or f"{name}: {outcome}")
    return 1 if trace else 0


if __name__ == "__main__":
    sys.exit(main())
