"""Tied models of which the files hold the name of the head alone, as safetensors' `save_model` writes them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from tests.fuzz.architectures import build, quiet
from tests.models import files

NAMES = ["llama-tied", "qwen2-tied", "gpt2", "falcon", "lfm2", "bloom"]
TIED = {"tie_word_embeddings": True}
UNTABLED = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_attention_heads": 4},
    "stablelm": {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, **TIED},
}
"""Model types without a table, and settings of small ones."""
TOKENS = torch.arange(3, 35)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def saved(model, folder):
    """A folder with the weights of a tied model as `save_model` names them, which transformers reads as it was."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    save_model(model, str(folder / "model.safetensors"), {"format": "pt"})
    names = load_file(folder / "model.safetensors").keys()
    assert "lm_head.weight" in names
    assert not any("embed_tokens" in name or "wte" in name or "word_embeddings.weight" in name for name in names)
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.equal(logits(again), logits(model))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_head_is_the_embedding(model, convert, tmp_path, name):
    folder = saved(loaded(model(name)), tmp_path / "hf")
    ran = convert("hf2hf", folder, tmp_path / "out")
    assert ran.code == 0
    assert ran.err.count("which the config ties to it") == 1
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(model(name))))
    ran = convert("hf2fsdp", folder, tmp_path / "fsdp", "--ranks", 2)
    assert ran.code == 0
    tied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    dcp.load({"model": tied.state_dict()}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    assert torch.equal(logits(tied), logits(loaded(model(name))))
    assert convert("diff", folder, tmp_path / "fsdp").code == 0


@pytest.mark.parametrize("framework", ["megatron", "neox", "nanotron"])
def test_in_the_names_of_other_frameworks(model, convert, tmp_path, framework):
    there, back = f"hf2{framework}", f"{framework}2hf"
    folder = saved(loaded(model("llama-tied")), tmp_path / "hf")
    shutil.copytree(model("llama-tied"), folder, dirs_exist_ok=True, ignore=lambda *_: ["model.safetensors"])
    assert convert(there, folder, tmp_path / "run").code == 0
    assert convert(there, model("llama-tied"), tmp_path / "same").code == 0
    assert convert("diff", tmp_path / "run", tmp_path / "same").code == 0
    assert convert(back, tmp_path / "run", tmp_path / "out").code == 0
    assert files(tmp_path / "out") == files(model("llama-tied"))


@pytest.mark.parametrize("kind", UNTABLED)
def test_the_head_is_the_embedding_in_memory_without_a_table(convert, tmp_path, kind):
    """Its files keep their names; in memory a tensor has the name of the embedding and that of the head."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **UNTABLED[kind]))
    folder = tmp_path / "hf"
    made.eval().save_pretrained(folder)
    save_model(made, str(folder / "model.safetensors"), {"format": "pt"})
    assert convert("hf2fsdp", folder, tmp_path / "fsdp").code == 0
    tied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    dcp.load({"model": tied.state_dict()}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    assert torch.equal(logits(tied), logits(made))
    assert convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "out", "--config", folder).code == 0
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(made))


@pytest.mark.parametrize("kind", ["opt", "gpt_neo", "cohere"])
def test_a_config_that_leaves_out_that_its_class_ties(convert, tmp_path, kind):
    """As on the Hub: the head of the training is a copy, and the folder without it is read as tied, as its plan is."""
    folder, base, out = tmp_path / "hf", tmp_path / "base", tmp_path / "out"
    with quiet():
        made = build(kind, 1)
        made.save_pretrained(folder)
    base.mkdir()
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("tie_word_embeddings") is True
    (base / "config.json").write_text(json.dumps(config))
    state = made.state_dict()
    assert "lm_head.weight" in state
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    ran = convert("fsdp2hf", tmp_path / "run", out, "--config", base)
    assert ran.code == 0, ran.err
    assert load_file(out / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert torch.equal(logits(loaded(out)), logits(made))
    changed = state | {"lm_head.weight": state["lm_head.weight"] + 1}
    dcp.save(changed, checkpoint_id=tmp_path / "changed", no_dist=True)
    ran = convert("fsdp2hf", tmp_path / "changed", tmp_path / "no", "--config", base)
    assert (ran.code, "the output head should share" in ran.err) == (6, True), ran.err
    ran = convert("fsdp2hf", tmp_path / "changed", tmp_path / "untied", "--config", base, "--set", "tied=false")
    assert ran.code == 0, ran.err
    with quiet():
        untied = loaded(tmp_path / "untied").state_dict()
    assert all(torch.equal(untied[name], tensor) for name, tensor in changed.items())


@pytest.mark.parametrize("kind", ["llava", "idefics3", "vipllava"])
def test_a_head_beside_the_embedding_that_a_model_of_images_ties(convert, tmp_path, kind):
    """In its files the head has another name than in memory; it has to be the embedding, or is kept by tied=false."""
    folder = tmp_path / "hf"
    with quiet():
        made = build(kind, 1)
        made.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
    head = next((name for name in weights if name.endswith("lm_head.weight")), "lm_head.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **TIED}))
    for differs in (0, 1):
        save_file(weights | {head: weights[embedding] + differs}, folder / "model.safetensors", {"format": "pt"})
        with quiet():
            state = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        ran = convert("hf2fsdp", folder, tmp_path / f"tied{differs}")
        assert ran.code == (6 if differs else 0), ran.err
        assert not differs or f"the output head should share {embedding}" in ran.err
        assert convert("hf2fsdp", folder, tmp_path / f"untied{differs}", "--set", "tied=false").code == 0
        for out in (f"tied{differs}", f"untied{differs}")[differs:]:
            filled = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            dcp.load({"model": filled}, checkpoint_id=tmp_path / out, no_dist=True)
            assert all(torch.equal(filled[name], tensor) for name, tensor in state.items()), out


def test_an_embedding_that_two_stacks_and_the_head_share(convert, tmp_path):
    """M2M100 has it under one name in files and under four in memory, each of which is compared."""
    sizes = {"vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
    more = {
        f"{stack}_{size}": n
        for stack in ("encoder", "decoder")
        for size, n in (("ffn_dim", 48), ("attention_heads", 4))
    }
    with quiet():
        made = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("m2m_100", **sizes, **more))
        made.save_pretrained(tmp_path / "hf")
    state = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
    shared = [name for name, tensor in state.items() if torch.equal(tensor, state["lm_head.weight"])]
    assert len(shared) == 4
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    assert convert("hf2fsdp", tmp_path / "hf", tmp_path / "ours").code == 0
    for folder in ("run", "ours"):
        ran = convert("fsdp2hf", tmp_path / folder, tmp_path / f"of {folder}", "--config", tmp_path / "hf")
        assert ran.code == 0, ran.err
        assert files(tmp_path / f"of {folder}") == files(tmp_path / "hf")
    for name in shared:
        changed = state | {name: state[name] + 1}
        dcp.save(changed, checkpoint_id=tmp_path / name, no_dist=True)
        argv = ("fsdp2hf", tmp_path / name, tmp_path / f"of {name}", "--config", tmp_path / "hf")
        ran = convert(*argv)
        assert ran.code == 6, ran.err
        assert "model.shared.weight" in ran.err
        assert convert(*argv, "--set", "tied=false").code == 0
        with quiet():
            untied = AutoModelForSeq2SeqLM.from_pretrained(argv[2]).state_dict()
        assert all(torch.equal(untied[key], tensor) for key, tensor in changed.items())


def test_a_head_of_its_own_that_the_class_ties(convert, tmp_path):
    """T5 1.1: its config says that the head is not tied, and its class ties all but heads that a file holds."""
    with quiet():
        sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
        made = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, tie_word_embeddings=False))
        made.save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    head = {"lm_head.weight": weights["shared.weight"] + 1}
    save_file(weights | head, tmp_path / "hf/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with quiet():
        state = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").state_dict()
    assert not torch.equal(state["lm_head.weight"], state["shared.weight"])
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    assert convert("hf2fsdp", tmp_path / "hf", tmp_path / "ours").code == 0
    filled = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load({"model": filled}, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert all(torch.equal(filled[name], tensor) for name, tensor in state.items())
    for folder in ("run", "ours"):
        ran = convert("fsdp2hf", tmp_path / folder, tmp_path / f"of {folder}", "--config", tmp_path / "hf")
        assert ran.code == 0, ran.err
        again = load_file(tmp_path / f"of {folder}/model.safetensors")
        assert again.keys() == {*weights, *head}
        assert all(torch.equal(again[name], tensor) for name, tensor in (weights | head).items())
    dcp.save(state | {"shared.weight": state["shared.weight"] + 1}, checkpoint_id=tmp_path / "apart", no_dist=True)
    assert convert("fsdp2hf", tmp_path / "apart", tmp_path / "no", "--config", tmp_path / "hf").code == 6
    (tmp_path / "hf/config.json").write_text(json.dumps(config))  # tied, which scales what the head reads
    argv = ("fsdp2hf", tmp_path / "run", tmp_path / "no", "--config", tmp_path / "hf")
    assert [convert(*argv, *more).code for more in ((), ("--set", "tied=false"))] == [6, 6]


@pytest.mark.parametrize("named", ["neither", "not tied"])
def test_what_is_still_missing(model, convert, tmp_path, named):
    folder = shutil.copytree(model("llama-tied"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    if named == "not tied":
        tensors["lm_head.weight"] = embedding
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ran = convert("hf2hf", folder, tmp_path / "out")
    assert (ran.code, "1 tensor is missing: model.embed_tokens.weight" in ran.err) == (3, True), ran.err
