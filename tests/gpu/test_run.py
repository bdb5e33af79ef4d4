"""Trainings on a GPU: near the one on the CPU, and the same after an interruption."""

from __future__ import annotations

import json

import pytest

from tests.gpu.test_attention import WIDE
from tests.train.conftest import data, forks, run, settings, talker  # noqa: F401

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


NEAR = 1e-2
"""Of losses of two trainings in bf16 whose sums have another order: 0.004 on CPUs. Without the moments it is 0.07."""
LOOKED = """
import os

import torch

from train.cli import main

try:
    main()
finally:
    print(f"rank {os.environ['RANK']} is on", [one for one in range(2) if torch._C._cuda_hasPrimaryContext(one)])
"""


@pytest.fixture(params=["fsdp", "transformers", "deepspeed"])
def config(settings, model, request):  # noqa: F811
    """Eight steps in bf16."""
    return settings(engine=request.param, model={"dtype": "bf16", "path": str(model("llama", vocab_size=253, **WIDE))})


@pytest.fixture
def both():
    """Skipped where there is one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU: what two ranks do together needs two")


def test_two_gpus_train_as_one_does(both, config, run):  # noqa: F811
    """NCCL; two micro-batches, whose gradients stay in shards; checkpoints in the background."""
    single, double = (run(config, ranks=ranks, save=f"of{ranks}") for ranks in (1, 2))
    assert (single.code, double.code) == (0, 0), single.out + double.out
    assert double.series("trained_tokens") == single.series("trained_tokens")
    assert double.series("loss") == pytest.approx(single.series("loss"), abs=NEAR)
    assert double.series("grad_norm") == pytest.approx(single.series("grad_norm"), rel=5 * NEAR)
    assert run(config, "--steps.exit_interval", 3, ranks=2).code == 75
    resumed = run(config, ranks=2)
    assert resumed.code == 0, resumed.out
    assert resumed.series("loss") == pytest.approx(double.series("loss"), abs=NEAR)


@pytest.mark.parametrize("changes", [{"parallel": {"replicas": 2}}, {"lora": {}}, {}], ids=str)
def test_what_two_ranks_do_together(both, settings, model, run, data, changes):  # noqa: F811
    """Four micro-batches, clipped over ranks; and the perplexity of all."""
    path = str(model("llama", vocab_size=253, **WIDE))
    about = {"model": {"dtype": "bf16", "path": path}, "batch": {"micro": 1}, "optim": {"clip": 0.5}}
    config = settings(data={"validation": {"one": str(data)}}, **about, **changes)
    single = run(config, "--parallel.replicas", 1, save="of1")
    double = run(config, ranks=2, save="of2")
    assert (single.code, double.code) == (0, 0), single.out + double.out
    assert double.series("loss") == pytest.approx(single.series("loss"), abs=NEAR)
    scores = [[json.loads(line) for line in (result.save / "evaluations.jsonl").open()] for result in (double, single)]
    for theirs, mine in zip(*scores, strict=True):
        assert theirs == pytest.approx(mine, rel=NEAR)


def test_a_rank_takes_memory_of_its_own_gpu_alone(both, config, forks, tmp_path):  # noqa: F811
    """Behind a checkpoint, which a thread writes: threads begin with the first GPU."""
    (tmp_path / "looked.py").write_text(LOOKED)
    code, out = forks(["run", str(config)], 2, tmp_path / "looked.py")
    assert code == 0, out
    assert {"rank 0 is on [0]", "rank 1 is on [1]"} <= set(out.splitlines()), out


def test_a_gpu_trains_as_a_cpu_does(config, run, monkeypatch):  # noqa: F811
    ran = run(config, save="gpu")
    assert ran.code == 0, ran.out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # DeepSpeed too takes the device that torch has
    expected = run(config, "--model.dtype", "fp32", save="cpu")
    assert expected.code == 0, expected.out
    assert ran.series("trained_tokens") == expected.series("trained_tokens")
    assert ran.series("loss") == pytest.approx(expected.series("loss"), abs=0.05)


def test_an_interrupted_training_goes_on(config, run):  # noqa: F811
    reference = run(config, save="whole")
    assert run(config, "--steps.exit_interval", 3).code == 75
    resumed = run(config)
    assert resumed.code == 0, resumed.out
    assert resumed.series("loss") == pytest.approx(reference.series("loss"), abs=NEAR)
    assert resumed.series("trained_tokens") == reference.series("trained_tokens")


@pytest.mark.parametrize("engine", ["fsdp", "transformers"])
def test_recomputing_layers_takes_less_memory_and_changes_nothing(settings, model, run, engine):  # noqa: F811
    """Rows long enough that what layers keep is more than the weights."""
    path = str(model("llama", vocab_size=253, **WIDE | {"num_hidden_layers": 8, "max_position_embeddings": 8192}))
    config = settings(
        engine=engine, model={"dtype": "bf16", "path": path}, data={"seq_length": 8192}, steps={"train_iters": 2},
        batch={"size": 2, "micro": 1},
    )  # fmt: skip
    stored, recomputed = (
        run(config, "--model.activation_checkpointing", word, save=word) for word in ("false", "true")
    )
    assert (stored.code, recomputed.code) == (0, 0), stored.out + recomputed.out
    assert recomputed.series("loss") == pytest.approx(stored.series("loss"), abs=NEAR)
    assert max(recomputed.series("memory")) < 0.6 * max(stored.series("memory"))


@pytest.mark.parametrize("changes", [{"lora": {}}, {}], ids=["lora", "full"])
def test_what_a_gpu_trained_is_evaluated_exported_and_talks(settings, run, data, talker, tmp_path, forks, changes):  # noqa: F811
    path = {"model": {"dtype": "bf16", "path": str(talker)}}
    config = settings(data={"validation": {"one": str(data)}}, **path, **changes)
    ran = run(config, "--export", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.series("loss")[-1] < ran.series("loss")[0]
    scores = [json.loads(line) for line in (ran.save / "evaluations.jsonl").open()]
    assert scores, ran.out
    code, out = forks(["chat", str(tmp_path / "out"), "--prompt", "diena saule", "--max-new-tokens", "8", "--ids"], 1)
    assert code == 0, out
    assert "  ids " in out
