"""Weights of any checkpoint into models of transformers, as from_pretrained has them: whole, meta, sharded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import vitruvian
import vitruvian.torch

SCRIPT = Path(__file__).with_name("sharded_model.py")


def made(source: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A model with random weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "gpt2", "gpt_neox", "gpt_oss"])
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_a_model_computes_what_from_pretrained_computes(model, tmp_path, name, meta):
    source = model(name, "bfloat16")
    vitruvian.convert(source, tmp_path / "fsdp", to="fsdp", ranks=2)
    if meta:
        with init_empty_weights(include_buffers=False):
            filled = made(source)
    else:
        filled = made(source)
    loaded = vitruvian.torch.load(filled, tmp_path / "fsdp")
    assert (loaded.missing, loaded.unexpected) == ((), ())
    judge = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        assert torch.equal(filled.eval()(tokens).logits, judge.eval()(tokens).logits)
    if name == "llama-tied":
        assert filled.lm_head.weight is filled.model.embed_tokens.weight


def test_what_does_not_fit_is_refused_before_anything_is_filled(model):
    source, other = model("llama", "bfloat16"), made(model("qwen2-tied", "bfloat16"))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(vitruvian.RefusedError, match="differ in names: the checkpoint lacks") as error:
        vitruvian.torch.load(other, source)
    assert "strict=False" in error.value.hint
    with pytest.raises(vitruvian.RefusedError, match=r"BF16 in the checkpoint, torch\.float16 in the model"):
        vitruvian.torch.load(made(source, torch.float16), source)
    wider = AutoConfig.from_pretrained(source, intermediate_size=48)
    with pytest.raises(vitruvian.RefusedError, match=r"in the checkpoint, \[48, "):
        vitruvian.torch.load(AutoModelForCausalLM.from_config(wider, dtype=torch.bfloat16), source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_rounding_and_missing_names_are_asked_for(model):
    source, wide = model("llama", "bfloat16"), made(model("llama", "float32"), torch.float32)
    vitruvian.torch.load(wide, source)  # every number of bfloat16 is one of float32
    judge = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert all(torch.equal(tensor, judge.state_dict()[name]) for name, tensor in wide.state_dict().items())
    narrow = made(source)
    with pytest.raises(vitruvian.RefusedError, match=r"F32 in the checkpoint, torch\.bfloat16 in the model"):
        vitruvian.torch.load(narrow, model("llama", "float32"))
    vitruvian.torch.load(narrow, model("llama", "float32"), cast=True)
    judge = AutoModelForCausalLM.from_pretrained(model("llama", "float32"), dtype=torch.bfloat16)
    assert all(torch.equal(tensor, judge.state_dict()[name]) for name, tensor in narrow.state_dict().items())
    grown = made(source)
    grown.extra = torch.nn.Linear(2, 2, bias=False)
    loaded = vitruvian.torch.load(grown, source, strict=False)
    assert loaded.missing == ("extra.weight",)
    assert loaded.unexpected == ()


def test_numbers_that_a_type_does_not_have_are_refused(model, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(model("llama", "float32"), source)
    held = load_file(source / "model.safetensors")
    held["model.norm.weight"][3] = 1e30
    save_file(held, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(vitruvian.RefusedError, match=r"model\.norm\.weight holds numbers that are too large"):
        vitruvian.torch.load(made(source, torch.float16), source, cast=True)


def test_wrapped_models_are_refused_with_a_way(model):
    source = model("llama", "bfloat16")
    wrapped = torch.nn.Module()
    wrapped.module = made(source)
    for strict in (True, False):
        with pytest.raises(vitruvian.RefusedError, match="differ in names") as error:
            vitruvian.torch.load(wrapped, source, strict=strict)
        assert error.value.hint == "the model is wrapped: load model.module"
    tied = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(source, tie_word_embeddings=True), dtype=torch.bfloat16
    )
    with pytest.raises(vitruvian.RefusedError, match="one tensor in the model, and several in the checkpoint"):
        vitruvian.torch.load(tied, source)


def test_an_open_checkpoint_takes_no_options_of_opening(model):
    checkpoint = vitruvian.open(model("llama", "bfloat16"))
    for options, words in (({"vocab_size": 7}, "is for opening"), ({"confg": 7}, "there is no option confg")):
        with pytest.raises(vitruvian.UsageError, match=words):
            next(vitruvian.torch.iterate(checkpoint, **options))
        with pytest.raises(vitruvian.UsageError, match=words):
            vitruvian.torch.load(made(checkpoint.path), checkpoint, **options)


def test_tensors_one_by_one(model, tmp_path):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, tmp_path / "run", to="megatron", tp=2, pp=2)
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    found = dict(vitruvian.torch.iterate(tmp_path / "run", prefetch=3, device="cpu"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    checkpoint = vitruvian.open(tmp_path / "run")
    assert {name for name, _ in vitruvian.torch.iterate(checkpoint, to="fsdp")} == found.keys()
    shard = dict(vitruvian.torch.iterate(checkpoint, to="megatron", tp=(1, 2)))
    assert shard["output_layer.weight"].shape[0] == 128


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_sharded_models_read_their_own_rows(model, tmp_path):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, tmp_path / "run", to="megatron", tp=2, pp=2)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    ran = subprocess.run(
        [*words, str(source), str(tmp_path / "run")], capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("done") == 2
