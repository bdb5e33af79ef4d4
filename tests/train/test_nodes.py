"""Slow nodes: the arithmetic, and three processes that play a node each, one of which has a slow link."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from formats.errors import UsageError
from tests.train.conftest import ROOT, environment
from tests.train.forks import free_port
from train.distributed import environment as joined
from train.tools.node_speed import Figures, compare, rounds

WORLD = """
import json, sys, time
from train.distributed import world
from train.tools import node_speed as nodes

nodes.REPEATS, nodes.EXCHANGED, exchange = 3, 2**20, nodes._exchange
def late(*words):
    time.sleep(0.5)
    exchange(*words)
with world(1, 1) as ranks:
    if ranks.rank == 1:
        nodes._exchange = late
    figures = nodes.measure(ranks)
if ranks.first:
    print(json.dumps(figures))
"""


def test_a_node_is_slow_beside_the_median():
    figures = [Figures(f"n{at}", 0.01 + at / 10**4, 0.05) for at in range(7)]
    assert compare(figures, 1.2) == ("7, a matmul in 10.3 ms, 67.1 MB to and from a neighbour in 50.0 ms", {})
    figures[2] = Figures("n2", 0.0125, 0.05)
    figures[5] = Figures("n5", 0.02, 0.061)
    assert compare(figures, 1.2)[1] == {
        "n2": "matmul 12.5 ms, the median is 10.4 ms",
        "n5": "matmul 20.0 ms, the median is 10.4 ms; link 61.0 ms, the median is 50.0 ms",
    }


def test_of_two_nodes_the_slower_one_is_slow_and_one_alone_is_not():
    assert list(compare([Figures("a", 3.0, 1.0), Figures("b", 1.0, 1.0)], 1.2)[1]) == ["a"]
    assert compare([Figures("a", 3.0, 0.0)], 1.2) == ("1, a matmul in 3000.0 ms", {})


@pytest.mark.parametrize("count", range(1, 9))
def test_in_a_round_no_node_has_two_neighbours(count):
    plan = rounds(count)
    pairs = [frozenset(pair) for pairing in plan for pair in pairing]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {frozenset((at, (at + 1) % count)) for at in range(count) if count > 1}
    assert all(len({node for pair in pairing for node in pair}) == 2 * len(pairing) for pairing in plan)


@pytest.mark.parametrize(
    ("step", "job", "first"),
    [
        ("", "n1", "n1"),
        ("", "n[01-04,07],m1", "n01"),
        ("nid[005003,005007]", "nid[005000-005007]", "nid005003"),
        ("m1,n[2-3]", "", "m1"),
        ("", "rack-2-n[10-11]", "rack-2-n10"),
    ],
)
def test_the_first_node_is_known_without_scontrol(monkeypatch, step, job, first):
    """`srun containers/run --image … train run` of a user: neither a job of ours nor Slurm inside the image."""
    monkeypatch.setenv("PATH", "")
    task = {
        "SLURM_NTASKS": "16",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_PROCID": "3",
        "SLURM_JOB_ID": "131071",
        "SLURM_JOB_NODELIST": job,
    }
    variables = joined(task | ({"SLURM_STEP_NODELIST": step} if step else {}))
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == (first, "31071")
    assert joined(task | {"MASTER_ADDR": "m9", "MASTER_PORT": "7"})["MASTER_ADDR"] == "m9"


def test_without_a_list_of_nodes_a_task_is_refused():
    with pytest.raises(UsageError, match="which nodes") as error:
        joined({"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3"})
    assert "MASTER_ADDR" in str(error.value.hint)


@pytest.mark.distributed
def test_who_has_a_slow_link_is_found_and_its_neighbours_are_not():
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORLD], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment() | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                                 "SLURMD_NODENAME": f"n{rank}"},
        )
        for rank in range(3)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100)[0] for process in started]
    names, matmuls, links = zip(*json.loads(outputs[0]), strict=True)
    assert names == ("n0", "n1", "n2")
    assert min(matmuls) > 0
    assert links[1] >= 0.5 > max(links[0], links[2]) > 0
