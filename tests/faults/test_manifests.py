"""A source is compared with its manifest whatever becomes of its values; what is not compared is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats.checkpoint import MANIFEST
from formats.disk.safetensors import read_safetensors
from tests.faults.dcp_tools import refused, save
from tests.faults.test_fsdp_optim_faults import training

NORM = "model.norm.weight"


def flip(folder: Path, key: str = NORM, at: int = 0) -> None:
    """Change the lowest bit of an element of a tensor; a negative one counts from the end."""
    (path,) = (path for path in folder.rglob("*.safetensors") if key in read_safetensors(path)[0])
    fragment = read_safetensors(path)[0][key]
    content, count = bytearray(path.read_bytes()), prod(fragment.shape)
    content[fragment.offset + at % count * (fragment.nbytes // count)] ^= 1
    path.write_bytes(content)


@pytest.fixture
def written(model: Callable[..., Path], convert: Any, tmp_path: Path) -> Callable[..., Path]:
    """A folder that a conversion wrote, of a model by name."""

    def get(name: str = "llama", *options: object, **changes: Any) -> Path:
        out = tmp_path / f"of_{name}"
        assert convert("hf2hf", model(name, **changes), out, *options).code == 0
        return out

    return get


CHANGING = [
    ["hf2hf", "--dtype", "bf16"],
    ["hf2hf", "--dtype", "fp16", "--memory", "256KiB"],
    ["hf2megatron", "--tp", 2, "--dtype", "bf16"],
    ["hf2fsdp", "--ranks", 3, "--dtype", "bf16"],
]


@pytest.mark.parametrize("command", CHANGING, ids=lambda command: " ".join(map(str, command)))
@pytest.mark.parametrize(("key", "at"), [(NORM, -1), ("model.embed_tokens.weight", 0), ("lm_head.weight", -1)])
def test_values_that_are_changed_on_the_way(written, convert, tmp_path, command, key, at):
    source = written()
    assert convert(command[0], source, tmp_path / "right", *command[1:]).code == 0
    flip(source, key, at)
    ran = convert(command[0], source, tmp_path / "out", *command[1:])
    refused(ran, 6, f"{key} differs from the vitruvian.json", "model.safetensors")
    assert not (tmp_path / "out").exists()


def test_norms_that_are_stored_minus_one(written, convert, tmp_path):
    """From Megatron and back, one of which has the weights of norms around zero."""
    source, run = written("qwen3_next"), tmp_path / "run"
    assert convert("hf2megatron", source, run, "--format", "torch_dist").code == 0
    for options in ([], ["--dtype", "bf16"]):
        assert convert("megatron2hf", run, tmp_path / f"hf{len(options)}", *options).code == 0
        assert convert("hf2megatron", source, tmp_path / f"run{len(options)}", *options).code == 0
    flip(source)
    refused(convert("hf2megatron", source, tmp_path / "out", "--dtype", "bf16"), 6, f"{NORM} differs")


@pytest.mark.parametrize("damaged", [0, 1])
def test_one_of_an_average(written, convert, model, tmp_path, damaged):
    sources = [written(), written("llama-tied", tie_word_embeddings=False)]
    assert convert("average", *sources, tmp_path / "right").code == 0
    flip(sources[damaged])
    ran = convert("average", *sources, tmp_path / "out")
    refused(ran, 6, f"{NORM} differs from the vitruvian.json", str(sources[damaged]))


@pytest.mark.parametrize("command", [["hf2hf", "--verbatim"], ["hf2hf", "--quantize", "fp8-block"]], ids=" ".join)
def test_tensors_with_other_names_are_not_compared(written, convert, tmp_path, command):
    """And one that has its own names is quantized (it was refused as of another model)."""
    source, out = written("llama", hidden_size=128, intermediate_size=128), tmp_path / "out"
    ran = convert(command[0], source, out, *command[1:])
    assert ran.code == 0, ran.err
    assert f"`convert verify {source}` does" in ran.err
    assert convert("verify", out).code == 0
    ran = convert("hf2fsdp", out, tmp_path / "again")
    assert (ran.code, f"`convert verify {out}` does" in ran.err) == (0, True), ran.err


def test_a_tokenizer_that_is_not_what_the_manifest_says(written, convert, tmp_path):
    source = written()
    assert "vitruvian.json" not in convert("hf2fsdp", source, tmp_path / "right").err
    path = source / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7}))
    for command in (["hf2fsdp"], ["hf2megatron"], ["hf2hf", "--dtype", "bf16"]):
        ran = convert(command[0], source, tmp_path / command[0], *command[1:])
        assert (ran.code, f"generation_config.json of {source}: not what" in ran.err) == (0, True), ran.err
    assert convert("assets", source, "--from", source).code == 0
    assert "not what" not in convert("hf2fsdp", source, tmp_path / "meant").err


@pytest.mark.parametrize(
    ("name", "carried"), [("tool_use.jinja", True), ("added_tokens.json", True), ("more.safetensors", False)]
)
def test_a_file_that_programs_would_read_and_no_manifest_names(written, convert, tmp_path, name, carried):
    source = written()
    ran = convert("verify", source)
    assert (ran.code, ran.err) == (0, "")
    (source / name).write_bytes((source / "model.safetensors").read_bytes() if name[-1] == "s" else b"{}")
    ran = convert("verify", source)
    assert (ran.code, f"note: {name} of {source}: not in vitruvian.json" in ran.err) == (
        0,
        True,
    )
    ran = convert("hf2fsdp", source, tmp_path / "out")
    assert (ran.code, f"{name} of {source}: not what" in ran.err) == (0, carried), ran.err


def test_a_file_beside_a_megatron_run_that_programs_would_read(model, convert, tmp_path):
    assert convert("hf2megatron", model("llama"), tmp_path / "run", "--tp", "2").code == 0
    ran = convert("verify", tmp_path / "run")
    assert (ran.code, ran.err) == (0, "")
    (tmp_path / "run/huggingface/tool_use.jinja").write_text("{}")
    ran = convert("verify", tmp_path / "run")
    assert (ran.code, "tool_use.jinja of" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("command", ["hf2megatron", "hf2neox", "hf2nanotron", "hf2fsdp"])
def test_a_file_of_a_run_that_is_lost(model, convert, tmp_path, command, name):
    run = tmp_path / "run"
    assert convert(command, model("llama"), run).code == 0
    (path,) = run.rglob(name)
    path.unlink()
    refused(convert("verify", run, "--config", model("llama")), 6, name)


@pytest.mark.parametrize("command", ["hf2megatron", "hf2neox"])
def test_weights_that_were_copied_without_the_run_around_them(model, convert, tmp_path, command):
    run = tmp_path / "run"
    assert convert(command, model("llama"), run).code == 0
    shutil.rmtree(run / "huggingface")
    ran = convert("verify", run, "--config", model("llama"))
    (manifest,) = run.rglob(MANIFEST)
    note = f"{manifest.parent} is without the run around it: not compared is ../huggingface/"
    assert (ran.code, note in ran.err) == (0, True), ran.err


def test_what_was_written_beside_the_weights_and_is_lost(model, convert, tmp_path):
    """nanotron loads no checkpoint without it, and its step is compared with that of the optimizer."""
    assert convert("hf2nanotron", model("llama"), tmp_path / "out").code == 0
    (tmp_path / "out/checkpoint_metadata.json").unlink()
    refused(convert("verify", tmp_path / "out"), 6, "checkpoint_metadata.json")


def test_weights_that_were_rounded_from_others(model, convert, tmp_path):
    """FP32 master weights, which are averaged in place of the weights, are recorded under names of their own."""
    source, saved = training(model("llama", num_hidden_layers=1))
    for about in saved["optim"]["state"].values():
        about["step"] = 3.0
    run, out = save(tmp_path / "dcp", saved), [tmp_path / name for name in ("one", "two")]
    for folder in out:
        ran = convert("hf2megatron", run, folder, "--config", source, "--with-optimizer", "--dtype", "bf16")
        assert ran.code == 0, ran.err
    assert convert("average", *out, tmp_path / "right").code == 0
    (manifest,) = out[1].rglob("vitruvian.json")
    document = json.loads(manifest.read_text())
    document["optimizer"]["fp32.final_norm"]["blake3"] = "0" * 64
    manifest.write_text(json.dumps(document))
    refused(
        convert("average", *out, tmp_path / "out"), 6, "decoder.final_layernorm.weight differs from the vitruvian.json"
    )


@pytest.mark.parametrize(("there", "back"), [("hf2neox", "neox2hf"), ("hf2megatron", "megatron2hf")])
def test_rows_that_the_user_leaves_out(model, convert, tmp_path, there, back):
    """Rows of tokens that the manifest has: they are no damage, and all else is compared."""
    run, less = tmp_path / "run", ("--set", "vocab=94")
    assert convert(there, model("llama-mha"), run).code == 0
    refused(convert(back, run, tmp_path / "no", "--vocab-size", 94), 5, "211", "--vocab-size 94")
    ran = convert(back, run, tmp_path / "out", *less)
    assert ran.code == 0, ran.err
    (manifest,) = run.rglob("vitruvian.json")
    assert f"what has a row for each token is not compared with {manifest.name} of {run}" in ran.err
    document = json.loads(manifest.read_text())
    name = next(name for name in document["tensors"] if name.startswith("input_norm"))
    document["tensors"][name]["blake3"] = "0" * 64
    lines = "".join(f"{key} {document['tensors'][key]['blake3']}\n" for key in sorted(document["tensors"]))
    manifest.write_text(json.dumps({**document, "digest": blake3(lines.encode()).hexdigest()}))
    refused(convert(back, run, tmp_path / "damaged", *less), 6, "is damaged: 1 tensor differs from its vitruvian.json")


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_keys_that_a_former_release_did_not_record(written, convert, tmp_path, name):
    """They are not compared; those that it recorded are."""
    source = written(name)
    manifest, config = json.loads((source / MANIFEST).read_text()), source / "config.json"
    recorded = json.loads((source / MANIFEST).read_text())
    del recorded["settings"]["own"]["time_step_limit"]
    (source / MANIFEST).write_text(json.dumps(recorded))
    assert convert("verify", source).code == 0
    assert convert("hf2fsdp", source, tmp_path / "run").code == 0
    (source / MANIFEST).write_text(json.dumps(manifest))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"time_step_limit": [0.1, 0.2]}))
    for argv in (["verify", source], ["hf2fsdp", source, tmp_path / "other"]):
        refused(convert(*argv), 6, "own.time_step_limit: [0.1, 0.2] | a list")
