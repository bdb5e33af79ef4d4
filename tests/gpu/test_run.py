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
    whole, found = (run(config, ranks=ranks, save=f"of{ranks}") for ranks in (1, 2))
    assert (whole.code, found.code) == (0, 0), whole.out + found.out
    assert found.series("trained_tokens") == whole.series("trained_tokens")
    assert found.series("loss") == pytest.approx(whole.series("loss"), abs=NEAR)
    assert found.series("grad_norm") == pytest.approx(whole.series("grad_norm"), rel=5 * NEAR)
    assert run(config, "--steps.exit_interval", 3, ranks=2).code == 75
    again = run(config, ranks=2)
    assert again.code == 0, again.out
    assert again.series("loss") == pytest.approx(found.series("loss"), abs=NEAR)


@pytest.mark.parametrize("more", [{"parallel": {"replicas": 2}}, {"lora": {}}, {}], ids=str)
def test_what_two_ranks_do_together(both, settings, model, run, data, more):  # noqa: F811
    """Four micro-batches, clipped over ranks; and the perplexity of all."""
    path = str(model("llama", vocab_size=253, **WIDE))
    about = {"model": {"dtype": "bf16", "path": path}, "batch": {"micro": 1}, "optim": {"clip": 0.5}}
    config = settings(data={"validation": {"one": str(data)}}, **about, **more)
    whole = run(config, "--parallel.replicas", 1, save="of1")
    found = run(config, ranks=2, save="of2")
    assert (whole.code, found.code) == (0, 0), whole.out + found.out
    assert found.series("loss") == pytest.approx(whole.series("loss"), abs=NEAR)
    scores = [[json.loads(line) for line in (one.save / "evaluations.jsonl").open()] for one in (found, whole)]
    for theirs, mine in zip(*scores, strict=True):
        assert theirs == pytest.approx(mine, rel=NEAR)


def test_a_rank_takes_memory_of_its_own_gpu_alone(both, config, forks, tmp_path):  # noqa: F811
    """Behind a checkpoint, which a thread writes: threads begin with the first GPU."""
    (tmp_path / "looked.py").write_text(LOOKED)
    code, out = forks(["run", str(config)], 2, tmp_path / "looked.py")
    assert code == 0, out
    assert {"rank 0 is on [0]", "rank 1 is on [1]"} <= set(out.splitlines()), out


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


@pytest.mark.parametrize("engine", ["fsdp", "transformers"])
def test_recomputing_layers_takes_less_memory_and_changes_nothing(settings, model, run, engine):  # noqa: F811
    """Rows long enough that what layers keep is more than the weights."""
    path = str(model("llama", vocab_size=253, **WIDE | {"num_hidden_layers": 8, "max_position_embeddings": 8192}))
    config = settings(
        engine=engine, model={"dtype": "bf16", "path": path}, data={"seq_length": 8192}, steps={"train_iters": 2},
        batch={"size": 2, "micro": 1},
    )  # fmt: skip
    kept, again = (run(config, "--model.activation_checkpointing", word, save=word) for word in ("false", "true"))
    assert (kept.code, again.code) == (0, 0), kept.out + again.out
    assert again.series("loss") == pytest.approx(kept.series("loss"), abs=NEAR)
    assert max(again.series("memory")) < 0.6 * max(kept.series("memory"))


@pytest.mark.parametrize("more", [{"lora": {}}, {}], ids=["lora", "full"])
def test_what_a_gpu_trained_is_evaluated_exported_and_talks(settings, run, data, talker, tmp_path, forks, more):  # noqa: F811
    path = {"model": {"dtype": "bf16", "path": str(talker)}}
    config = settings(data={"validation": {"one": str(data)}}, **path, **more)
    ran = run(config, "--export", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.series("loss")[-1] < ran.series("loss")[0]
    scores = [json.loads(line) for line in (ran.save / "evaluations.jsonl").open()]
    assert scores, ran.out
    code, out = forks(["chat", str(tmp_path / "out"), "--prompt", "diena saule", "--max-new-tokens", "8", "--ids"], 1)
    assert code == 0, out
    assert "  ids " in out
