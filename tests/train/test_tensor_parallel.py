"""Layers that ranks split: losses, gradients, weights and scores of one rank; saves that any number of ranks reads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.train.test_context import NEAR, require_same
from tests.train.test_freezing import tensors
from train.run.estimate import estimate
from train.settings.config_file import load_config
from train.settings.splitting import FAMILIES

SPLIT = ["--parallel.tensor", 2]
EPS = 1e-5
"""Above the rounding errors of gradients, which Adam would scale up where a gradient is nearly 0."""


def saved(folder, path):
    """The weights of a checkpoint, by torch's own reader."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=False)["model"]


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "changes"), [("llama", {"intermediate_size": 86}), ("qwen3-tied", {})])
def test_ranks_that_split_layers_are_as_one(settings, run, model, data, convert, tmp_path, name, changes):
    config = settings(
        name, log={"layer_norms": True}, steps={"train_iters": 4}, optim={"weight_decay": 0.1, "clip": 0.5, "eps": EPS},
        model={"path": str(model(name, vocab_size=253, **changes))},
        data={"validation": {"eu": str(data)}}, evaluate={"every": 4, "max_rows": 3},
    )  # fmt: skip
    reference = run(config, save="whole")
    assert reference.code == 0, reference.out
    first = run(config, *SPLIT, "--steps.exit_interval", 2, ranks=4, save="split")
    assert "8 rows = 2 micro x 2 accumulation x 2 ranks" in first.out, first.out
    if name == "llama":
        second = run(config, "--steps.exit_interval", 3, save="split")
        assert "saved as global_step103" in second.out, second.out
    split = run(config, *SPLIT, "--parallel.offload", "true", ranks=2, save="split")
    require_same(split, reference)
    scores, theirs = (json.loads((result.save / "evaluations.jsonl").read_text()) for result in (split, reference))
    assert scores == pytest.approx(theirs, abs=NEAR)
    for step in ("global_step102", "global_step104"):
        assert convert("fsdp2hf", split.save / step, tmp_path / step).code == 0
        ours, judged = tensors(tmp_path / step), saved(split.save / step, tmp_path / f"{step}.pt")
        assert ours.keys() == judged.keys()
        assert all(torch.equal(ours[key], judged[key]) for key in ours)
    of_one = saved(reference.save / "global_step104", tmp_path / "whole.pt")
    assert max(float((ours[key] - of_one[key]).abs().max()) for key in ours) < NEAR


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_gradients_of_every_family_that_can_be_split(model, forks):
    folders = [str(model("gemma3" if name == "gemma3_text" else name)) for name in FAMILIES]
    code, out = forks(folders, 2, Path(__file__).with_name("split_families.py"))
    assert code == 0, out
    apart = json.loads(out.splitlines()[-1])
    assert sorted(apart) == sorted(FAMILIES)
    assert {name: far for name, far in apart.items() if not far < NEAR} == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("apertus", SPLIT, "apertus cannot be split by parallel.tensor: arcee, cwm, "),
     ("mixtral", SPLIT, "mixtral cannot be split by parallel.tensor: "),
     ("llama", ["--parallel.tensor", 8], "4 key/value heads cannot be split by parallel.tensor 8")],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(settings, train, name, options, message):
    ran = train("plan", settings(name), *options, "--ranks", 8)
    assert (ran.code, message in ran.err) == (4, True), ran.err


def test_ranks_have_to_be_groups(settings, train):
    ran = train("plan", settings(), *SPLIT, "--ranks", 3)
    assert (ran.code, "3 ranks cannot be groups of 2 that share layers" in ran.err) == (2, True), ran.err


@pytest.mark.distributed
def test_dropout_is_refused(settings, run, model):
    path = model("llama", vocab_size=253, attention_dropout=0.1)
    refused = run(settings(model={"path": str(path)}), *SPLIT, ranks=2)
    assert refused.code == 4, refused.out
    assert "llama has attention_dropout, and parallel.tensor none" in refused.out


def test_a_split_layer_takes_less_memory(settings):
    unsplit, split = (estimate(load_config(settings(), options)[0], 2).memory for options in ((), map(str, SPLIT)))
    assert split["gathered weights"] < unsplit["gathered weights"]
    assert split["weights, gradients, moments"] == unsplit["weights, gradients, moments"]
