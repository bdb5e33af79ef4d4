"""How many threads are used by default: the cores of the job, not those of the node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from converters.common.cores import MOST, cores
from converters.plan.request import Limits


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"": "max 100000", "job": "max 100000"}, 3),
        ({"job": "150000 100000"}, 2),
        ({"": "100000 100000", "job": "max 100000"}, 1),
        ({"job": "20000 100000"}, 1),
        ({}, 3),
    ],
)
def test_the_smallest_quota_of_the_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quotas: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5})
    for name, quota in quotas.items():
        (tmp_path / "groups" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name / "cpu.max").write_text(quota + "\n")
    (tmp_path / "own").write_text("1:cpu:/elsewhere\n0::/job/step\n")
    assert cores(tmp_path / "own", tmp_path / "groups") == expected


def test_a_node_of_many_cores_is_not_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(256)))
    assert cores(tmp_path / "none", tmp_path) == MOST


def test_each_of_many_threads_has_buffers_worth_having() -> None:
    assert [Limits(threads).room >> 20 for threads in (1, 2, 4, 16)] == [16, 16, 16, 64]
    assert Limits(16, 1 << 20).room == 1 << 20
