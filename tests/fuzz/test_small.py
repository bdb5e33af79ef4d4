"""A few cases of every attack, with fixed seeds; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz import attacks

SEEDS = range(6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", attacks())
def test_no_case_ends_well_and_is_wrong(name, seed, tmp_path):
    assert attacks()[name](seed, tmp_path)


@pytest.mark.slow
def test_the_runner_starts_its_processes_and_counts_what_they_say():
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "flips", "--minutes", "0.01", "--jobs", "1"],
        capture_output=True,
        check=False,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "8 cases, 0 found" in run.stdout
