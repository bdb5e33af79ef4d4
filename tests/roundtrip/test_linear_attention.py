"""The parts of Megatron's linear attention hold the rows of transformers' matrices, in each of its formats.

megatron-core 0.16.1 and 0.19.2, ssm/gated_delta_net `sharded_state_dict`: `in_proj` of a tensor rank is cut at `PARTS`,
each a tensor of torch_dist. Rows of value heads have the order of transformers, by key head, as logits show
(tests/golden/test_megatron_dist.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

KEYS, VALUES, HEADS = 4 * 4, 8 * 6, 8
"""Rows of the tiny model: of queries or keys, of values, and of value heads."""
PARTS = {"query": KEYS, "key": KEYS, "value": VALUES, "z": VALUES, "beta": HEADS, "alpha": HEADS}


def of_transformers(source: Path, layer: int) -> dict[str, Any]:
    """The rows of each part of `in_proj` in the files of the Hub."""
    from safetensors.torch import load_file

    state = load_file(source / "model.safetensors")
    (prefix,) = (name.partition(f"layers.{layer}.")[0] for name in state if f"layers.{layer}.linear_attn.A_log" in name)
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    qkv, z, beta, alpha = (state[f"{prefix}layers.{layer}.linear_attn.{name}.weight"] for name in names)
    return dict(zip(PARTS, (*qkv.split([KEYS, KEYS, VALUES]), z, beta, alpha), strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rows_of_a_rank(model, convert, tmp_path, tp):
    import torch

    source, out = model("qwen3_5_text"), tmp_path / "m"
    assert convert("hf2megatron", source, out, "--tp", tp).code == 0
    ranks = [torch.load(path, weights_only=False)["model"] for path in sorted(out.glob("*/*/model_optim_rng.pt"))]
    assert len(ranks) == tp
    layers = [int(key.split(".")[2]) for key in ranks[0] if key.endswith("in_proj.weight")]
    assert layers
    for layer in layers:
        key = f"decoder.layers.{layer}.self_attention.in_proj.weight"
        cut = [rank[key].split([size // tp for size in PARTS.values()]) for rank in ranks]
        for part, *own in zip(PARTS, *cut, strict=True):
            assert torch.cat(own).equal(of_transformers(source, layer)[part]), part


@pytest.mark.parametrize("tp", [1, 2])
def test_tensors_of_torch_dist(model, convert, tmp_path, tp):
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source, out = model("qwen3_5_text"), tmp_path / "m"
    assert convert("hf2megatron", source, out, "--format", "torch_dist", "--tp", tp).code == 0
    dcp_to_torch_save(next(out.rglob(".metadata")).parent, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    layers = [int(key.split(".")[2]) for key in state if key.endswith("in_proj.weight.alpha")]
    assert layers
    for layer in layers:
        for part, rows in of_transformers(source, layer).items():
            key = f"decoder.layers.{layer}.self_attention.in_proj.weight.{part}"
            assert state[key].equal(rows), part
