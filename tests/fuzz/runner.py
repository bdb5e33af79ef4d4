"""`make fuzz`: random cases of every attack, until the time is over.

Not in `__main__`, which a spawned process of a pool cannot import.

python -m tests.fuzz --minutes 20              all attacks, seeds from the clock
python -m tests.fuzz configs --seed 4711       one case again
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import attacks

LIMIT = 180
"""Seconds after which a case counts as hanging."""

BATCH = 8
"""Cases a process between two looks at the clock."""


def case(attack: tuple[str, int]) -> tuple[str, int, str, str]:
    """The name and the seed of a case, its outcome, and what is wrong, if anything is."""
    name, seed = attack

    def hang(*_: Any) -> None:
        raise AssertionError(f"it did not end within {LIMIT} s")

    run = attacks()[name]  # imported before the time begins: an import that is cut short fails for good
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as folder:
            return name, seed, run(seed, Path(folder)), ""
    except BaseException:  # noqa: BLE001 -- a SystemExit that nobody caught is a finding too
        return name, seed, "FOUND", traceback.format_exc()
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
    end, number, failures = time.monotonic() + 60 * options.minutes, 0, 0
    outcomes: Counter[tuple[str, str]] = Counter()
    print(f"{len(names)} attacks, {options.minutes:g} minutes, seeds from {base}", flush=True)
    # Workers are replaced, since frameworks that fail keep memory.
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=200) as pool:
        while time.monotonic() < end:
            batch = [(names[k % len(names)], base + k) for k in range(number, number + BATCH * options.jobs)]
            number += len(batch)
            for name, seed, outcome, trace in pool.imap_unordered(case, batch):
                outcomes[name, outcome] += 1
                if trace:
                    failures += 1
                    print(f"\n{trace}again: python -m tests.fuzz {name} --seed {seed}\n", flush=True)
    for (name, outcome), count in sorted(outcomes.items()):
        print(f"{name:>16}  {outcome:<24} {count}")
    print(f"{number} cases, {failures} found, seeds {base} to {base + number - 1}")
    return 1 if failures else 0


def _again(name: str, seed: int) -> int:
    *_, outcome, trace = case((name, seed))
    print(trace or f"{name}: {outcome}")
    return 1 if trace else 0
