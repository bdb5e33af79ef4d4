"""Names in memory and names of files: boxes that torch's own functions are followed through, and what cannot be."""

from __future__ import annotations

import json

import pytest
import torch

from converters.plan import agreement, meta_model
from converters.plan.tensor_origins import TracedTensor, traced
from tests.faults.dcp_tools import refused, save
from tests.fuzz.architectures import build, quiet

CHAINS = {
    "renamed": lambda tensor, _: tensor.contiguous(),
    "experts": lambda tensor, _: torch.chunk(torch.chunk(tensor, 2, dim=1)[1], tensor.shape[0], dim=0)[2].squeeze(0),
    "transposed": lambda tensor, _: tensor.transpose(1, 2).contiguous(),
    "split": lambda tensor, _: torch.split(tensor, [1, 3, 2], dim=-2)[1],
    "joined": lambda tensor, other: torch.cat([tensor, other], dim=1),
    "stacked": lambda tensor, other: torch.stack([tensor, other], dim=1).transpose(0, 2),
    "rows": lambda tensor, _: tensor.view(2, 2, 6, 5).transpose(0, 1).reshape(4, 6, 5),
    "elements": lambda tensor, other: torch.cat(
        [tensor.view(4, 3, 2, 5).transpose(1, 2).reshape(4, 6, 5), other], dim=0
    ),
    "all of it": lambda tensor, other: torch.chunk(torch.cat([tensor, other], dim=0).transpose(0, 1), 3, dim=0)[1],
}
SHAPE = (4, 6, 5)


@pytest.mark.parametrize("chain", CHAINS)
def test_the_boxes_say_where_each_element_comes_from(chain):
    """The same functions on numbers: each box holds what it says."""
    numbers = {"one": torch.arange(120).reshape(SHAPE), "other": torch.arange(120, 240).reshape(SHAPE)}
    expected = CHAINS[chain](*numbers.values())
    followed = CHAINS[chain](*(traced(name, SHAPE) for name in numbers))
    assert isinstance(followed, TracedTensor)
    assert followed.shape == expected.shape
    rebuilt = torch.full(expected.shape, -1)
    for piece in followed.pieces:
        box = numbers[piece.name][tuple(slice(*ends) for ends in piece.source_box)]
        axes = [axis for axis in piece.axes if axis is not None]
        left = [axis for axis in range(box.dim()) if axis not in axes]
        assert all(box.shape[axis] == 1 for axis in left)
        here = tuple(slice(*ends) for ends in piece.box)
        rebuilt[here] = box.permute(*axes, *left).reshape(rebuilt[here].shape)
    assert torch.equal(rebuilt, expected)


@pytest.mark.parametrize("turn", [lambda tensor: tensor.flip(0), torch.neg])
def test_what_no_box_follows_is_not_told(turn):
    assert turn(traced("one", SHAPE)).pieces is None
    assert traced("one", (30_000, 2)).reshape(3, 10_000, 2).pieces is None, "too many rows"
    assert torch.stack([turn(traced("one", SHAPE)).reshape(120), traced("two", (120,))]).pieces is None


SORTED = ("llava", "qwen2_5_vl", "gemma3", "mistral3", "qwen3_next", "phimoe", "whisper", "kimi_k25")
"""Models whose names in memory are others than those of files: towers, fused experts, several copies of one tensor, and
rows of a tower's queries and keys in another order."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", SORTED)
def test_there_and_back(convert, tmp_path, kind, monkeypatch):
    """torch loads all of what is in memory; the names and bytes of the folder come back."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    monkeypatch.setattr(agreement, "_answer_of_program", lambda text: json.dumps(meta_model.report(json.loads(text))))
    with quiet():
        model = build(kind, 3)
        model.save_pretrained(tmp_path / "hf")
    assert convert("hf2fsdp", tmp_path / "hf", tmp_path / "c", "--ranks", 3).code == 0
    state = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert convert("verify", tmp_path / "c").code == 0
    assert convert("verify", tmp_path / "c", tmp_path / "hf").code == 0
    assert convert("diff", tmp_path / "hf", tmp_path / "c").code == 0
    assert convert("fsdp2hf", tmp_path / "c", tmp_path / "out").code == 0
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_out_of_deepspeed(convert, tmp_path):
    """A module of DeepSpeed has the names in memory, and becomes a folder with those of files."""
    from safetensors.torch import load_file

    with quiet():
        model = build("mistral3", 3)
        model.save_pretrained(tmp_path / "hf")
    (tmp_path / "zero/global_step1").mkdir(parents=True)
    (tmp_path / "zero/latest").write_text("global_step1")
    saved = {"module": model.state_dict(), "dp_world_size": 1, "mp_world_size": 1, "global_steps": 1}
    torch.save(saved, tmp_path / "zero/global_step1/mp_rank_00_model_states.pt")
    ran = convert("zero2hf", tmp_path / "zero", tmp_path / "out", "--config", tmp_path / "hf")
    assert ran.code == 0, ran.err
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_changed_weight_is_seen_under_either_name(convert, tmp_path):
    with quiet():
        model = build("qwen2_5_vl", 3)
        model.save_pretrained(tmp_path / "hf")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["model.language_model.layers.1.mlp.up_proj.weight"][3, 5] += 1
    trained = save(tmp_path / "trained", {"model": state})
    refused(convert("verify", trained, tmp_path / "hf", "--config", tmp_path / "hf"), 6, "up_proj")


def test_too_many_rows_in_another_order_are_refused(convert, tmp_path, monkeypatch):
    """Kimi K2.5's tower, as if what transformers permutes of it were not told."""

    def asked(text: str) -> str:
        answer = meta_model.report(json.loads(text))
        answer["hub"] |= {name: {**entry, "pieces": None} for name, entry in answer["hub"].items() if "wqkv" in name}
        return json.dumps(answer)

    monkeypatch.setattr(agreement, "_answer_of_program", asked)
    with quiet():
        model = build("kimi_k25", 3)
        model.save_pretrained(tmp_path / "hf")
    refused(convert("hf2fsdp", tmp_path / "hf", tmp_path / "c"), 4, "wqkv", "otherwise in memory", "--verbatim")
    assert convert("hf2fsdp", tmp_path / "hf", tmp_path / "c", "--verbatim").code == 0
    trained = save(tmp_path / "trained", {"model": model.state_dict()})
    refused(convert("fsdp2hf", trained, tmp_path / "out", "--config", tmp_path / "hf"), 4, "wqkv")


def test_without_transformers_names_stay(convert, tmp_path, monkeypatch):
    """A note says so; nothing tells then that the model is whole, so that the user has to."""
    monkeypatch.setattr(agreement, "NEEDED", ("not_installed",))
    with quiet():
        build("llava", 3).save_pretrained(tmp_path / "hf")
    ran = convert("hf2fsdp", tmp_path / "hf", tmp_path / "c", "--verbatim")
    assert ran.code == 0, ran.err
    assert "no table says which names the model has in memory" in ran.err


def test_a_copy_that_differs_is_refused(convert, tmp_path):
    """Two names of one tensor in memory, with different values: neither is dropped in silence."""
    with quiet():
        model = build("gemma3", 3)
        model.save_pretrained(tmp_path / "hf")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["lm_head.weight"][3, 5] += 1
    trained = save(tmp_path / "trained", {"model": state})
    ran = convert("fsdp2hf", trained, tmp_path / "out", "--config", tmp_path / "hf")
    assert ran.code != 0
    assert not (tmp_path / "out").exists()
