"""HF to Megatron-LLM, to other topologies and to megatron-core's files, and back: every file byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from formats.disk.safetensors import read_safetensors
from formats.registry import open_checkpoint
from tests.models import files

LLM = ("--format", "megatron-llm")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-mha", "llama-linear", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_comes_back_through_megatron_core(model, convert, tmp_path, name, dtype):
    changes = {
        "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        "mistral": {"head_dim": 8},
    }
    source = model(name.removesuffix("-linear"), dtype, **changes.get(name, {}))
    first, second, third, core, back = (tmp_path / step for step in ("one", "two", "three", "core", "back"))
    assert convert("hf2megatron", source, first, *LLM, "--tp", 4).code == 0
    assert convert("reshard", first, second, "--tp", 2, "--pp", 2).code == 0
    assert convert("reshard", second, third, "--tp", 4).code == 0
    assert files(third) == files(first), "A to B to A is not A"
    assert convert("reshard", third, core, "--tp", 2, "--format", "torch").code == 0
    assert open_checkpoint(core).details.dialect == "megatron-core"
    assert convert("megatron2hf", core, back).code == 0
    assert files(back) == files(source)
    digests = {convert("digest", folder).out.split()[0] for folder in (source, first, second, core)}
    assert len(digests) == 1
    assert convert("verify", first).code == 0
    assert convert("diff", second, source).code == 0
    assert convert("reshard", core, tmp_path / "again", *LLM, "--tp", 4).code == 0
    assert files(tmp_path / "again") == files(first)


def test_the_vocabulary_grows_by_copies_of_the_last_row(model, convert, tmp_path):
    """All rows behind the model's are that one, tokens and padding."""
    source = model("llama")
    ran = convert("hf2megatron", source, tmp_path / "m", *LLM, "--true-vocab-size", 300, "--tp", 2, "-n")
    assert "change last of 211 rows as 89 new rows in 2 tensors" in ran.out
    assert "fill   27136 elements of vocabulary padding with copies of the last row" in ran.out
    assert convert("hf2megatron", source, tmp_path / "m", *LLM, "--true-vocab-size", 300, "--tp", 2).code == 0
    ran = convert("megatron2hf", tmp_path / "m", tmp_path / "hf", "--vocab-size", 512)
    assert ran.code == 6, "rows of padding are no tokens of what was written here"
    (tmp_path / "m/release/vitruvian.json").unlink()
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "hf", "--vocab-size", 512).code == 0
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = {}
        for path in (source, tmp_path / "hf"):
            fragment = read_safetensors(path / "model.safetensors")[0][key]
            rows[path] = np.fromfile(fragment.path, np.float32, 64 * fragment.shape[0], offset=fragment.offset)
        before, after = (row.reshape(-1, 64) for row in rows.values())
        assert (after[:211] == before).all()
        assert (after[211:] == before[-1]).all()
    assert len(after) == 512


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("qwen2", (), "biases everywhere or nowhere"),
        ("qwen3", (), "no norms on query and key"),
        ("llama-tied", (), "an output head of their own"),
        ("llama3", (), "it only knows linear ones, not llama3"),
        ("mistral", (), "turns hidden / heads = 8 elements of a head, and a head of this model has 16"),
        ("llama", ("--tp", 8), "4 key/value groups do not divide over tp = 8"),
        ("llama", ("--true-vocab-size", 200), "has 211 tokens, --true-vocab-size 200 would cut some off"),
    ],
)
def test_what_it_cannot_hold_is_refused(model, convert, tmp_path, name, flags, reason):
    ran = convert("hf2megatron", model(name), tmp_path / "out", *LLM, *flags)
    assert ran.code == 5
    assert reason in ran.err
    assert not (tmp_path / "out").exists()


def test_what_means_nothing_is_refused(model, convert, tmp_path):
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", "--true-vocab-size", 300)
    assert ran.code == 2
    assert "--true-vocab-size has no effect on the format megatron-core" in ran.err
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", *LLM, "--norm", "local")
    assert ran.code == 2
    assert "--norm has no effect on the format megatron-llm" in ran.err
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", *LLM, "--pp", 2, "--vpp", 2)
    assert ran.code == 4
    assert "virtual pipeline chunks" in ran.err


def test_an_output_may_lie_beside_the_iterations_of_a_run(model, convert, tmp_path):
    run = tmp_path / "run"
    assert convert("hf2megatron", model("llama"), run, *LLM, "--iteration", 152).code == 0
    assert convert("megatron2hf", run, run / "hf/model_iter_152", "--iteration", 152).code == 0
    assert files(run / "hf/model_iter_152") == files(model("llama"))
    assert convert("megatron2hf", run, run / "iter_0000152/hf").code == 7


def test_the_tokenizer_lies_where_the_training_looks_for_it(model, convert, tmp_path):
    convert("hf2megatron", model("llama"), tmp_path / "one", *LLM)
    convert("reshard", tmp_path / "one", tmp_path / "two", "--tp", 2)
    for folder in ("one", "two"):
        assert (tmp_path / folder / "tokenizer.model").read_bytes() == (model("llama") / "tokenizer.model").read_bytes()
