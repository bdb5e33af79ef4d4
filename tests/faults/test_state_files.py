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
