"""average-norms on checkpoints of real DeepSpeed whose norms drifted: only they change, module and master weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_universal import YML
from tests.golden.zero_worlds import PARALLEL

pytestmark = pytest.mark.distributed


@pytest.fixture
def yml(tmp_path) -> Path:
    (tmp_path / "run.yml").write_text(json.dumps(YML))
    return tmp_path / "run.yml"


def tensors(value: Any, path: str = "") -> dict[str, Any]:
    """Every tensor of a nested object, by its place."""
    import torch

    leaves: dict[str, Any] = {}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in pairs:
        leaves |= tensors(inner, f"{path}/{key}")
    return {path: value} if isinstance(value, torch.Tensor) else leaves


@pytest.mark.parametrize("kind", ["tp2", "pp2-tp2"])
def test_norms_and_nothing_else(made, convert, tmp_path, yml, kind):
    import torch

    source, out = made(PARALLEL) / kind / "global_step3", tmp_path / "out"
    ran = convert("average-norms", made(PARALLEL) / kind, out, "--config", yml)
    assert ran.code == 0, ran.err
    assert "the copies of 7 tensors differed" in ran.err
    assert (out / "latest").read_text() == "global_step3"
    written = {path.name: path for path in (out / "global_step3").iterdir()}
    assert written.keys() == {path.name for path in source.iterdir()}
    for name, path in written.items():
        if path.samefile(source / name):
            continue
        before, after = (tensors(torch.load(file, weights_only=False)) for file in (source / name, path))
        assert before.keys() == after.keys()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert changed, name
        assert all("norm" in key or "fp32_groups/1" in key for key in changed), (name, changed)
    linked = [name for name in written if written[name].samefile(source / name)]
    assert len(linked) == {"tp2": 0, "pp2-tp2": 8}[kind]  # layers without a norm, and files without a layer
    assert convert("verify", out).code == 0


@pytest.mark.parametrize("kind", ["tp2", "pp2-tp2"])
def test_every_copy_is_the_mean(made, convert, tmp_path, yml, kind):
    """What training goes on from (the master weights) and what it computes with (the module) agree afterwards."""
    import torch
    from safetensors.torch import load_file

    assert convert("average-norms", made(PARALLEL) / kind, tmp_path / "out", "--config", yml).code == 0
    truth = load_file(made(PARALLEL) / f"{kind}.truth.safetensors")
    flags = ["--config", yml, "--vocab-size", 96, "--gqa-layout", "blocked", "--replicas", "verify"]
    for weights, state in (("fp32-master", "fp32"), ("module", "module")):
        place = tmp_path / state
        assert convert("neox2hf", tmp_path / "out", place, *flags, "--weights", weights).code == 0
        converted = load_file(place / "model.safetensors")
        prefix = "sequential." if kind == "tp2" else ""
        stage = 0 if kind == "tp2" else 2
        copies = [truth[f"{rank + stage}.fp32.{prefix}6.norm.scale"] for rank in range(2)]
        mean = (copies[0] + copies[1]) / 2
        assert torch.equal(converted["model.norm.weight"], mean if state == "fp32" else mean.bfloat16())


def test_without_optimizer_states_the_module_alone(made, convert, tmp_path, yml):
    import shutil

    folder = shutil.copytree(made(PARALLEL) / "tp2", tmp_path / "bare")
    for path in folder.rglob("*optim_states.pt"):
        path.unlink()
    ran = convert("average-norms", folder, tmp_path / "out", "--config", yml, "--json")
    assert json.loads(ran.out)["written"] == 2


def test_master_weights_of_another_save(made, convert, tmp_path, yml):
    """Their mean would replace the norms that the module computes with."""
    import shutil

    import torch

    folder = shutil.copytree(made(PARALLEL) / "tp2", tmp_path / "mixed")
    for path in folder.rglob("*optim_states.pt"):
        stored = torch.load(path, weights_only=False)
        for tensor in (tensor for place, tensor in tensors(stored).items() if "fp32_groups" in place):
            tensor.data.mul_(1.5)
        torch.save(stored, path)
    ran = convert("average-norms", folder, tmp_path / "out", "--config", yml)
    refused(ran, 6, "norm", "are not the rounded FP32 master weights")
    assert not (tmp_path / "out").exists()


def test_one_rank_has_nothing_to_average(convert, tmp_path):
    folder = Path(__file__).parent / "neox" / "llama-vocab125-tp1"
    refused(convert("average-norms", folder, tmp_path / "out"), 4, "one tensor parallel rank")


def test_a_dry_run_writes_nothing(made, convert, tmp_path, yml):
    ran = convert("average-norms", made(PARALLEL) / "tp2", tmp_path / "out", "--config", yml, "-n")
    assert (ran.code, "6 files would be written" in ran.out, (tmp_path / "out").exists()) == (0, True, False)
