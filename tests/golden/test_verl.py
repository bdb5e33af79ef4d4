"""verl's optimizer, which numbers its parameters: what is moved is what real verl had in memory, and trains on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.common.manifest import remembered_states
from converters.convert import run
from converters.plan.request import Request
from converters.plan.targets import plan_huggingface
from converters.plan.training_state import optimizer_of
from formats.checkpoint import Settings
from formats.optimizer import Group
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.golden.ranks import differences

HERE = Path(__file__).parent / "verl"
MODELS, KINDS = ("tied", "qwen"), ("fsdp1", "fsdp2")
SCRIPT = Path(__file__).with_name("fsdp_optim_world.py")


CASES = [(name, kind) for name in MODELS for kind in KINDS] + [("tied_of_three", "fsdp1")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_numbers_are_the_parameters_of_the_model(tmp_path, name, kind):
    """Both moments, bit for bit; and how each parameter is treated."""
    from safetensors.torch import load_file

    source = open_checkpoint(HERE / name / kind, Settings())
    trained = optimizer_of(source)
    assert (trained.step, set(trained.groups.values())) == (3, {Group(0.01, (0.9, 0.999), 1e-8, 0.01)})
    assert trained.groups.keys() == source.dtypes().keys()
    truth = load_file(HERE / name / "states.safetensors")
    for state, checkpoint in trained.states.items():
        request = Request(tmp_path / state, quiet=True)
        run(plan_huggingface(checkpoint, request, 10**9), request)
        ours = {f"{key} {state}": value for key, value in load_file(tmp_path / state / "model.safetensors").items()}
        assert differences(ours, {key: value for key, value in truth.items() if key.endswith(f" {state}")}) == []
    assert [*trained.states] == ["exp_avg", "exp_avg_sq"]


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_training_of_verl_goes_on(convert, fsdp, tmp_path):
    """On another number of ranks, in torch: the losses are those that verl's own model went on with."""
    jobs = []
    for name in MODELS:
        for kind, ranks in zip(KINDS, (3, 1), strict=True):
            out = tmp_path / f"{name}-{kind}"
            ran = convert("hf2fsdp", HERE / name / kind, out, "--ranks", 4, "--with-optimizer")
            assert ran.code == 0, ran.err
            assert convert("verify", out).code == 0
            job = {"ranks": ranks, "model": "verl", "out": str(HERE / name), "loads": str(out), "begun": 2}
            jobs.append({**job, "hf": str(tmp_path / name)})
        assert convert("fsdp2hf", HERE / name / "fsdp2", tmp_path / name).code == 0
        first, second = (remembered_states(tmp_path / f"{name}-{kind}") for kind in KINDS)
        assert first == second != {}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    code, output = fsdp([str(tmp_path / "jobs.json")], 1, SCRIPT)
    assert code == 0, output
    assert output.count("largest relative loss difference") == len(jobs), output


def test_a_step_folder_becomes_a_universal_checkpoint_and_a_run_of_megatron(convert, tmp_path):
    shutil.copytree(HERE / "qwen/fsdp1", tmp_path / "global_step_3/actor")
    config = ["--config", HERE / "qwen/fsdp1/huggingface"]
    assert convert("zero2universal", tmp_path / "global_step_3", tmp_path / "universal", *config).code == 0
    options = ["--dtype", "fp32", "--with-optimizer", "--tp", 2, *config]
    assert convert("hf2megatron", tmp_path / "global_step_3", tmp_path / "megatron", *options).code == 0


State = dict[str, Any]


def pop(saved: State, number: int) -> None:
    """One parameter less has states: it is frozen."""
    saved["state"].pop(number)


def split(saved: State) -> None:
    """Two groups, as of weights with and without decay."""
    (group,) = saved["param_groups"]
    saved["param_groups"] = [{**group, "params": group["params"][:5]}, {**group, "params": group["params"][5:]}]


def shorten(saved: State) -> None:
    """The optimizer was given one parameter less."""
    saved["state"].pop(len(saved["state"]) - 1)
    saved["param_groups"][0]["params"].pop()


def reorder(saved: State) -> None:
    """The numbers are not in order."""
    saved["param_groups"][0]["params"].reverse()


def cut(saved: State) -> None:
    """A flat parameter has other sizes."""
    for state in saved["state"][1].values():
        if state.dim():
            state.data = state.data[:-4].clone()


def stray(saved: State) -> None:
    """States of a parameter that is in no group."""
    saved["state"][99] = saved["state"][0]


def eight(saved: State) -> None:
    """What bitsandbytes keeps."""
    for about in saved["state"].values():
        about["state1"], about["state2"] = about.pop("exp_avg"), about.pop("exp_avg_sq")


FAULTS: dict[str, tuple[str, Callable[[State], None], int, tuple[str, ...]]] = {
    "frozen": ("tied/fsdp2", lambda s: pop(s, 3), 3, ("model.layers.0.self_attn.v_proj.weight", "is it frozen")),
    "a layer frozen": ("tied/fsdp1", lambda s: pop(s, 1), 3, ("model.layers.0.", "is it frozen")),
    "two groups": ("tied/fsdp2", split, 4, ("numbers its parameters, in 2 groups", "only the training that saved it")),
    "no order": ("tied/fsdp2", reorder, 4, ("does not say which is which",)),
    "fewer": ("tied/fsdp2", shorten, 4, ("numbers 19 parameters, and its model has 20",)),
    "fewer flat ones": ("qwen/fsdp1", shorten, 4, ("numbers 2 flat parameters, and its model has 3 flat",)),
    "other sizes": (
        "tied/fsdp1", cut, 4, ("972 elements of a flat parameter on each of 2 ranks", "have 1952 together"),
    ),
    "a stray one": ("qwen/fsdp1", stray, 3, ("states of a parameter 99 that is in no group",)),
    "8 bits": ("tied/fsdp2", eight, 4, ("(an 8-bit optimizer of bitsandbytes)",)),
    "of one rank": ("tied/fsdp1", lambda s: cut(s) if s["rank"] else None, 3, ("and the dumps of other ranks have",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_numbers_that_are_not_the_parameters_are_refused(convert, tmp_path, fault):
    import torch

    folder, change, code, says = FAULTS[fault]
    shutil.copytree(HERE / folder, tmp_path / "c")
    for path in (tmp_path / "c").glob("optim*"):
        saved = torch.load(path, weights_only=False)
        saved["rank"] = int(re.findall(r"\d+", path.stem)[-1])
        change(saved)
        torch.save({key: value for key, value in saved.items() if key != "rank"}, path)
    refused(convert("hf2fsdp", tmp_path / "c", tmp_path / "out", "--with-optimizer"), code, *says)
    assert not (tmp_path / "out").exists()
    assert convert("hf2fsdp", tmp_path / "c", tmp_path / "out", "-q").code == 0, "the weights alone"


def test_dumps_of_all_ranks_are_there(convert, tmp_path):
    shutil.copytree(HERE / "tied/fsdp2", tmp_path / "c")
    (tmp_path / "c/optim_world_size_2_rank_1.pt").unlink()
    refused(convert("hf2fsdp", tmp_path / "c", tmp_path / "out", "--with-optimizer"), 3, "lacks the dumps of rank 1")
