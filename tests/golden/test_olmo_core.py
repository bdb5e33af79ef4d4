"""Checkpoints that real OLMo-core wrote, and what its own export and model make of them (olmo_core/README.md)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_megatron_fsdp import tensors
from tests.golden.test_torchtitan import difference, same

HERE = Path(__file__).parent / "olmo_core"
CASES = sorted(path.parent for path in HERE.glob("*/step3"))
TRAINED = HERE / "olmo2_v300"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torch_reads_it(monkeypatch):
    """OLMo-core has copies of two classes of torch, whose names are in its `.metadata`."""
    from torch.distributed.checkpoint import filesystem

    name = "olmo_core.distributed.checkpoint.filesystem"
    monkeypatch.setitem(sys.modules, "olmo_core", SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, filesystem)


def test_there_are_cases():
    assert [case.name for case in CASES] == ["olmo2_v300", "olmo2_v300_tied", "olmo3_v300"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_becomes_what_its_own_export_and_model_say(convert, tmp_path, case):
    ran = convert("fsdp2hf", case / "step3", tmp_path / "out", "--config", case / "hf")
    assert ran.code == 0, ran.err
    same(tmp_path / "out/model.safetensors", case / "hf/model.safetensors")
    assert difference(tmp_path / "out", case) < 1e-6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_written_is_what_it_wrote(convert, tmp_path, torch_reads_it, case):
    """Under the same names, bit for bit; so it loads them as it loads its own."""
    ran = convert("hf2fsdp", case / "hf", tmp_path / "out", "--names", "olmo-core", "--ranks", 2)
    assert ran.code == 0, ran.err
    assert "load_trainer_state=False" in ran.out
    ours, theirs = tensors(tmp_path / "out"), tensors(case / "step3/model_and_optim")
    theirs = {name: one for name, one in theirs.items() if name.startswith("model.")}
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(one) and ours[name].dtype == one.dtype for name, one in theirs.items())
    assert convert("diff", tmp_path / "out", case / "hf").code == 0


def test_its_optimizer_goes_along(convert, tmp_path, torch_reads_it):
    """Under Hugging Face's names; under its own there are weights alone."""
    config = ("--config", TRAINED / "hf")
    ran = convert("hf2fsdp", TRAINED / "step3", tmp_path / "out", "--with-optimizer", *config)
    assert ran.code == 0, ran.err
    ours, theirs = tensors(tmp_path / "out"), tensors(TRAINED / "step3/model_and_optim")
    hub = "model.layers.0.mlp.up_proj.weight"
    for state in ("exp_avg", "exp_avg_sq", "step"):
        assert ours[f"optim.state.{hub}.{state}"].equal(theirs[f"optim.state.blocks.0.feed_forward.w3.weight.{state}"])
    words = ("hf2fsdp", tmp_path / "out", tmp_path / "own", "--names", "olmo-core", "--with-optimizer")
    refused(convert(*words), 2, "--names olmo-core is for weights alone")


def test_its_own_config_is_none_of_hugging_face(convert, tmp_path):
    for place in (TRAINED / "step3", TRAINED / "step3/model_and_optim"):
        refused(convert("fsdp2hf", place, tmp_path / "out"), 3, "config.json is OLMo-core's", "add --config BASE")
        ran = convert("inspect", place)
        assert (ran.code, "containers   model 14, optim 42" in ran.out) == (0, True), ran.out


def test_a_family_without_a_table_is_refused(model, convert, tmp_path):
    ran = convert("fsdp2hf", TRAINED / "step3", tmp_path / "out", "--config", model("llama"))
    refused(ran, 4, "a name of olmo-core, whose llama has no table", "olmo2, olmo3")
    ran = convert("hf2fsdp", model("llama"), tmp_path / "out", "--names", "olmo-core")
    refused(ran, 4, "whose llama has no table")
