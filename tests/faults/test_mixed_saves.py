"""Files of two saves in one folder, of frameworks that leave no record of a save: what their own files say tells."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from formats.deepspeed.neox import checkpoint as neox
from formats.megatron import shards
from tests.faults.dcp_tools import refused

GOLDEN = Path(__file__).parents[1] / "golden" / "neox"


@pytest.mark.parametrize("name", shards.TIES[2:])
def test_megatron_ranks_of_one_iteration_and_two_runs(model, convert, tmp_path, name):
    """As where a run began again at iteration 0 with another batch size."""
    import torch

    assert convert("hf2megatron", model("llama"), tmp_path / "run", "--tp", 2, "--iteration", 100).code == 0
    paths = sorted((tmp_path / "run").glob("iter_0000100/*/model_optim_rng.pt"))
    for path, samples in zip(paths, (1600, 3200), strict=True):
        stored = torch.load(path, weights_only=False)
        setattr(stored["args"], name, samples)
        torch.save(stored, path)
    ran = convert("megatron2hf", tmp_path / "run", tmp_path / "out")
    refused(ran, 3, f"{paths[1]} is of {name} 3200, {paths[0]} of 1600: files of different saves", "hint:")


@pytest.mark.parametrize("name", neox.TIES)
def test_neox_ranks(convert, tmp_path, name):
    """Of files that GPT-NeoX wrote: one of two ranks is made that of another step."""
    import torch

    run = shutil.copytree(GOLDEN / "llama-mha-tp2", tmp_path / "run")
    path = next(run.glob("*/mp_rank_01_model_states.pt"))
    stored = torch.load(path, weights_only=False)
    assert name in stored
    torch.save(stored | {name: 3}, path)
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--gqa-layout", "blocked")
    refused(ran, 3, f"{path} is of {name} 3, ", "files of different saves")


def test_neox_partitions_of_one_tensor_rank(convert, tmp_path):
    """All data ranks of one tensor parallel rank agree; those of the other are of another step."""
    import torch

    run = shutil.copytree(GOLDEN / "llama-tp2-dp2", tmp_path / "run")
    paths = sorted(run.glob("*/*_mp_rank_01_optim_states.pt"))
    for path in paths:
        stored = torch.load(path, weights_only=False)
        for state in stored["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] -= 2
        torch.save(stored, path)
    for argv in (
        ["neox2hf", run, tmp_path / "out", "--weights", "fp32-master"],
        ["zero2universal", run, tmp_path / "u"],
    ):
        ran = convert(*argv, "--vocab-size", 101, "--gqa-layout", "blocked")
        refused(ran, 3, f"{paths[0]} is of step 4.0, ", "of 6.0: files of different saves")
