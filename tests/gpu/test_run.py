"""Trainings on a GPU: near the one on the CPU, and the same after an interruption."""

from __future__ import annotations

import pytest

from tests.gpu.test_attention import WIDE
from tests.train.conftest import data, forks, run, settings  # noqa: F401

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


NEAR = 1e-2
"""Of losses of two trainings in bf16 whose sums have another order: 0.004 on CPUs. Without the moments it is 0.07."""


@pytest.fixture(params=["fsdp", "transformers", "deepspeed"])
def config(settings, model, request):  # noqa: F811
    """Eight steps in bf16."""
    return settings(engine=request.param, model={"dtype": "bf16", "path": str(model("llama", vocab_size=253, **WIDE))})


def test_a_gpu_trains_as_a_cpu_does(config, run, monkeypatch):  # noqa: F811
    found = run(config, save="gpu")
    assert found.code == 0, found.out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # DeepSpeed too takes the device that torch has
    wanted = run(config, "--model.dtype", "fp32", save="cpu")
    assert wanted.code == 0, wanted.out
    assert found.series("trained_tokens") == wanted.series("trained_tokens")
    assert found.series("loss") == pytest.approx(wanted.series("loss"), abs=0.05)


def test_an_interrupted_training_goes_on(config, run):  # noqa: F811
    whole = run(config, save="whole")
    assert run(config, "--steps.exit_interval", 3).code == 75
    again = run(config)
    assert again.code == 0, again.out
    assert again.series("loss") == pytest.approx(whole.series("loss"), abs=NEAR)
    assert again.series("trained_tokens") == whole.series("trained_tokens")
