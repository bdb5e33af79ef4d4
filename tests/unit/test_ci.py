"""What CI can install it requires: a test that is skipped for want of it has failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import conftest


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("Skipped: no slurmctld, munged here: apt-get install slurm-wlm munge", "failed"),
        ("Skipped: apptainer is not installed", "failed"),
        ("Skipped: no file system can be mounted here", "skipped"),
        ("Skipped: apptainers are not installed", "skipped"),
    ],
)
def test_a_skip_for_want_of_a_required_program_is_a_failure(monkeypatch, reason, outcome):
    monkeypatch.setattr(conftest, "REQUIRED", ["slurmctld", "apptainer", "ip"])
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_x.py", 1, reason))
    hook = conftest.pytest_runtest_makereport()
    next(hook)
    with pytest.raises(StopIteration) as done:
        hook.send(report)
    assert done.value.value is report
    assert report.outcome == outcome
    assert reason in str(report.longrepr)
