"""`train plan`: what a training will take, without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.models import EXPERTS
from tests.train.conftest import ROOT


def test_the_plan_of_a_training(settings, train):
    ran = train("plan", settings(), "--ranks", 2, "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    assert (plan["rows"], plan["batch"], plan["steps"], plan["parameters"]) == (59, 8, 8, 155840)
    assert plan["memory"]["weights, gradients, moments"] == 16 * 155840 // 2
    assert plan["bytes"] == sum(plan["memory"].values())
    sharded = {"engine": "deepspeed", "model": {"dtype": "bf16"}}
    for stage, nbytes in ((1, (12 // 2 + 4, 2)), (2, (16 // 2, 2))):
        config = settings(parallel={"zero_stage": stage}, **sharded)
        memory = json.loads(train("plan", config, "--ranks", 2, "--json").out)["memory"]
        needed = memory["weights, gradients, moments"], memory["gathered weights"]
        assert needed == tuple(155840 * count for count in nbytes)
    text = train("plan", settings(), "--ranks", 2)
    assert "8 rows = 2 micro x 2 accumulation x 2 ranks" in text.out
    timed = train("plan", settings(), "--ranks", 2, "--device", "A100", "--mfu", 0.5)
    hours = plan["flops"] / (312e12 * 0.5 * 2) / 3600
    assert f"about {hours:.3g} h on 2 A100 at 50 % MFU, {2 * hours:.3g} GPU hours" in timed.out
    timed = train("plan", settings(), "--ranks", 2, "--device", "A100", "--mfu", 0.5, "--gpus-per-node", 8)
    assert f"{2 * hours:.3g} GPU hours, {hours:.3g} node hours on 1 nodes" in timed.out
    assert train("plan", settings(), "--device", "abacus").code == 2
    wrong = train("plan", settings(), "--ranks", 3)
    assert wrong.code == 2
    assert "x 3 ranks" in wrong.err


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in ("llama", "llama-tied", *EXPERTS)),
        ("llama", {"lora": {}}),
        ("mixtral", {"lora": {"targets": ["q_proj"]}}),
    ],
)
def test_operations_are_those_that_the_log_counts(settings, family, changes):
    """Of an epoch. The plan counts the biases of some routers too, which multiply nothing."""
    from transformers import AutoConfig

    from train.data.rows import open_rows
    from train.model import lora
    from train.model.trainee import make
    from train.run.estimate import estimate
    from train.run.throughput import flops_of, multiplied
    from train.settings.config_file import load_config

    path = settings(family, steps={"train_iters": None, "epochs": 1}, **changes)
    config, _ = load_config(path)
    rows = open_rows(config.data, config.data.train, config.seed)
    network = make(AutoConfig.from_pretrained(config.model.path), "eager")
    if config.lora is not None:
        lora.insert(network, config.lora, config.model.path)
    counted = flops_of([rows.flat([number]) for number in range(len(rows))], network.config, multiplied(network))
    near = 2e-4 if any("correction_bias" in name for name, _ in network.named_buffers()) else 1e-6
    assert estimate(config, 1).flops == pytest.approx(counted, rel=near)


def test_epochs_whose_last_step_is_short_are_as_many_as_asked(settings, train):
    path = settings(steps={"train_iters": None, "epochs": 2})
    planned = train("plan", path)
    assert planned.code == 0, planned.err
    assert re.search(r"\b2(\.00)? epochs", planned.out), planned.out


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_documents_that_the_model_has_no_positions_for(settings, model, train, run, family):
    """Told where positions are computed, refused where each has a vector."""
    path = settings(model={"path": str(model(family, vocab_size=253, max_position_embeddings=8))})
    planned, ran = train("plan", path), run(path, "--steps.train_iters", 1)
    if family == "gpt2":
        assert (planned.code, ran.code) == (5, 5), (planned.err, ran.out)
        assert "the model has vectors of 8 positions\nhint: --data.seq_length 8" in planned.err
        assert "the model has vectors of 8 positions" in ran.out
    else:
        assert (planned.code, ran.code) == (0, 0), (planned.err, ran.out)
        assert re.search(r"note: documents have up to \d+ inputs, the model was made for 8", planned.err)
        assert re.search(r"note       data.train: documents have up to \d+ inputs, the model was made for 8", ran.out)


def test_no_torch_is_loaded(settings):
    """On a login node: seen in the interpreter that did the work."""
    code = (
        "import sys\nfrom train import cli\ntry:\n    cli.main()\nfinally:\n"
        "    print('LOADED', [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", str(settings())],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env=os.environ,
    )  # fmt: skip
    assert "LOADED []" in ran.stdout, ran.stderr
