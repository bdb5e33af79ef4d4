"""Trainings of real torch and accelerate go on from a checkpoint that we wrote of another one, on any number of ranks.

What they load is what the training had, to the bit, and their losses are those of the training that went on unbroken.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converters.common.manifest import remembered_states
from tests.golden.worlds import once
from tests.models import build
from tests.train.conftest import Forks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).with_name("fsdp_optim_world.py")
TRAININGS = {
    "fsdp2": (2, ("plain", "app", "flattened", "accelerate", "accelerate-full", "accelerate-dumps", "verl")),
    "fsdp1": (2, ("plain", "accelerate")),
    "tp": (4, ("plain",)),
    "muon": (2, ("plain", "flattened")),
    "lion": (2, ("plain", "flattened", "accelerate", "accelerate-full")),
}
"""How the model is cut: on how many ranks, and the forms of what is saved."""
RESUMED = [
    ("fsdp2", "plain", "fsdp2", 1), ("fsdp2", "accelerate-full", "fsdp2", 3), ("fsdp2", "flattened", "tp", 4),
    ("fsdp2", "accelerate", "fsdp1-mesh", 2), ("fsdp1", "accelerate", "fsdp2", 2), ("tp", "plain", "fsdp2", 2),
    ("muon", "plain", "muon", 2), ("muon", "flattened", "muon", 3),
    ("lion", "plain", "lion", 4), ("lion", "flattened", "lion", 1), ("lion", "accelerate", "lion", 2),
    ("lion", "accelerate-full", "lion", 4),
]  # fmt: skip
"""Which of these goes on as what."""
KEPT = {"muon": (["exp_avg", "exp_avg_sq", "momentum_buffer"], 46), "lion": (["exp_avg"], 40)}
"""What other optimizers than Adam keep, and how many tensors that is with the weights: Muon of its 14 matrices one."""


def work(fsdp: Forks, jobs: list[dict[str, Any]], folder: Path) -> tuple[int, str]:
    """Do the jobs in one process: exit code and output."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return fsdp([str(folder / "jobs.json")], 1, SCRIPT)


@pytest.fixture(scope="module")
def made(fsdp: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that all trainings began with, and their folder."""
    folder = once("fsdp-trained", tmp_path_factory, lambda place: begin(fsdp, place))
    return folder / "hf", folder


def begin(fsdp: Forks, folder: Path) -> None:
    """Build a model and train it in every way."""
    source, jobs = folder / "hf", []
    build(source, "llama-tied", "float32", num_hidden_layers=2)
    for name, (ranks, forms) in TRAININGS.items():
        out = folder / name
        out.mkdir()
        saves = {str(out / form / "checkpoint-3"): form for form in forms}
        jobs.append({"hf": str(source), "ranks": ranks, "model": name, "out": str(out), "saves": saves})
    code, output = work(fsdp, jobs, folder)
    assert code == 0, output


def test_a_training_goes_on(made, convert, fsdp, tmp_path):
    source, folder = made
    records: dict[str, set[str]] = {name: set() for name in TRAININGS}
    for name, (_, forms) in TRAININGS.items():
        for form in forms:
            out = tmp_path / f"{name}-{form}"
            options = ("--ranks", 3, "--with-optimizer", "--config", source)
            ran = convert("hf2fsdp", folder / name / form / "checkpoint-3", out, *options)
            if form == "verl":
                assert (ran.code, "numbers its parameters" in ran.err) == (4, True), ran.err
                continue
            assert ran.code == 0, ran.err
            names, count = KEPT.get(name, (["exp_avg", "exp_avg_sq"], 60))
            assert convert("verify", out).out.startswith(f"{out} equals vitruvian.json: {count} tensors")
            records[name].add(json.dumps(remembered_states(out)))
            record = json.loads(convert("inspect", out, "--json").out)
            assert record["optimizer"] == {"states": names, "step": None if name == "lion" else 3}
    assert {name: len(states) for name, states in records.items()} == dict.fromkeys(TRAININGS, 1), "whatever the form"
    assert records["fsdp2"] == records["fsdp1"] != records["tp"]
    jobs = [
        {"hf": str(source), "ranks": ranks, "model": as_what, "out": str(folder / name), "begun": TRAININGS[name][0]}
        | {"loads": str(tmp_path / f"{name}-{form}")}
        for name, form, as_what, ranks in RESUMED
    ]
    code, output = work(fsdp, [*jobs, {**jobs[0], "out": str(folder / "tp")}], tmp_path)
    assert output.count("largest relative loss difference") == len(jobs), output
    assert code == 1, "another training's states are noticed"
    assert "exp_avg differs in" in output


def test_a_training_that_is_cut_again_is_the_same(made, convert, tmp_path):
    """Ours to ours: the same bytes, whatever it was before."""
    source, folder = made
    run = folder / "fsdp2/plain/checkpoint-3"
    assert convert("hf2fsdp", run, tmp_path / "a", "--ranks", 2, "--with-optimizer", "--config", source).code == 0
    assert convert("hf2fsdp", tmp_path / "a", tmp_path / "b", "--ranks", 7, "--with-optimizer").code == 0
    assert convert("hf2fsdp", tmp_path / "b", tmp_path / "c", "--ranks", 2, "--with-optimizer").code == 0
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_without_the_option_the_weights_go_alone(made, convert, tmp_path):
    source, folder = made
    ran = convert("hf2fsdp", folder / "fsdp2/plain/checkpoint-3", tmp_path / "out", "--config", source)
    assert ran.code == 0
    assert "what is no weight of the model is not carried: 60 such as optim.state." in ran.err
    assert json.loads(convert("inspect", tmp_path / "out", "--json").out)["optimizer"] is None
    ran = convert("hf2fsdp", tmp_path / "out", tmp_path / "two", "--with-optimizer")
    assert (ran.code, "holds no optimizer" in ran.err) == (3, True)
    options = ("--with-optimizer", "--dtype", "bf16")
    assert convert("hf2fsdp", tmp_path / "out", tmp_path / "two", *options).code == 2
    ran = convert("hf2fsdp", source, tmp_path / "two", "--with-optimizer")
    assert (ran.code, "huggingface" in ran.err) == (4, True)
