"""kill -9, SIGTERM and a full disk: files are whole or absent, and the same command goes on to the same bytes."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Killed
from tests.data.pack_world import contents, make, slices_json
from train.data.tokens.sidecar import Facts

HERE = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
TOTALS = {"lv": [700, 0, 900, 900, 300], "en": [300, 0, 900, 600, 99]}


@pytest.fixture(scope="session")
def kill(killed) -> Callable[..., Killed]:
    """`kill(N, WORD, ...)`: `slice_killed_at.py`."""
    return lambda limit, *argv: killed(limit, *argv, script=HERE / "slice_killed_at.py")


def calls_of(ran: Killed) -> int:
    assert ran.returncode == 0, ran.out
    return int(ran.out.rsplit("calls ", 1)[1])


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """Data sets, and what cuts them."""
    folder, dice = tmp_path_factory.mktemp("sets"), np.random.default_rng(4)
    for i, name in enumerate(TOTALS):
        facts = Facts("aa", 1000, {}, None, None, {})
        make(folder / "in" / name, dice.integers(0, 60, 120), seed=i, mask=True, facts=facts)
    slices_json(folder / "slices.json", TOTALS)
    from train.data.packs.inputs import first_state, state_text

    (folder / "state.yaml").write_bytes(state_text(first_state(folder / "in")))
    return folder


def slicing(sets: Path, out: Path) -> list[object]:
    return [
        "packs", "slice", "--tokens-per-iter", 64, "--warmup-iters", 2, "--cd-phase", 20, "--max-tokens-per-pack", 900,
        "--out-dir", out, "--slices-json", sets / "slices.json", "--state-file", sets / "state.yaml", "-q",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(kill, sets, tmp_path_factory) -> tuple[dict[str, bytes], int]:
    """The files of an undisturbed slicing, and how many calls it made."""
    out = tmp_path_factory.mktemp("whole") / "out"
    calls = calls_of(kill(0, *slicing(sets, out)))
    return contents(out), calls


def check_visible(out: Path, expected: dict[str, bytes]) -> None:
    """Whatever has an index is whole."""
    for path in out.rglob("*.idx"):
        if not path.parent.name.endswith(".partial"):
            for end in ("bin", "idx", "mask", "json"):
                file = path.with_suffix(f".{end}")
                assert file.read_bytes() == expected[str(file.relative_to(out))]


@pytest.mark.parametrize("part", range(10))
def test_a_slicing_killed_anywhere_goes_on_to_the_same_bytes(kill, sets, undisturbed, tmp_path, part):
    """Each part kills at two random points of its tenth of the run, the second time while it goes on."""
    expected, calls = undisturbed
    out, dice = tmp_path / "out", random.Random(part)
    for _ in range(2):
        ran = kill(dice.randint(1 + calls * part // 10, calls * (part + 1) // 10), *slicing(sets, out))
        assert ran.returncode in (-signal.SIGKILL, 0), ran.out
        check_visible(out, expected)
    assert kill(0, *slicing(sets, out)).returncode == 0
    assert contents(out) == expected


def test_finished_slices_are_not_made_again(kill, sets, undisturbed, tmp_path):
    expected, calls = undisturbed
    kill(calls * 3 // 4, *slicing(sets, tmp_path / "out"))
    assert calls_of(kill(0, *slicing(sets, tmp_path / "out"))) < calls * 0.7
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("command", ["merge", "append-eod"])
def test_others_killed_anywhere_are_made_again(kill, sets, tmp_path, command, part):
    """A merge of all, or an append: killed once, then run; what is there in between is whole or absent."""
    argv = {
        "merge": ["packs", "merge", sets / "in", tmp_path / "out", "-q"],
        "append-eod": ["packs", "append-eod", tmp_path / "lv.bin", 60000, "append", "-q"],
    }[command]
    make(tmp_path / "lv", [5] * 40)
    folder, name = (tmp_path / "out", "in") if command == "merge" else (tmp_path, "eod_lv")
    calls = calls_of(kill(0, *argv))
    expected = {path.name: path.read_bytes() for path in folder.glob(f"{name}.*") if not path.name.endswith("log")}
    for path in folder.glob(f"{name}.*"):
        path.unlink()
    ran = kill(random.Random(part).randint(1 + calls * part // 4, calls * (part + 1) // 4), *argv)
    assert ran.returncode == -signal.SIGKILL
    if (folder / f"{name}.idx").exists():
        assert all((folder / file).read_bytes() == content for file, content in expected.items())
    assert kill(0, *argv, "--force").returncode == 0
    assert {file: (folder / file).read_bytes() for file in expected} == expected
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["slice", "merge", "append-eod"])
def test_a_signal_ends_with_75(kill, sets, tmp_path, command, number):
    prefix = make(tmp_path / "big/big", [500] * 4000)
    argv = {
        "slice": slicing(sets, tmp_path / "out"),
        "merge": ["packs", "merge", prefix.parent, tmp_path / "out"],
        "append-eod": ["packs", "append-eod", prefix, 60000, "append"],
    }[command]
    code = (
        "import os, sys, time\n"
        "from train.data.packs import append, files\n"
        "append.CHUNK = files.BUFFER = 5000\n"
        "def slow(function):\n"
        "    def call(*words):\n"
        "        print('.', file=sys.stderr, flush=True)\n"
        "        time.sleep(0.02)\n"
        "        return function(*words)\n"
        "    return call\n"
        "os.pwrite, os.copy_file_range = slow(os.pwrite), slow(os.copy_file_range)\n"
        "from train import cli\ncli.main()"
    )
    line = [sys.executable, "-c", code, *map(str, argv)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=ENV)
    assert process.stderr is not None
    process.stderr.readline()
    time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "stopped by a signal" in err
    assert not list(tmp_path.rglob("*.partial"))
    assert kill(0, *argv).returncode == 0


def test_two_processes_do_not_write_the_same_packs(kill, sets, tmp_path):
    out = tmp_path / "out"
    (out / "states").mkdir(parents=True)
    with (out / "states/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = kill(0, *slicing(sets, out))
    assert ran.returncode == 7
    assert "another process" in ran.out


@pytest.mark.parametrize("command", ["slice", "merge", "append-eod"])
def test_a_disk_that_is_full_half_way(kill, sets, tmp_path, command):
    """The limit of a file's size stands for a full disk: exit 7, nothing half there, and it goes on with room."""
    argv = {
        "slice": slicing(sets, tmp_path / "out"),
        "merge": ["packs", "merge", sets / "in", tmp_path / "out"],
        "append-eod": ["packs", "append-eod", tmp_path / "x", 60000, "append"],
    }[command]
    make(tmp_path / "x", [50] * 40)
    before = contents(tmp_path)
    line = [sys.executable, "-m", "tests.data.limited", "900", *map(str, argv)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENV, check=False, cwd=HERE.parents[1])
    assert ran.returncode == 7, ran.stderr
    assert "File too large" in ran.stderr
    assert str(tmp_path) in ran.stderr
    assert not list(tmp_path.rglob("*.partial"))
    if command != "slice":
        assert contents(tmp_path) == before
    assert kill(0, *argv).returncode == 0


def test_a_folder_that_cannot_be_written(kill, sets, tmp_path):
    (tmp_path / "out").write_text("a file")
    ran = kill(0, *slicing(sets, tmp_path / "out"))
    assert ran.returncode == 7
    ran = kill(0, "packs", "merge", sets / "in", "/proc/none/out")
    assert ran.returncode == 7
    assert "/proc/none" in ran.out
