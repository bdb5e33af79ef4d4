"""A few cases of every attack, with fixed seeds; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import pytest

from tests.fuzz import attacks

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", attacks())
def test_no_case_ends_well_and_is_wrong(name, seed, tmp_path):
    assert attacks()[name](seed, tmp_path)
