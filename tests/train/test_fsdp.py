"""What FSDP keeps in memory, and how its checkpoints are written where there are GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import filesystem

from train.engines.fsdp import write
from train.model.trainee import make, open_config


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_gradients_stay_in_shards_between_micro_batches(settings, forks, ranks, replicas):
    config = settings(model={"dtype": "bf16"}, parallel={"replicas": replicas})
    code, out = forks([str(config)], ranks, Path(__file__).with_name("gradients.py"))
    assert code == 0, out
    gradients, shard = json.loads(out.splitlines()[-1])
    assert gradients == shard > 0


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_stay_gathered_for_a_step_train_the_same(settings, data, run, ranks):
    """And are those of the last step in the next, whether an evaluation gathered them or a micro-batch did."""
    config = settings(batch={"micro": 1}, data={"validation": {"one": str(data)}}, evaluate={"every": 1, "max_rows": 2})
    freed, gathered = (run(config, "--parallel.reshard", word, ranks=ranks, save=word) for word in ("true", "false"))
    assert (freed.code, gathered.code) == (0, 0), freed.out + gathered.out
    for name in ("loss", "grad_norm"):
        assert gathered.series(name) == pytest.approx(freed.series(name), rel=1e-6)
    scores = [[json.loads(line) for line in (ran.save / "evaluations.jsonl").open()] for ran in (gathered, freed)]
    assert len(scores[0]) == len(freed.lines)
    for ours, theirs in zip(*scores, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_no_thread_that_writes_waits_for_a_gpu(model, monkeypatch, tmp_path):
    """That would be the first one, for every rank: a thread begins with number 0."""

    def waits(*_, **__):
        raise AssertionError("the loader of tensors on GPUs")

    network = make(open_config(model("llama", vocab_size=253)), "sdpa").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.fill_(0.5)
    optimizer = torch.optim.AdamW(network.parameters())
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", waits)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    running = write(network, optimizer, tmp_path / "step", SimpleNamespace(first=True, saving=None))
    with torch.no_grad():
        network.lm_head.weight.zero_()  # a copy is written
    running.result()
    monkeypatch.undo()
    loaded = {"model": {"lm_head.weight": torch.zeros_like(network.lm_head.weight)}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "step", no_dist=True)
    assert (loaded["model"]["lm_head.weight"] == 0.5).all()
