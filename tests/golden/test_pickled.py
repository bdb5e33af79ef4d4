"""Pickled weights of Hugging Face folders, written by the real huggingface_hub, as accelerate and DeepSpeed call it."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.models import files


@pytest.fixture
def pickled(model, tmp_path):
    """`pickled(name, dtype, size)`: the folder of a tiny model whose weights are pickled, in files of so many bytes."""

    def make(name="llama", dtype="bfloat16", size="5GB"):
        from huggingface_hub import save_torch_state_dict
        from transformers import AutoModelForCausalLM

        folder = shutil.copytree(model(name, dtype), tmp_path / f"{name}-pickled")
        state = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        (folder / "model.safetensors").unlink()
        save_torch_state_dict(state, folder, max_shard_size=size, safe_serialization=False)
        return folder

    return make


@pytest.mark.parametrize(("name", "size"), [("llama", "5GB"), ("llama", "100KB"), ("llama-tied", "100KB")])
def test_the_same_weights(model, pickled, convert, tmp_path, name, size):
    folder = pickled(name, size=size)
    assert (len(list(folder.glob("pytorch_model-*.bin"))) > 1) == (size != "5GB")
    ran = convert("hf2hf", folder, tmp_path / "out")
    assert (ran.code, ran.err) == (0, "")
    assert files(tmp_path / "out") == files(model(name, "bfloat16"))
    assert convert("verify", folder).code == 0  # the checksums inside the files
    assert convert("hf2megatron", folder, tmp_path / "megatron", "--tp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "megatron", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(model(name, "bfloat16"))


def test_what_torch_expanded_is_stored_once(pickled, convert, tmp_path):
    import torch
    from safetensors.torch import load_file

    folder = pickled()
    state = torch.load(folder / "pytorch_model.bin")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        state[name] = state[name][:1].expand(state[name].shape)
    torch.save(state, folder / "pytorch_model.bin")
    assert convert("hf2megatron", folder, tmp_path / "megatron", "--tp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "megatron", tmp_path / "back").code == 0
    back = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(back[name], values) for name, values in state.items() if name in back)


def test_safetensors_beside_them_are_taken_as_transformers_does(model, pickled, convert, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, other = pickled(), model("llama", "bfloat16", vocab_size=212)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(other / name, folder / name)
    assert AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().num_embeddings == 212
    assert convert("hf2hf", folder, tmp_path / "out").code == 0
    assert files(tmp_path / "out")["model.safetensors"] == files(other)["model.safetensors"]


def test_what_is_no_state_dict(pickled, convert):
    import torch

    folder = pickled()
    weights = folder / "pytorch_model.bin"
    torch.save({"state_dict": torch.load(weights), "epoch": 3}, weights)
    ran = convert("inspect", folder)
    assert (ran.code, "holds 'state_dict', which is not a tensor" in ran.err) == (4, True)
    torch.save([torch.ones(2)], weights)
    assert "holds no state dict" in convert("inspect", folder).err
    weights.write_bytes(weights.read_bytes()[:-9])
    assert (convert("inspect", folder).code, convert("verify", folder).code) == (3, 6)


def test_an_index_and_its_files(pickled, convert):
    folder = pickled(size="100KB")
    index = folder / "pytorch_model.bin.index.json"
    placed = json.loads(index.read_text())
    first = next(iter(placed["weight_map"]))
    for name, code, message in (
        ("../model.bin", 3, "is not a file name"),
        ("model.safetensors", 3, "is not a file name"),
        ("pytorch_model-00009-of-00009.bin", 3, "No such file"),
        (max(placed["weight_map"].values()), 3, "pytorch_model.bin.index.json places in"),
    ):
        index.write_text(json.dumps({"weight_map": placed["weight_map"] | {first: name}}))
        ran = convert("inspect", folder)
        assert (ran.code, message in ran.err) == (code, True), ran.err
    index.write_text(
        json.dumps({"weight_map": {key: placed["weight_map"][key] for key in [*placed["weight_map"]][1:]}})
    )
    ran = convert("inspect", folder)
    assert (ran.code, f"holds {first}, which pytorch_model.bin.index.json does not list" in ran.err) == (3, True), (
        ran.err
    )


def test_weights_that_lack_only_a_config(model, pickled, convert, tmp_path):
    folder = pickled()
    (folder / "config.json").unlink()
    assert convert("fsdp2hf", folder, tmp_path / "out", "--config", model("llama", "bfloat16")).code == 0
    assert files(tmp_path / "out")["model.safetensors"] == files(model("llama", "bfloat16"))["model.safetensors"]
