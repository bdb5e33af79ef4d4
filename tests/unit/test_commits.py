"""Which checkpoints are complete: folders in the order in which their trainers write them."""

from __future__ import annotations

import os

import pytest

from formats.detect.commits import complete, folders, mark

SAVES = {
    "Megatron-LM": ("iter_0000010/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt", "10"),
    "Megatron-LM, torch_dist": ("iter_0000010/__0_0.distcp", "latest_checkpointed_iteration.txt", "10\n"),
    "GPT-NeoX, DeepSpeed": ("global_step10/mp_rank_00_model_states.pt", "latest", "global_step10"),
    "train run": ("global_step10/__0_0.distcp", "global_step10/.progress", "{}"),
    "HF Trainer": ("checkpoint-10/model.safetensors", "checkpoint-10/trainer_state.json", "{}"),
    "HF Trainer, FSDP": ("checkpoint-10/pytorch_model_fsdp_0/.metadata", "checkpoint-10/trainer_state.json", "{}"),
    "verl": ("global_step_10/actor/model_world_size_1_rank_0.pt", "latest_checkpointed_iteration.txt", "10"),
    "torchtitan": ("step-10/__0_0.distcp", "step-10/.metadata", ""),
    "OLMo-core": ("step10/model_and_optim/__0_0.distcp", "step10/model_and_optim/.metadata", ""),
    "nanotron": ("10/model/model/lm_head/pp_block/model_weight.safetensors", "10/model_config.json", "{}"),
    "MaxText": ("10/items/_METADATA", "10/_CHECKPOINT_METADATA", "{}"),
    "accelerate": (
        "checkpoint_10/pytorch_model_fsdp_0/__0_0.distcp", "checkpoint_10/pytorch_model_fsdp_0/.metadata", "",
    ),
}  # fmt: skip
"""Trainer: a file of its checkpoint, the file that it writes last, and what is in it."""


@pytest.mark.parametrize("trainer", SAVES)
def test_a_checkpoint_is_complete_when_its_trainer_says_so(tmp_path, trainer):
    first, last, text = SAVES[trainer]
    for name in (first, last):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / first).write_text("weights")
    assert complete(tmp_path) == []
    assert folders(tmp_path) == [first.partition("/")[0]]
    (tmp_path / last).write_text(text)
    assert complete(tmp_path) == [(10, tmp_path / first.partition("/")[0])]


def test_a_tracker_speaks_of_what_was_saved_before_it(tmp_path):
    for name in ("iter_0000010", "iter_0000020", "iter_0000030", "release", "iter_0000010.old", "checkpoint-5"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000015").symlink_to("iter_0000010")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, steps in {"20": [10, 20], "release": [], "": [], "2\x00": [], "global_step30": []}.items():
        tracker.write_text(text)
        assert [checkpoint.step for checkpoint in complete(tmp_path)] == steps


def test_a_mark_changes_when_a_checkpoint_is_saved_anew(tmp_path):
    folder = tmp_path / "iter_0000010"
    assert mark(folder) == ""
    (folder / "mp_rank_00").mkdir(parents=True)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    path.write_text("weights")
    before = mark(folder)
    assert before
    os.utime(path, ns=(0, 1))
    assert mark(folder) != before


def test_a_link_to_nothing_hides_no_file_beside_it(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.pt").write_bytes(b"saved")
        (tmp_path / f"{number}.log").symlink_to(tmp_path / "nothing")
    seen = {mark(tmp_path)}
    for number in range(8):
        (tmp_path / f"{number}.pt").write_bytes(b"saved anew")
        seen.add(mark(tmp_path))
    assert len(seen) == 9
