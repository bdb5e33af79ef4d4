"""`vitruvian.average`, `merge` and `peft2megatron`: what the commands do, to any target, with typed results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import vitruvian
from tests.models import files

GOLDEN = Path(__file__).parents[1] / "golden/peft/rslora_patterns"
BRIDGE = Path(__file__).parents[1] / "golden/bridge"


@pytest.fixture
def run(model, tmp_path) -> Path:
    """A run with two checkpoints."""
    for number, factor in enumerate((1, -3)):
        folder = tmp_path / f"run/checkpoint-{number + 1}"
        shutil.copytree(model("llama"), folder)
        tensors = {name: tensor * factor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tmp_path / "run"


def test_the_same_mean_by_every_spelling(run, convert, tmp_path):
    first, second = run / "checkpoint-1", str(run / "checkpoint-2")
    assert convert("average", first, second, tmp_path / "command", "--weights", "0.25,0.75").code == 0
    digests = {vitruvian.digest(tmp_path / "command").digest}
    for number, (checkpoints, options) in enumerate(
        (({first: 0.25, second: 0.75}, {}), (run, {"last": 2, "ema": 0.25}))
    ):
        done = vitruvian.average(checkpoints, tmp_path / f"out{number}", **options)
        digests.add(done.digest)
        assert done.verified
    assert len(digests) == 1
    done = vitruvian.average({first: 0.25, second: 0.75}, tmp_path / "megatron", to="megatron", tp=2)
    assert {done.digest} == digests
    assert vitruvian.open(tmp_path / "megatron").topology == {"tp": 2, "pp": 1}
    assert vitruvian.average([first, second], tmp_path / "plain").digest not in digests


def test_merged_into_shards(tmp_path, convert):
    assert convert("merge", GOLDEN / "base", GOLDEN / "adapter", tmp_path / "command").code == 0
    digest = vitruvian.digest(tmp_path / "command").digest
    done = vitruvian.merge(GOLDEN / "base", GOLDEN / "adapter", tmp_path / "out", to="megatron", tp=2, pp=2)
    assert done.digest == digest
    assert vitruvian.merge(tmp_path / "out", GOLDEN / "adapter", tmp_path / "twice").digest != digest


@pytest.mark.parametrize(("name", "lora"), [("lora_tp2", "fused"), ("canonical_lora_tp2", "canonical")])
def test_an_adapter_for_bridge_and_back(convert, tmp_path, name, lora):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    vitruvian.convert(BRIDGE / "llama3_tied", base)
    vitruvian.convert(BRIDGE / name, adapter, adapter="only")
    done = vitruvian.peft2megatron(base, adapter, tmp_path / "out", lora=lora, tp=2, iteration=7)
    options = ("--lora", lora, "--tp", 2, "--iteration", 7)
    assert convert("peft2megatron", base, adapter, tmp_path / "command", *options).code == 0
    assert files(tmp_path / "out") == files(tmp_path / "command")
    assert done.verified
    assert done.tensors
    vitruvian.convert(tmp_path / "out", tmp_path / "back", adapter="only")
    assert files(tmp_path / "back") == files(adapter)


def test_what_is_refused(run, tmp_path):
    with pytest.raises(vitruvian.UsageError, match=r"0\.9 in all"):
        vitruvian.average({run / "checkpoint-1": 0.4, run / "checkpoint-2": 0.5}, tmp_path / "out")
    with pytest.raises(vitruvian.UsageError, match="there is no option weights"):
        vitruvian.average([run / "checkpoint-1", run / "checkpoint-2"], tmp_path / "out", weights="module")
    with pytest.raises(vitruvian.UsageError, match="1 checkpoint has no mean"):
        vitruvian.average(run / "checkpoint-1", tmp_path / "out")
    two = [run / "checkpoint-1", run / "checkpoint-2"]
    with pytest.raises(vitruvian.UsageError, match="ema = 'x' is not a number"):
        vitruvian.average(two, tmp_path / "out", ema="x")
    with pytest.raises(vitruvian.UsageError, match="last = 'x' is not a whole number"):
        vitruvian.average(run, tmp_path / "out", last="x")
    with pytest.raises(vitruvian.UsageError, match="the weight 'x' is not a number"):
        vitruvian.average({two[0]: "x", two[1]: 0.5}, tmp_path / "out")
    with pytest.raises(vitruvian.UsageError, match=r"the weight an integer of \d+ bits is not a number"):
        vitruvian.average({two[0]: 10**400, two[1]: 1 - 10**400}, tmp_path / "out")
    with pytest.raises(vitruvian.UsageError, match=r"ema = an integer of \d+ bits is not a number"):
        vitruvian.average(two, tmp_path / "out", ema=10**400)
    with pytest.raises(vitruvian.UsageError, match="weights are inf in all"):
        vitruvian.average({two[0]: 1e308, two[1]: 1e308}, tmp_path / "out")
    with pytest.raises(vitruvian.UsageError, match="checkpoints = a dict, and with last it is the folder of one run"):
        vitruvian.average({two[0]: 0.5, two[1]: 0.5}, tmp_path / "out", last=2)
    with pytest.raises(vitruvian.UsageError, match="ema says every weight, and so does a dict") as error:
        vitruvian.average({two[0]: 0.5, two[1]: 0.5}, tmp_path / "out", ema=0.9)
    assert "in a list" in error.value.hint
    with pytest.raises(vitruvian.UsageError, match="there is no target"):
        vitruvian.average(two, tmp_path / "out", to=["x"])
    with pytest.raises(vitruvian.UsageError, match="is no path"):
        vitruvian.merge(None, GOLDEN / "adapter", tmp_path / "out")
    with pytest.raises(vitruvian.SourceError, match="no adapter_config"):
        vitruvian.merge(GOLDEN / "base", GOLDEN, tmp_path / "out")
    for option in ({"pp": 2}, {"weights": "module"}, {"adapter": "only"}):
        with pytest.raises(vitruvian.UsageError, match=f"there is no option {next(iter(option))}"):
            vitruvian.peft2megatron(GOLDEN / "base", GOLDEN / "adapter", tmp_path / "out", **option)
    with pytest.raises(vitruvian.UsageError, match="is not one of canonical, fused"):
        vitruvian.peft2megatron(GOLDEN / "base", GOLDEN / "adapter", tmp_path / "out", lora="dora")
    with pytest.raises(vitruvian.UnsupportedError, match="ranks and scales"):
        vitruvian.peft2megatron(GOLDEN / "base", GOLDEN / "adapter", tmp_path / "out")
