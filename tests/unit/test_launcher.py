"""Signals through `containers/run`, as Slurm gives them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "containers/run"
LISTENER = """
import os, signal, subprocess, sys, time

def tell(number, _):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(0.3)
    os.write(1, signal.Signals(number).name.encode() + bytes([10]))  # print may be at work
    sys.exit(75)

if len(sys.argv) > 1:  # as torchrun, which does not listen
    sys.exit(subprocess.call([sys.executable, "-ISc", os.environ["CODE"]]))
print("begins", flush=True)
print(sys.stdin.readline(), end="", flush=True)
signal.signal(signal.SIGUSR1, tell)
signal.signal(signal.SIGTERM, tell)
print("listens", flush=True)
time.sleep(20)
"""
"""A command that saves when it is told to; with another word it is the child of one that does not."""


@pytest.mark.parametrize(
    ("number", "argv", "tasks"),
    [(signal.SIGUSR1, [], "2"), (signal.SIGUSR1, ["below"], "1"), (signal.SIGTERM, [], "2")],
)
def test_what_the_launcher_alone_hears_reaches_the_command(tmp_path, number, argv, tasks):
    """Slurm signals what slurmstepd has started, and nothing below it (proctrack/cgroup)."""
    (tmp_path / "sleep").symlink_to("/bin/true")  # until the other tasks have ended
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": "/",
        "SLURM_JOB_ID": "0",
        "SLURM_NTASKS": tasks,
        "CODE": LISTENER,
    }
    command = [RUN, "--site", "local", sys.executable, "-ISc", LISTENER, *argv]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdin is not None
        assert ran.stdout is not None
        assert ran.stdout.readline() == "begins\n"
        ran.send_signal(signal.SIGUSR1)  # nothing listens yet, and nothing dies of it
        print("input", file=ran.stdin, flush=True)
        assert [ran.stdout.readline(), ran.stdout.readline()] == ["input\n", "listens\n"]
        ran.send_signal(number)
        time.sleep(0.1)
        ran.send_signal(number)
        assert ran.stdout.read() == f"{number.name}\n"
        assert ran.wait(10) == 75
