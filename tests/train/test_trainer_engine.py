"""The Trainer of transformers trains what our own loop trains: the same numbers, checkpoints and ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from formats.errors import UsageError
from tests.train.test_run import require_same
from train.config import load_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
SHARDS = """
import os

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate import DistributedType, PartialState

PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
from train.engines import trainer

trainer.SHARDED = ("cpu",)
from train.cli import main

main()
"""
"""accelerate takes CPUs for GPUs, and shards the model on them as it does there."""


FIRST = ("--steps.exit_interval", 3)


@pytest.fixture
def ours(settings, run, tmp_path):
    """What our own loop trains, on one rank."""
    found = run(settings(), "--export", tmp_path / "ours", save="native")
    assert found.code == 0, found.out
    return found


@pytest.fixture
def config(settings, data, ours):
    """The same, by the Trainer."""
    return settings(engine="transformers", data={"validation": {"one": str(data)}})


def test_numbers_and_weights_are_those_of_our_own_loop(config, run, ours, tmp_path):
    found = run(config, "--batch.micro", 1, "--export", tmp_path / "theirs", ranks=2)
    assert found.code == 0, found.out
    require_same(found, ours)
    for name in ("step", "lr", "tokens", "all_trained_tokens"):
        assert found.series(name) == ours.series(name), name
    assert found.lines[0].keys() == ours.lines[0].keys()
    assert "global_step=108 one: eval_ppl=" in found.out
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (tensor.float() - theirs[name].float()).abs().max() < 2e-5, name  # a few of bf16's last bits


def test_sharded_as_on_gpus_and_resumed_by_our_own_loop(config, run, ours, tmp_path):
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    stopped = run(config, *FIRST, ranks=2, script=script)
    assert stopped.code != 0
    assert "stopped behind step 3 of 8, saved as global_step103" in stopped.out
    goes_on = run(config, "--engine", "fsdp")
    assert goes_on.code == 0, goes_on.out
    require_same(goes_on, ours)


def test_an_interrupted_training_goes_on_bit_for_bit(config, run, convert):
    words = ("--neftune_alpha", 5)
    whole = run(config, *words, save="whole")
    assert whole.code == 0, whole.out
    stopped = run(config, *words, *FIRST)
    assert stopped.code == 75, stopped.out
    assert (stopped.save / "RESUME").is_file()
    again = run(config, *words)
    assert again.code == 0, again.out
    assert not (again.save / "RESUME").exists()
    for name in ("loss", "grad_norm", "lr", "global_step"):
        assert again.series(name) == whole.series(name), name
    digests = [convert("digest", one.save / "global_step108").out.split()[0] for one in (again, whole)]
    assert digests[0] == digests[1]


def test_replicas_are_refused(settings):
    from train.engines.trainer import Driven

    config, _ = load_config(settings(engine="transformers"), ["--parallel.replicas", "2"])
    with pytest.raises(UsageError, match=r"shards over all ranks, parallel\.replicas is 2"):
        Driven(config, None, SimpleNamespace(), "sdpa")
