"""What `fsdp2hf` does around a conversion: several checkpoints, another converter's flags, what is checked before."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from tests.models import files


@pytest.fixture
def run_folder(model, convert, tmp_path):
    """A training's folder with two checkpoints, and its model's config beside them."""
    folder = tmp_path / "run"
    for step in (7, 100):
        assert convert("hf2fsdp", model("llama"), folder / f"checkpoint-{step}" / "pytorch_model_fsdp_0").code == 0
    return folder


def test_a_second_run_goes_on_and_does_not_hide_other_options(run_folder, model, convert, tmp_path):
    argv = ["fsdp2hf", run_folder, tmp_path / "out"]
    assert convert(*argv).code == 0
    assert files(tmp_path / "out/checkpoint-7") == files(model("llama"))
    before = (tmp_path / "out/checkpoint-7/model.safetensors").stat().st_mtime_ns
    again = convert(*argv)
    assert again.code == 0
    assert again.err.count("is there already") == 2
    other = convert(*argv, "--dtype", "bf16")
    assert other.code == 7
    assert "checkpoint-100 exists" in other.err
    assert (tmp_path / "out/checkpoint-7/model.safetensors").stat().st_mtime_ns == before
    assert convert(*argv, "--dtype", "bf16", "--force").code == 0
    assert json.loads((tmp_path / "out/checkpoint-7/config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_that_was_trained_anew_is_not_taken_for_the_one_of_before(run_folder, model, convert, tmp_path):
    """Names, settings and small files of the checkpoint are what they were."""
    argv = ["fsdp2hf", run_folder, tmp_path / "out", "--dtype", "bf16"]
    assert convert(*argv).code == 0
    assert convert(*argv).err.count("is there already") == 2
    anew = shutil.copytree(model("llama"), tmp_path / "anew")
    weights = load_file(anew / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, anew / "model.safetensors")
    assert convert("hf2fsdp", anew, run_folder / "checkpoint-100/pytorch_model_fsdp_0", "--force").code == 0
    refused = convert(*argv)
    assert (refused.code, "checkpoint-100 exists" in refused.err) == (7, True)
    assert convert(*argv, "--force").code == 0
    assert convert(*argv).err.count("is there already") == 2


def test_what_is_not_what_would_be_written_is_not_there_already(run_folder, model, convert, tmp_path):
    """A file that lost its bytes, and a tokenizer that is another one now."""
    config = shutil.copytree(model("llama"), tmp_path / "config")
    argv = ["fsdp2hf", run_folder, tmp_path / "out", "--config", config]
    assert convert(*argv).code == 0
    weights, refused = tmp_path / "out/checkpoint-100/model.safetensors", (7, "error: ")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert (convert(*argv).code, convert(*argv).err[:7]) == refused
    assert convert(*argv, "--force").code == 0
    assert convert(*argv).err.count("is there already") == 2
    weights.unlink()
    assert (convert(*argv).code, convert(*argv).err[:7]) == refused
    shutil.rmtree(tmp_path / "out/checkpoint-100")
    assert convert(*argv).err.count("is there already") == 1
    (config / "tool_use.jinja").write_text("{{ messages }}")
    assert (convert(*argv).code, convert(*argv).err[:7]) == refused


@pytest.mark.parametrize("flag", ["--hf_model_path_or_name", "--HF_model_path_or_name"])
def test_the_flags_and_the_default_of_controlllm(run_folder, model, convert, flag):
    source = run_folder / "checkpoint-7"
    assert convert("fsdp2hf", "--fsdp_checkpoint_path", source, flag, model("llama")).code == 0
    assert files(run_folder / "hf/checkpoint-7") == files(model("llama"))


def test_two_folders_are_needed(convert):
    refused = convert("fsdp2hf")
    assert refused.code == 2
    assert "hint: convert fsdp2hf CHECKPOINT OUT --config BASE" in refused.err


def test_a_push_is_checked_before_the_conversion(run_folder, convert, tmp_path):
    source, out = run_folder / "checkpoint-7", tmp_path / "out"
    assert convert("fsdp2hf", source, out, "--push", "no-owner").code == 2
    assert convert("fsdp2hf", run_folder, out, "--push", "acme/m").code == 2
    planned = convert("fsdp2hf", source, out, "--push", "acme/m", "-n")
    assert planned.code == 0
    assert planned.out.endswith(f"then   push {out} to acme/m\n")
    assert not out.exists()


def test_a_part_pushes_nothing(run_folder, convert, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    argv = ["fsdp2hf", run_folder / "checkpoint-7", tmp_path / "out", "--push", "acme/m"]
    assert convert(*argv, "--part", "1/2").code == 0
    assert not (tmp_path / "out").exists()


def test_either_side_may_lack_a_config(run_folder, model, convert, tmp_path):
    """A DCP folder without a config is compared with the Hugging Face folder that has one."""
    bare = tmp_path / "bare"
    shutil.copytree(run_folder / "checkpoint-7/pytorch_model_fsdp_0", bare)
    (bare / "config.json").unlink()
    assert convert("verify", model("llama"), bare).code == 0
    assert convert("diff", bare, model("llama")).code == 0
    assert convert("diff", bare, model("llama"), "--config", model("llama")).code == 0


def test_a_class_of_the_wrapper_loses_its_prefix_and_nothing_else(run_folder, model, convert, tmp_path):
    """Stripping the letters F, S, D and P would make ersimmonForCausalLM of PersimmonForCausalLM."""
    base = tmp_path / "base"
    shutil.copytree(model("llama"), base)
    for architecture in ("LlamaForCausalLM", "PersimmonForCausalLM"):
        config = json.loads((base / "config.json").read_text()) | {"architectures": [f"FSDP{architecture}"]}
        (base / "config.json").write_text(json.dumps(config))
        ran = convert("fsdp2hf", run_folder / "checkpoint-7", tmp_path / architecture, "--config", base)
        if architecture == "LlamaForCausalLM":
            assert ran.code == 0, ran.err
            assert json.loads((tmp_path / architecture / "config.json").read_text())["architectures"] == [architecture]
        else:
            assert (ran.code, f" {architecture}, a class of persimmon" in ran.err) == (3, True), ran.err
