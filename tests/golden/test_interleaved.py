"""Experts with gate and up interleaved (`moe_mlp_glu_interleave_size`): read, written, and judged by stock Megatron."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.registry import open_checkpoint
from tests.megatron_runs import shards, with_args

STOCK = os.environ.get("VITRUVIAN_STOCK", "")
JUDGE = Path(__file__).with_name("interleave_judge.py")


def load(path: Path) -> Any:
    """The object in a file of torch."""
    import torch

    return torch.load(path, weights_only=False)


@pytest.mark.stock
@pytest.mark.parametrize(
    ("name", "interleave"), [("qwen3_moe", None), ("qwen3_moe", 8), ("mixtral", 32), ("qwen3_moe", 48)]
)
def test_stock_megatron_computes_with_them_what_transformers_computes(model, convert, tmp_path, name, interleave):
    import torch
    from transformers import AutoModelForCausalLM

    assert STOCK, "VITRUVIAN_STOCK names no interpreter: make test-stock"
    source = model(name)
    given = [] if interleave is None else ["--glu-interleave", interleave]
    assert convert("hf2megatron", source, tmp_path / "m", *given).code == 0
    x = np.random.default_rng(1).standard_normal((4, 5, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    paths = [tmp_path / name for name in ("m", "x.npy", "y.npy")]
    ran = subprocess.run([STOCK, JUDGE, *paths], capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    outputs = np.load(tmp_path / "y.npy")
    layers = AutoModelForCausalLM.from_pretrained(source).model.layers
    states, each = torch.from_numpy(x.reshape(-1, 64)), torch.arange(4).repeat_interleave(5)[:, None]
    with torch.no_grad():
        expected = torch.stack([layer.mlp.experts(states, each, torch.ones(20, 1)) for layer in layers]).numpy()
    assert abs(expected).max() > 1e-3
    assert abs(outputs.reshape(expected.shape) - expected).max() < 1e-5 * abs(expected).max() + 1e-6


def interleaved(rows: Any, interleave: int) -> Any:
    """Rows of gate and up as `_remove_glu_interleaving` expects them."""
    return rows.reshape(2, -1, interleave, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


@pytest.mark.parametrize(("cut", "interleave"), [((1, 1, 1), 16), ((2, 2, 1), 8), ((2, 1, 2), 8)])
def test_each_rank_has_gate_and_up_interleaved(model, convert, tmp_path, cut, interleave):
    """The files differ in nothing but the order of rows, in each rank by itself."""
    source, options = model("qwen2_moe"), [f"--{n}={v}" for n, v in zip(("tp", "ep", "etp"), cut, strict=True)]
    assert convert("hf2megatron", source, tmp_path / "plain", *options).code == 0
    assert convert("hf2megatron", source, tmp_path / "interleaves", *options, "--glu-interleave", interleave).code == 0
    changed = 0
    for plain_path, interleaved_path in zip(shards(tmp_path / "plain"), shards(tmp_path / "interleaves"), strict=True):
        plain, interleaves = load(plain_path), load(interleaved_path)
        assert interleaves["args"].moe_mlp_glu_interleave_size == interleave
        for key, rows in plain["model"].items():
            expert = ".experts.linear_fc1." in key
            assert (interleaved(rows, interleave) if expert else rows).equal(interleaves["model"][key]), key
            changed += expert
    assert changed >= 16
    assert f"--moe-mlp-glu-interleave-size {interleave}" in (tmp_path / "interleaves/megatron_flags.txt").read_text()
    assert convert("megatron2hf", tmp_path / "interleaves", tmp_path / "hf").code == 0
    assert convert("diff", tmp_path / "hf", source).code == 0


def test_reshard_keeps_turns_changes_them_and_undoes_them(model, convert, tmp_path):
    source = model("qwen3_moe")
    convert("hf2megatron", source, tmp_path / "m", "--glu-interleave", 8)
    assert convert("reshard", tmp_path / "m", tmp_path / "two", "--tp", 2, "--ep", 2, "--etp", 1).code == 0
    assert open_checkpoint(tmp_path / "two").details.interleaves["interleave"] == 8
    assert convert("reshard", tmp_path / "m", tmp_path / "other", "--glu-interleave", 16).code == 0
    assert open_checkpoint(tmp_path / "other").details.interleaves["interleave"] == 16
    assert convert("reshard", tmp_path / "m", tmp_path / "dist", "--format", "torch_dist", "--ep", 2).code == 0
    assert open_checkpoint(tmp_path / "dist").details.interleaves["interleave"] == 8
    assert convert("reshard", tmp_path / "dist", tmp_path / "plain", "--glu-interleave", 0).code == 0
    assert open_checkpoint(tmp_path / "plain").details.interleaves["interleave"] == 0
    for name in ("two", "other", "dist", "plain"):
        assert convert("diff", tmp_path / name, source).code == 0


def test_shared_experts_have_interleaves_of_their_own(model, convert, tmp_path):
    """Only with --use-grouped-gemm-for-shared-expert, and whatever the others have."""
    import torch

    source = model("qwen2_moe")
    convert("hf2megatron", source, tmp_path / "plain", "--glu-interleave", 8)
    name, size = "use_grouped_gemm_for_shared_expert", "moe_shared_expert_glu_interleave_size"
    run = with_args(tmp_path / "plain", tmp_path / "interleaves", **{name: True, size: 16})
    for path in shards(run):
        record = load(path)
        for key, rows in record["model"].items():
            if ".shared_experts.linear_fc1." in key:
                record["model"][key] = interleaved(rows, 16)
        torch.save(record, path)
    assert convert("reshard", run, tmp_path / "again", "--tp", 2).code == 0
    assert open_checkpoint(tmp_path / "again").details.interleaves == {"interleave": 8, "shared_interleave": 16}
    flags = (tmp_path / "again/megatron_flags.txt").read_text()
    assert "--use-grouped-gemm-for-shared-expert\n--moe-mlp-glu-interleave-size 8\n" in flags
    for folder in (run, tmp_path / "again"):
        assert convert("diff", folder, source).code == 0
    ignored = with_args(tmp_path / "plain", tmp_path / "ignored", **{size: 16})
    assert convert("diff", ignored, source).code == 0


def test_what_cannot_be_in_turn_is_refused(model, convert, tmp_path):
    source, options = model("qwen3_moe"), ("--glu-interleave", 8)
    ran = convert("hf2megatron", source, tmp_path / "m", "--glu-interleave", 7, "-n")
    assert (ran.code, "48 rows do not divide into blocks of 7" in ran.err) == (5, True)
    ran = convert("hf2megatron", source, tmp_path / "m", *options, "--norm", "local", "-n")
    assert (ran.code, "local layers" in ran.err) == (5, True)
    ran = convert("hf2megatron", model("llama"), tmp_path / "m", *options, "-n")
    assert (ran.code, "no experts" in ran.err) == (5, True)
    ran = convert("hf2megatron", source, tmp_path / "m", *options, "--format", "torch_dist", "--tp", 2, "-n")
    assert (ran.code, "moe_mlp_glu_interleave_size = 8 with a tensor parallel size of 2" in ran.err) == (4, True)
    convert("hf2megatron", source, tmp_path / "m", *options)
    for value, code in ((7, 3), ("8", 3), (-8, 3)):
        run = with_args(tmp_path / "m", tmp_path / f"run{value}", moe_mlp_glu_interleave_size=value)
        assert convert("megatron2hf", run, tmp_path / "hf").code == code
