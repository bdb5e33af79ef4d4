"""`train plan`: what a training will take, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.train.conftest import ROOT


def test_the_plan_of_a_training(settings, train):
    ran = train("plan", settings(), "--ranks", 2, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["rows"], found["batch"], found["steps"], found["parameters"]) == (59, 8, 8, 155840)
    assert found["flops"] == 6 * 155840 * 8 * 8 * 64
    assert found["memory"]["weights, gradients, moments"] == 16 * 155840 // 2
    assert found["bytes"] == sum(found["memory"].values())
    sharded = {"engine": "deepspeed", "model": {"dtype": "bf16"}}
    for stage, nbytes in ((1, (12 // 2 + 4, 2)), (2, (16 // 2, 2))):
        held = settings(parallel={"zero_stage": stage}, **sharded)
        memory = json.loads(train("plan", held, "--ranks", 2, "--json").out)["memory"]
        found = memory["weights, gradients, moments"], memory["gathered weights"]
        assert found == tuple(155840 * one for one in nbytes)
    text = train("plan", settings(), "--ranks", 2)
    assert "8 rows = 2 micro x 2 accumulation x 2 ranks" in text.out
    wrong = train("plan", settings(), "--ranks", 3)
    assert wrong.code == 2
    assert "x 3 ranks" in wrong.err


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
