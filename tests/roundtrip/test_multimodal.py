"""Qwen3.5 with its vision tower, and the layer that predicts a second token: carried whole under its own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import MOE, SMALL, settings_of

VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
CLASSES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}


def build(folder: Path, name: str, tied: bool) -> Path:
    """A tiny model of both, with what the class leaves out of a released one."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    text = {**settings_of(f"{name}_text"), "tie_word_embeddings": tied, **(MOE if "moe" in name else {})}
    text.pop("model_type")
    kind = CLASSES[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=VISION, tie_word_embeddings=tied, **TOKENS
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08, generator=generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert {key.split(".")[1] for key in tensors if key.startswith("model.")} == {"language_model", "visual"}
    join = torch.randn(SMALL["hidden_size"], 2 * SMALL["hidden_size"], generator=generator).bfloat16()
    save_file({**tensors, "mtp.fc.weight": join}, folder / "model.safetensors", {"format": "pt"})
    return folder


def states(folder: Path, name: str) -> dict[str, Any]:
    """What transformers reads of a folder, the tower too."""
    import transformers

    kind = getattr(transformers, f"{CLASSES[name]}ForConditionalGeneration")
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    return dict(model.state_dict())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.slow
def test_it_comes_back_from_fsdp_and_deepspeed(convert, tmp_path, name, tied):
    import torch
    from safetensors.torch import load_file

    source = build(tmp_path / "hf", name, tied)
    expected = load_file(source / "model.safetensors")
    ran = convert("hf2fsdp", source, tmp_path / "fsdp", "--ranks", 2)
    assert ran.code == 0, ran.err
    assert convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "back").code == 0
    assert torch.equal(load_file(tmp_path / "back/model.safetensors")["mtp.fc.weight"], expected["mtp.fc.weight"])
    before, after = (states(folder, name) for folder in (source, tmp_path / "back"))  # its experts may be fused
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    tag = tmp_path / "run/global_step1"
    tag.mkdir(parents=True)
    head = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 1, "ds_version": "0.19.8"}
    module = load_file(source / "model.safetensors")
    torch.save({**head, "module": module, "buffer_names": [], "shared_params": {}}, tag / "mp_rank_00_model_states.pt")
    ran = convert("zero2hf", tag, tmp_path / "zero", "--config", source)
    assert ran.code == 0, ran.err
    again = load_file(tmp_path / "zero/model.safetensors")
    assert again.keys() == module.keys()
    assert all(torch.equal(value, module[key]) for key, value in again.items())
    assert convert("verify", tmp_path / "fsdp", source).code == 0
    assert convert("verify", tmp_path / "zero", source).code == 0
    folders = (source, tmp_path / "zero", *([] if "moe" in name else [tmp_path / "fsdp"]))  # where experts are fused
    assert len({convert("digest", folder).out.split()[0] for folder in folders}) == 1
    assert convert("hf2hf", source, tmp_path / "dropped", "--drop", "mtp").code == 0
    assert load_file(tmp_path / "dropped/model.safetensors").keys() == module.keys() - {"mtp.fc.weight"}


def test_without_its_tower_it_is_refused(convert, tmp_path):
    """Half a model is none; and Megatron has no such model."""
    from safetensors.torch import load_file, save_file

    source = build(tmp_path / "hf", "qwen3_5", tied=False)
    ran = convert("hf2megatron", source, tmp_path / "m")
    assert (ran.code, "has no Megatron layout" in ran.err) == (4, True)
    tensors = load_file(source / "model.safetensors")
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_bytes((source / "config.json").read_bytes())
    text = {key: value for key, value in tensors.items() if "visual" not in key}
    save_file(text, half / "model.safetensors", {"format": "pt"})
    ran = convert("hf2fsdp", half, tmp_path / "f")
    assert ran.code == 3, ran.err
    assert "visual" in ran.err
