"""The Trainer of transformers trains what our own loop trains: the same numbers, checkpoints and ends."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from formats.errors import UsageError
from tests.train.test_run import NEAR, require_same
from train.settings.config_file import load_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
SHARDS = """
import os

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate import DistributedType, PartialState

PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
from torch.distributed.fsdp import FSDPModule
from train.engines import trainer

FSDPModule.set_requires_gradient_sync = None  # called, it would keep gradients of the whole model
trainer.SHARDED = ("cpu",)
from train.cli import main

main()
"""
"""accelerate takes CPUs for GPUs, and shards the model on them as it does there."""


@pytest.fixture
def config(settings, data):
    """A training by the Trainer."""
    return settings(engine="transformers", evaluate={"every": 2}, data={"validation": {"one": str(data)}})


def test_numbers_and_weights_are_those_of_our_own_loop(config, run, convert, forks, tmp_path):
    """Sharded as on GPUs, on two ranks, on one, and at last by our own loop: each goes on where the other ended."""
    ours = run(config, "--engine", "fsdp", "--export", tmp_path / "ours", save="native")
    assert ours.code == 0, ours.out
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    options = ("--steps.exit_interval", 2, "--export", tmp_path / "theirs")
    save = tmp_path / "save"
    _, out = forks(["run", str(config), "--save.path", str(save), *map(str, options)], 2, script)
    assert "stopped after step 2 of 8, saved as global_step102" in out, out
    written = FileSystemReader(save / "global_step102").read_metadata().state_dict_metadata
    assert len(written["model.model.norm.weight"].chunks) == 2
    double = run(config, *options, "--batch.micro", 1, ranks=2)
    assert "stopped after step 4 of 8" in double.out, double.out
    single = run(config, *options, "--batch.micro", 8)
    assert single.code == 75, single.out
    last = run(config, *options, "--engine", "fsdp")
    assert last.code == 0, last.out

    require_same(last, ours)
    for name in ("step", "lr", "tokens", "all_trained_tokens"):
        assert last.series(name) == ours.series(name), name
    assert last.lines[0].keys() == ours.lines[0].keys()
    scores = [[json.loads(line) for line in (result.save / "evaluations.jsonl").open()] for result in (last, ours)]
    assert len(scores[0]) == len(scores[1]) == 4
    for theirs, mine in zip(*scores, strict=True):
        assert theirs == pytest.approx(mine, abs=NEAR)
    for name, result in (("theirs", last), ("ours", ours)):
        ran = convert("fsdp2hf", result.save / "global_step108", tmp_path / "fp32" / name, "--dtype", "fp32")
        assert ran.code == 0, ran.err
    theirs, mine = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32/theirs", "fp32/ours"))
    assert theirs.keys() == mine.keys() == load_file(tmp_path / "theirs/model.safetensors").keys()
    for name, tensor in mine.items():
        assert (tensor - theirs[name]).abs().max() < 2e-5, name


def test_an_interrupted_training_goes_on_bit_for_bit(config, run, convert):
    options = ("--neftune_alpha", 5)
    reference = run(config, *options, save="whole")
    assert reference.code == 0, reference.out
    stopped = run(config, *options, "--steps.exit_interval", 5)
    assert stopped.code == 75, stopped.out
    assert (stopped.save / "RESUME").is_file()
    resumed = run(config, *options)
    assert resumed.code == 0, resumed.out
    assert not (resumed.save / "RESUME").exists()
    for name in ("loss", "grad_norm", "lr", "global_step"):
        assert resumed.series(name) == reference.series(name), name
    digests = [convert("digest", result.save / "global_step108").out.split()[0] for result in (resumed, reference)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--parallel.replicas", "2"], "parallel.replicas"),
        (["--model.compile", "true"], "model.compile"),
        (["--parallel.deepspeed", "{zero_optimization: {}}"], "parallel.deepspeed"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, options, name):
    with pytest.raises(UsageError, match=f"the engine transformers does not know {name}"):
        load_config(settings(engine="transformers"), options)
