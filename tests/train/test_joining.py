"""How ranks find each other, and what ends those that cannot."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from formats.errors import UsageError
from train.distributed import environment

FEW = """
import os
import resource

from train.distributed import world

held = len(os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (held + 4, hard))
with world(1, 1) as ranks:
    ranks.wait()
"""
ALONE = """
import os

os.environ["WORLD_SIZE"] = "2"
from train.cli import main

main()
"""


@pytest.mark.distributed
def test_many_ranks_need_more_files_than_a_shell_allows(forks, tmp_path):
    (tmp_path / "few.py").write_text(FEW)
    code, out = forks([], 3, tmp_path / "few.py")
    assert code == 0, out


@pytest.mark.distributed
def test_a_rank_that_is_alone_says_so(settings, forks, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    code, out = forks(["run", str(settings()), "--parallel.timeout_minutes", "0.05"], 1, tmp_path / "alone.py")
    assert code == 2, out
    assert "rank 0 of 2 waited in vain for the others" in out


def test_a_task_of_slurm_is_a_rank_and_a_script_is_none():
    script = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "n1"}
    with pytest.raises(UsageError, match="this job has 8 tasks, but srun started none"):
        environment(script)
    task = script | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
    variables = environment(task)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("3", "8", "3")
    assert environment(script | {"SLURM_NTASKS": "1"})["WORLD_SIZE"] == "1"
    assert environment({"SLURM_NTASKS": "8"})["WORLD_SIZE"] == "1"
    assert environment(script | {"RANK": "1", "WORLD_SIZE": "2"}) == {}
