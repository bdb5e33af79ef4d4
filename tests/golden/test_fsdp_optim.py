"""Trainings of real torch and accelerate go on from a checkpoint that we wrote of another one, on any number of ranks.

What they load is what the training had, to the bit, and their losses are those of the training that went on unbroken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.digest import remembered_states

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
TRAININGS = {
    "fsdp2": (2, ("plain", "app", "flattened", "accelerate", "accelerate-full", "accelerate-dumps", "verl")),
    "fsdp1": (2, ("plain", "accelerate")),
    "tp": (4, ("plain",)),
}
"""How the model is cut: on how many ranks, and the forms of what is saved."""
RESUMED = [
    ("fsdp2", "plain", "fsdp2", 1), ("fsdp2", "accelerate-full", "fsdp2", 3), ("fsdp2", "flattened", "tp", 4),
    ("fsdp2", "accelerate", "fsdp1-mesh", 2), ("fsdp1", "accelerate", "fsdp2", 2), ("tp", "plain", "fsdp2", 2),
]  # fmt: skip
"""Which of these goes on as what."""


def work(jobs: list[dict[str, Any]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Do the jobs in one process, because importing torch takes longest."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-c", "import fsdp_optim_world; fsdp_optim_world.main()", str(folder / "jobs.json")]
    env = os.environ | {"PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)


@pytest.fixture(scope="module")
def made(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that all trainings began with, and their folder."""
    source, folder, jobs = model("llama-tied", num_hidden_layers=2), tmp_path_factory.mktemp("trained"), []
    for name, (ranks, forms) in TRAININGS.items():
        out = folder / name
        out.mkdir()
        saves = {str(out / form / "checkpoint-3"): form for form in forms}
        jobs.append({"hf": str(source), "ranks": ranks, "model": name, "out": str(out), "saves": saves})
    ran = work(jobs, folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    return source, folder


def test_a_training_goes_on(made, convert, tmp_path):
    source, folder = made
    found: dict[str, set[str]] = {name: set() for name in TRAININGS}
    for name, (_, forms) in TRAININGS.items():
        for form in forms:
            out = tmp_path / f"{name}-{form}"
            words = ("--ranks", 3, "--with-optimizer", "--config", source)
            ran = convert("hf2fsdp", folder / name / form / "checkpoint-3", out, *words)
            if form == "verl":
                assert (ran.code, "numbers its parameters" in ran.err) == (4, True), ran.err
                continue
            assert ran.code == 0, ran.err
            assert convert("verify", out).out.startswith(f"{out} equals vitruvian.json: 60 tensors")
            found[name].add(json.dumps(remembered_states(out)))
            record = json.loads(convert("inspect", out, "--json").out)
            assert record["optimizer"] == {"states": ["exp_avg", "exp_avg_sq"], "step": 3}
    assert {name: len(states) for name, states in found.items()} == dict.fromkeys(TRAININGS, 1), "whatever the form"
    assert found["fsdp2"] == found["fsdp1"] != found["tp"]
    jobs = [
        {"hf": str(source), "ranks": ranks, "model": as_what, "out": str(folder / name), "loads": str(tmp_path / out)}
        for name, form, as_what, ranks in RESUMED
        for out in [f"{name}-{form}"]
    ]
    ran = work([*jobs, {**jobs[0], "out": str(folder / "tp")}], tmp_path)
    assert ran.stdout.count("largest relative loss difference") == len(jobs), ran.stdout + ran.stderr[-4000:]
    assert ran.returncode == 1, "another training's states are noticed"
    assert "exp_avg differs in" in ran.stdout


def test_a_training_that_is_cut_again_is_the_same(made, convert, tmp_path):
    """Ours to ours: the same bytes, whatever it was before."""
    source, folder = made
    begun = folder / "fsdp2/plain/checkpoint-3"
    assert convert("hf2fsdp", begun, tmp_path / "a", "--ranks", 2, "--with-optimizer", "--config", source).code == 0
    assert convert("hf2fsdp", tmp_path / "a", tmp_path / "b", "--ranks", 7, "--with-optimizer").code == 0
    assert convert("hf2fsdp", tmp_path / "b", tmp_path / "c", "--ranks", 2, "--with-optimizer").code == 0
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_without_the_option_the_weights_go_alone(made, convert, tmp_path):
    source, folder = made
    ran = convert("hf2fsdp", folder / "fsdp2/plain/checkpoint-3", tmp_path / "out", "--config", source)
    assert ran.code == 0
    assert "what is no weight of the model stays behind: 60 such as optim.state." in ran.err
    assert json.loads(convert("inspect", tmp_path / "out", "--json").out)["optimizer"] is None
    ran = convert("hf2fsdp", tmp_path / "out", tmp_path / "two", "--with-optimizer")
    assert (ran.code, "holds no optimizer" in ran.err) == (3, True)
    words = ("--with-optimizer", "--dtype", "bf16")
    assert convert("hf2fsdp", tmp_path / "out", tmp_path / "two", *words).code == 2
    ran = convert("hf2fsdp", source, tmp_path / "two", "--with-optimizer")
    assert (ran.code, "huggingface" in ran.err) == (4, True)
