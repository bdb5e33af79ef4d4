"""A training goes from one framework to another and back, in the midst of it, with its optimizer.

Real megatron-core trains; FSDP2 and DeepSpeed go on where it stopped, from what we made of its checkpoint, and save;
megatron-core goes on from what we made of that. The losses are those of the training that no one moved. There are no
rows of vocabulary padding: Megatron has them in its softmax, and no other framework has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.test_megatron_optim import ONE, PP2, VPP2, at, train

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
MODELS = {"llama": PP2, "qwen3": ONE}
WAYS = {
    "llama-fsdp": ("hf2fsdp", ["--ranks", 3, "--with-optimizer"], {}),
    "llama-zero2": ("zero2universal", [], {"stage": 2}),
    "qwen3-zero3": ("zero2universal", [], {"stage": 3}),
}
"""Model and framework: the command, its words, and what the training in that framework has to know."""


def go_on(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Run trainings of torch and DeepSpeed."""
    (folder / "torch.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(HERE / "torch_train.py"), str(folder / "torch.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    assert ran.stdout.count("largest relative loss difference") == len(jobs)


def test_a_training_goes_on_in_another_framework(model, convert, megatron_core, tmp_path):
    jobs: dict[str, dict[str, Any]] = {}
    for name, topology in MODELS.items():
        source, weights = model(name), tmp_path / f"{name}-weights"
        options = [*topology.flags, "--norm", "local", "--make-vocab-size-divisible-by", 1]
        assert convert("hf2megatron", source, weights, *options).code == 0
        rest = {"hf": str(source), "losses": str(tmp_path / f"{name}-losses"), "weights": str(weights)}
        saves = {str(tmp_path / f"{name}-run"): "torch_dist"}
        jobs[name] = {"dtype": "float32", "distributed": False, "multiple": 1, **at(topology), **rest, "save": saves}
    train(megatron_core, [*jobs.values()], tmp_path)

    moved, back = [], []
    for way, (command, options, more) in WAYS.items():
        job, out, saved = jobs[way.split("-")[0]], tmp_path / way, tmp_path / f"{way}-saved"
        ran = convert(command, next(iter(job["save"])), out, *options, "--vocab-size", 211)
        assert ran.code == 0, ran.err
        places = {"resume": str(out), "step": 3, "save": str(saved)}
        moved.append({"hf": job["hf"], "losses": job["losses"], **places, **more})
    go_on(moved, tmp_path)

    for way, (kind, topology) in zip(WAYS, (("torch_dist", ONE), ("torch", VPP2), ("torch", PP2)), strict=True):
        job, out = jobs[way.split("-")[0]], tmp_path / f"{way}-back"
        options = [*topology.flags, "--format", kind, "--norm", "local", "--make-vocab-size-divisible-by", 1]
        options += ["--with-optimizer", "--config", job["hf"], "--consumed-samples", 3]
        ran = convert("hf2megatron", tmp_path / f"{way}-saved", out, *options)
        assert ran.code == 0, ran.err
        rest = {key: job[key] for key in ("hf", "dtype", "distributed", "multiple", "losses")}
        back.append({**rest, **at(topology), "resume": str(out), "foreign": True})
    train(megatron_core, back, tmp_path)
