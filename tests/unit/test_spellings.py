"""What people type who come from other programs, or in a hurry: understood, or refused with the way out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models import files


def test_names_of_other_programs_are_understood(model, convert, tmp_path):
    source = model("llama", "float32")
    for tp, pp, dtype, ours in (
        ("--tensor-model-parallel-size", "--pipeline-parallel-size", "bfloat16", "bf16"),
        ("--tp-size", "--pipeline-model-parallel-size", "float16", "fp16"),
        ("--tensor-parallel-size", "--pp-size", "float32", "fp32"),
    ):
        options = [tp, "2", f"{pp}=2", "--dtype", dtype]
        assert convert("hf2megatron", source, tmp_path / dtype, *options).code == 0
        assert convert("hf2megatron", source, tmp_path / ours, "--tp", "2", "--pp", "2", "--dtype", ours).code == 0
        assert files(tmp_path / dtype) == files(tmp_path / ours)
    assert convert("fsdp2hf", source, tmp_path / "out", "--dtype", "float64").code == 2


def test_a_config_may_be_the_file(model, convert, tmp_path):
    source = tmp_path / "fsdp"
    assert convert("hf2fsdp", model("llama"), source).code == 0
    (source / "config.json").rename(tmp_path / "config.json")
    assert convert("fsdp2hf", source, tmp_path / "out", "--config", tmp_path / "config.json").code == 0


@pytest.mark.parametrize(
    ("argv", "code", "message", "hint"),
    [
        (["hf2hf", "HF", "OUT", "--shard-size", "5"], 2, "'5' has no unit, such as 5GB", "hf2hf --help"),
        (["hf2hf", "HF", "OUT.safetensors"], 7, "OUT is a folder, and", "name it"),
        (["hf2megatron", "HF", "OUT", "--tp", "3"], 5, "do not divide over tp = 3", "--tp may be 1, 2, 4, 8"),
        (
            ["hf2megatron", "HF", "OUT", "--pp", "3"],
            5,
            "4 layers do not divide over 3",
            "--pp times --vpp may be 1, 2, 4;",
        ),
        (["hf2megatron", "HF"], 2, "Missing argument 'OUT'", "hf2megatron --help"),
        (["hf2megatron", "HF", "OUT", "--colour", "red"], 2, "No such option", "hf2megatron --help"),
        (["paint"], 2, "No such command 'paint'", "--help"),
    ],
)
def test_an_error_is_a_sentence_and_a_hint(model, convert, tmp_path, argv, code, message, hint):
    places = {"HF": model("llama"), "OUT": tmp_path / "out", "OUT.safetensors": tmp_path / "model.safetensors"}
    ran = convert(*(places.get(word, word) for word in argv))
    error, suggestion = ran.err.strip().splitlines()[-2:]
    assert ran.code == code
    assert error.startswith("error: ")
    assert message in error
    assert suggestion.startswith("hint: ")
    assert hint in suggestion
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_read_are_named(model, convert, tmp_path):
    folder = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    for argv in (("inspect", folder), ("hf2hf", folder, tmp_path / "out")):
        ran = convert(*argv)
        assert "model-00001-of-00002.safetensors in" in ran.out + ran.err
        assert "not read" in ran.out + ran.err
