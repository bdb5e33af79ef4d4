"""An FSDP optimizer that has made other steps than the trainer beside it counts, as a half-finished copy leaves it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.torch_files import dcp
from tests.faults.dcp_tools import refused, save
from tests.faults.test_fsdp_optim_faults import State, training

GOLDEN = Path(__file__).parents[1] / "golden"
OLMO = GOLDEN / "olmo_core/olmo2_v300"
COMMANDS = (("hf2fsdp", "--with-optimizer"), ("zero2universal",), ("hf2megatron", "--with-optimizer", "--lr", 0.01))


def trainer(folder: Path, saved: State, counted: Any) -> str:
    """The Trainer of transformers, with accelerate's folders."""
    save(folder / "pytorch_model_fsdp_0", {"model": saved["model"]})
    save(folder / "optimizer_0", {"optimizer": saved["optim"]})
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": counted, "log_history": [float("nan")]}))
    return f"the optimizer in {folder / 'optimizer_0'} has made 3 steps, {folder / 'trainer_state.json'} says global_st"


def trainer_full(folder: Path, saved: State, counted: Any) -> str:
    """The same with whole state dicts."""
    import torch

    folder.mkdir(parents=True)
    torch.save(saved["model"], folder / "pytorch_model_fsdp.bin")
    torch.save(saved["optim"], folder / "optimizer.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": counted}))
    return f"the optimizer in {folder} has made 3 steps, {folder / 'trainer_state.json'} says global_st"


def torchtitan(folder: Path, saved: State, counted: Any) -> str:
    """All in one folder; the count is a pickled number, or a tensor."""
    save(folder, {**saved["model"], "optimizer": saved["optim"], "train_state": {"step": counted}})
    return f"the optimizer in {folder} has made 3 steps, {folder} says train_state.st"


def torchtitan_tensor(folder: Path, saved: State, counted: Any) -> str:
    import torch

    return torchtitan(folder, saved, torch.tensor(counted, dtype=torch.int32))


SAVERS: dict[str, Callable[[Path, State, Any], str]] = {
    "Trainer": trainer,
    "Trainer, whole": trainer_full,
    "torchtitan": torchtitan,
    "torchtitan, tensor": torchtitan_tensor,
}


@pytest.mark.parametrize("kind", SAVERS)
def test_the_trainer_counts_other_steps(model, convert, tmp_path, kind):
    source, saved = training(model("llama", num_hidden_layers=1))
    said = SAVERS[kind](tmp_path / "stale", saved, 4)
    SAVERS[kind](tmp_path / "sound", saved, 3)
    for number, (command, *options) in enumerate(COMMANDS):
        argv = [*options, "--config", source]
        ran = convert(command, tmp_path / "stale", tmp_path / "out", *argv)
        refused(ran, 3, f"{said}ep = 4: files of different saves", "--accept trainer_step")
        assert not (tmp_path / "out").exists()
        ran = convert(command, tmp_path / "stale", tmp_path / f"a{number}", *argv, "--accept", "trainer_step")
        assert (ran.code, f"note: {said}ep = 4: accepted" in ran.err + ran.out) == (0, True), ran.err
        ran = convert(command, tmp_path / "sound", tmp_path / f"b{number}", *argv)
        assert (ran.code, "has made" in ran.err + ran.out) == (0, False), ran.err
    assert f"{said}ep = 4" in convert("inspect", tmp_path / "stale", "--config", source).out
    assert convert("fsdp2hf", tmp_path / "stale", tmp_path / "weights", "--config", source).code == 0


@pytest.mark.parametrize("counted", [3, 4])
@pytest.mark.parametrize("inner", ["", "model_and_optim"])
def test_olmo_core_counts_other_steps(convert, tmp_path, counted, inner):
    """Real files, and a `train/rank0.pt` of the form that OLMo-core 3.0.0 gives it."""
    import numpy
    import torch

    run = shutil.copytree(OLMO / "step3", tmp_path / "step3")
    (run / "train").mkdir()
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    rng = {name: {"version": "1", "state": state} for name, state in states.items()}
    rest = {"epoch": 1, "max_steps": 10, "rng": rng, "data_loader": {"seed": 0}, "callbacks": {"console": {}}}
    torch.save({"global_step": counted, **rest}, run / "train/rank0.pt")
    for command, *options in COMMANDS[:2]:
        ran = convert(command, run / inner, tmp_path / command, *options, "--config", OLMO / "hf")
        if counted == 3:
            assert ran.code == 0, ran.err
            continue
        places = f"{run / 'model_and_optim'} has made 3 steps, {run / 'train/rank0.pt'} says global_step = 4"
        refused(ran, 3, places, "--accept trainer_step")


@pytest.mark.parametrize("name", ["checkpoint-4", "checkpoint-3", "final"])
def test_a_folder_with_the_name_of_another_step_is_told(model, convert, tmp_path, name):
    source, saved = training(model("llama", num_hidden_layers=1))
    trainer(tmp_path / name, saved, 3)
    for command, *options in COMMANDS:
        ran = convert(command, tmp_path / name, tmp_path / command, *options, "--config", source)
        told = "checkpoint-4 holds step 3, as its files say" in ran.err + ran.out
        assert (ran.code, told) == (0, name == "checkpoint-4"), ran.err


@pytest.mark.parametrize("name", ["checkpoint-4", "checkpoint-3"])
def test_a_folder_with_the_name_of_another_step_than_its_optimizer_has_made_is_told(model, convert, tmp_path, name):
    """Where no trainer has recorded the step."""
    source, saved = training(model("llama", num_hidden_layers=1))
    trainer(tmp_path / name, saved, 3)
    (tmp_path / name / "trainer_state.json").unlink()
    for command, *options in COMMANDS:
        ran = convert(command, tmp_path / name, tmp_path / command, *options, "--config", source)
        told = "checkpoint-4 holds an optimizer that has made 3 steps" in ran.err + ran.out
        assert (ran.code, told) == (0, name == "checkpoint-4"), ran.err


@pytest.mark.parametrize("text", ['{"global_step": "3"}', "{}"])
def test_a_record_without_a_count_says_nothing(model, convert, tmp_path, text):
    source, saved = training(model("llama", num_hidden_layers=1))
    trainer(tmp_path / "c", saved, 4)
    (tmp_path / "c/trainer_state.json").write_text(text)
    ran = convert("hf2fsdp", tmp_path / "c", tmp_path / "out", "--with-optimizer", "--config", source)
    assert ran.code == 0, ran.err


def test_the_count_of_torchtitan_is_where_it_is_looked_for():
    """In a folder that its version 0.2.2 wrote, after one step."""
    from formats.torch_files.archive_writer import small_of

    (entry,) = (entry for entry in dcp.entries(GOLDEN / "torchtitan/llama_v022/step-1") if "n_state.step" in entry.name)
    (tensor,) = dcp.load([entry])
    assert (entry.name, small_of(tensor).number) == ("train_state.step", 1)
