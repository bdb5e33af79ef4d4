"""Folders of DeepSpeed in which names, strides or rows are unlike those of every day: right or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused, weights

MASTERS = ("--weights", "fp32-master", "-q")
EMBEDDING = "model.embed_tokens.weight"


def save(root: Path, model: Mapping[str, Any], optimizer: Any = None, stage: int = 2) -> Path:
    """A checkpoint of a model that no table knows, of one rank, in the files that its stage has."""
    import torch

    tag = root / "global_step1"
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    config = {"model_type": "foo", "vocab_size": 8, "architectures": ["FooForCausalLM"]}
    (root / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    about = {"buffer_names": [], "shared_params": {}, "dp_world_size": 1, "mp_world_size": 1, "global_steps": 1}
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(about | {"optimizer": None} | model, tag / f"{name}_model_states.pt")
    if optimizer is not None:
        torch.save({"optimizer_state_dict": optimizer}, tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return root


def partition(flat: Any, stage: int = 2) -> dict[str, Any]:
    """What the only rank of a training keeps of its only group."""
    settings = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    inner = {"state": {0: {"step": 1, "exp_avg": flat, "exp_avg_sq": flat}}, "param_groups": [settings]}
    if stage == 3:
        return {"zero_stage": 3, "fp32_flat_groups": [flat], "optimizer_state_dict": inner, "partition_count": 1}
    held = {"single_partition_of_fp32_groups": [flat], "group_paddings": [0], "partition_count": [1]}
    return held | {"zero_stage": stage, "base_optimizer_state": inner}


def frozen(name: str, fragment: Any, shape: Sequence[int]) -> dict[str, Any]:
    """What a model file says of a parameter that is not trained."""
    return {"frozen_param_shapes": {name: tuple(shape)}, "frozen_param_fragments": {name: fragment}}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_matrix_comes_back_in_its_own_order(convert, tmp_path, stage):
    """DeepSpeed saves `param.detach().cpu()`, which keeps the strides (engine.py, 0.19.8)."""
    import torch

    embedding, matrix = torch.arange(32.0).reshape(8, 4), torch.arange(12.0).reshape(4, 3).t().bfloat16()
    assert matrix.stride() == (1, 3)
    module = {EMBEDDING: embedding.bfloat16(), "f.weight": matrix}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], **frozen("f.weight", matrix, (3, 4))}
    run = save(tmp_path / "run", model, partition(embedding.flatten(), stage), stage)
    assert convert("zero2hf", run, tmp_path / "out", *MASTERS).code == 0
    assert torch.equal(weights(tmp_path / "out")["f.weight"], matrix)


@pytest.mark.parametrize("kind", ["one row", "every other element", "one element"])
def test_a_part_of_a_frozen_matrix_lies_in_one_row(convert, tmp_path, kind):
    """Of stage 3, whose parts are intervals."""
    import torch

    embedding, flat = torch.arange(32.0), torch.arange(12.0).bfloat16()
    part = {"one row": flat, "every other element": flat.repeat_interleave(2)[::2], "one element": flat[:1].expand(12)}
    held = {"module": {EMBEDDING: torch.empty(0)}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    model = held | frozen("f.weight", part[kind], (3, 4))
    told = convert("zero2hf", save(tmp_path / "run", model, partition(embedding, 3), 3), tmp_path / "out", *MASTERS)
    if kind == "one row":
        assert told.code == 0
        assert torch.equal(weights(tmp_path / "out")["f.weight"], flat.reshape(3, 4))
    else:
        refused(told, 3, "holds the frozen f.weight as", "no flat tensor")
