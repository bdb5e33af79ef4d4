"""What a user is told who names what is not there: another command, another program's files, a folder too high."""

from __future__ import annotations

import pytest

from converters.cli import NAMES, cli, meant
from train.cli import cli as train

OTHERS = {
    "dcp2hf": "fsdp2hf",
    "deepspeed-to-megatron": "hf2megatron",
    "gpt-neox_to_hf": "neox2hf",
    "mcore2mcore": "reshard",
    "fsdp2universal": "zero2universal",
}


def test_two_formats_are_a_command(convert):
    pairs = [(one, other) for one in NAMES for other in NAMES if (one, other) != ("hf", "zero")]
    assert {meant(f"{one}2{other}") for one, other in pairs} <= cli.commands.keys()
    assert {name: meant(name) for name in OTHERS} == OTHERS
    ran = convert("zero2megatron", "a", "b")
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "hint: convert hf2megatron SRC OUT, which reads any format")
    assert "No such command 'hf2zero'" in convert("hf2zero", "a", "b").err
    assert "Did you mean 'inspect'" in convert("inspekt", "a").err


@pytest.mark.parametrize("group", [cli, train], ids=["convert", "train"])
def test_no_line_of_help_is_cut_off(group):
    assert not [name for name, one in group.commands.items() if one.get_short_help_str(120).endswith("...")]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "a PEFT adapter"),
        (["config.json", "lit_model.pth"], "a model of LitGPT"),
        (["params.json", "consolidated.00.pth"], "own files"),
        (["checkpoint_metadata.json", "model"], "nanotron"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_files_of_programs_that_export_themselves(convert, tmp_path, names, told):
    for name in names:
        (tmp_path / name).write_text("{}")
    ran = convert("inspect", tmp_path)
    assert ran.code == 4
    assert told in ran.err
    assert "hint: " in ran.err


def test_a_checkpoint_further_down(model, convert, tmp_path):
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    (cache / "snapshots/0123abcd").symlink_to(model("llama"))
    for folder, place in ((cache, cache / "snapshots/0123abcd"), (cache / "snapshots", cache / "snapshots/0123abcd")):
        ran = convert("inspect", folder)
        assert (ran.code, ran.err.splitlines()[-1]) == (3, f"hint: name one: {place}")


def test_of_a_run_the_newest_checkpoint_is_named(model, convert, tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / name).symlink_to(model("llama"))
    assert convert("inspect", tmp_path).err.splitlines()[-1] == f"hint: name one: {tmp_path / 'checkpoint-10'}"


def test_a_name_of_the_hub_is_no_folder(convert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = "hf download org/name --local-dir FOLDER"
    assert asked in convert("hf2megatron", "org/name", "out").err
    assert asked in convert("inspect", "out", "--config", "org/name").err
    assert asked not in convert("inspect", tmp_path / "gone").err
