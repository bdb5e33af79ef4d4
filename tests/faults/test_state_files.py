"""Small files with the state of a training: those of another training beside the manifest of an output are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused, save
from tests.faults.test_fsdp_optim_faults import training


@pytest.fixture
def runs(model, tmp_path) -> tuple[Path, Path, Path]:
    """A model, and two trainings of it that differ in nothing but a learning rate."""
    source, saved = training(model("llama", num_hidden_layers=1))
    for about in saved["optim"]["state"].values():
        about["step"] = 3.0
    one = save(tmp_path / "one", saved)
    for group in saved["optim"]["param_groups"]:
        group["lr"] = 0.5
    return source, one, save(tmp_path / "two", saved)


def test_files_of_another_training_in_a_universal_checkpoint(runs, convert, tmp_path):
    source, *trainings = runs
    one, two = (tmp_path / f"universal{number}" for number in range(2))
    for training_of, out in zip(trainings, (one, two), strict=True):
        assert convert("zero2universal", training_of, out, "--config", source).code == 0
    (tag,) = (path.name for path in one.glob("global_step*"))
    name = "zero/optimizer_state.pt"
    content = (one / tag / name).read_bytes()
    shutil.copy(two / tag / name, one / tag / name)
    message = f"{name} of {one} is not what vitruvian.json says"
    for command in (["hf2fsdp", "--with-optimizer"], ["zero2universal"], ["hf2mds", "--qkv", "grouped"]):
        options = ["--with-optimizer"] * (command[0] == "hf2mds")
        for dry in ([], ["-n"]):
            ran = convert(command[0], one, tmp_path / "out", *command[1:], *options, *dry)
            refused(ran, 6, message, f"remove {one / tag / 'vitruvian.json'}")
        assert not (tmp_path / "out").exists()
    assert convert("zero2hf", one, tmp_path / "weights").code == 0, "the weights are what they were"
    (one / tag / name).write_bytes(content)
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "note": "of mine"}))
    (one / "chat_template.jinja").write_text("{{ messages }}")
    assert convert("hf2fsdp", one, tmp_path / "right", "--with-optimizer").code == 0, "the user may change these"


def test_a_changed_config_is_recorded_beside_the_state_of_a_training(runs, convert, tmp_path):
    source, training_of, _ = runs
    out = tmp_path / "universal"
    assert convert("zero2universal", training_of, out, "--config", source).code == 0
    manifest = next(out.glob("*/vitruvian.json"))
    before = json.loads(manifest.read_text())
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "note": "of mine"}))
    refused(convert("verify", out), 6, "config.json of", f"convert assets {out} --from {out}")
    assert convert("assets", out, "--from", out).code == 0
    assert convert("verify", out).code == 0
    after = json.loads(manifest.read_text())
    assert before.pop("files") != (files := after.pop("files"))
    assert (before, "zero/optimizer_state.pt" in files) == (after, True)
    state = manifest.parent / "zero/optimizer_state.pt"
    state.write_bytes(state.read_bytes() + b" ")
    assert convert("verify", out).code != 0


def test_files_of_another_training_in_torch_dist(runs, convert, tmp_path):
    """Its `common.pt` has the parameter groups."""
    source, *trainings = runs
    one, two = (tmp_path / f"run{number}" for number in range(2))
    flags = ("--config", source, "--with-optimizer", "--dtype", "bf16", "--format", "torch_dist")
    for training_of, out in zip(trainings, (one, two), strict=True):
        assert convert("hf2megatron", training_of, out, *flags).code == 0
    name = next(two.rglob("common.pt")).relative_to(two)
    shutil.copy(two / name, one / name)
    ran = convert("reshard", one, tmp_path / "out", "--with-optimizer", "--tp", 2)
    refused(ran, 6, f"common.pt of {one} is not what vitruvian.json says", "copy it again")
    assert not (tmp_path / "out").exists()
    (one / name).with_name("vitruvian.json").unlink()
    ran = convert("reshard", one, tmp_path / "out", "--with-optimizer", "--tp", 2)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("command", "options", "on"),
    [
        ("hf2megatron", ["--dtype", "bf16"], "reshard"),
        ("hf2megatron", ["--dtype", "bf16", "--optimizer", "distributed"], "reshard"),
        ("hf2megatron", ["--dtype", "bf16", "--format", "fsdp_dtensor"], "hf2fsdp"),
        ("hf2fsdp", ["--ranks", "2"], "hf2megatron"),
        ("hf2nanotron", ["--dtype", "bf16"], "hf2fsdp"),
    ],
    ids=["classic", "distributed", "fsdp_dtensor", "dcp", "nanotron"],
)
def test_files_of_another_training_that_hold_tensors_too(runs, convert, tmp_path, command, options, on):
    """Only the learning rate in them differs."""
    source, *trainings = runs
    one, two = (tmp_path / f"run{number}" for number in range(2))
    for training_of, out in zip(trainings, (one, two), strict=True):
        ran = convert(command, training_of, out, "--config", source, "--with-optimizer", *options)
        assert ran.code == 0, ran.err
    assert convert("verify", one, "--config", source).code == 0
    there = {path: two / path.relative_to(one) for path in one.rglob("*") if path.suffix in (".pt", ".distcp")}
    (path,) = (path for path, other in there.items() if path.read_bytes() != other.read_bytes())
    shutil.copy(there[path], path)
    ran = convert(on, one, tmp_path / "out", "--config", source, "--with-optimizer")
    refused(ran, 6, f"{path.name} of {one} is not what vitruvian.json says", "copy it again")
    ran = convert("verify", one, "--config", source)
    assert (ran.code, path.name in ran.err) == (6, True), ran.err
    assert not (tmp_path / "out").exists()


def test_buffers_that_a_universal_checkpoint_never_holds(model, convert, tmp_path):
    """It is verified without the biases of DeepSeek-V3's routers, and is not taken for a whole model."""
    source, saved = training(model("deepseek_v3"))
    for key in [key for key in saved["model"] if key.endswith("e_score_correction_bias")]:
        saved["optim"]["state"].pop(key)
        for group in saved["optim"]["param_groups"]:
            group["params"] = [name for name in group["params"] if name != key]
    trained, out = save(tmp_path / "trained", saved), tmp_path / "universal"
    ran = convert("zero2universal", trained, out, "--config", source)
    assert (ran.code, "buffers are not in it" in ran.err) == (0, True), ran.err
    ran = convert("verify", out)
    assert ran.code == 0, ran.err
    shutil.rmtree(next(out.glob("*/zero/model.layers.1.input_layernorm.weight")))
    refused(convert("verify", out), 3, "lacks model.layers.1.input_layernorm.weight")
    for command, options in (("zero2hf", ()), ("hf2fsdp", ("--with-optimizer",)), ("digest", ())):
        places = () if command == "digest" else (tmp_path / "no",)
        refused(convert(command, out, *places, *options), 3, "e_score_correction_bias", "convert the checkpoint that")
