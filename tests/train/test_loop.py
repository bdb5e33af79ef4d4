"""What follows a step, told apart by what the settings, the clocks and the other ranks want."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from formats.errors import VerificationError
from train.data.rows import Flat
from train.run.checkpoint import Progress
from train.run.log import Step
from train.run.step import finish_step, reduce_counts
from train.settings.config_file import load_config

STEP = Step(1.0, 1.0, 8, 9, 0.0, 0, 0.1, stop=False, written=False, due=False)


@pytest.fixture
def follows(settings, monkeypatch):
    """`follows(step done, Step, sections)`: whether the training leaves, and what it did before."""

    def told(done, step, **sections):
        config, did = load_config(settings(**sections))[0], []
        sets = {"one": None} if config.data.validation else {}
        monkeypatch.setattr("train.run.step.evaluate", lambda *_: did.append("evaluate"))
        saver = SimpleNamespace(finish=lambda: did.append("finish"), start=lambda *_: did.append("save"))
        run = SimpleNamespace(
            prepared=SimpleNamespace(config=config, total=8), saver=saver, sets=sets, world=None, judge=None,
            engine=SimpleNamespace(trainee=None), watch=SimpleNamespace(restart=None), best=None, prompts=None,
        )  # fmt: skip
        progress = Progress(done, 100, 8, 1234, "rows", 9, 64)
        try:
            return finish_step(run, None, progress, step, 1.0, print), did
        except VerificationError:
            return "refused", did

    return told


@pytest.mark.parametrize(
    ("done", "step", "sections", "expected"),
    [
        (3, {}, {}, (False, [])),
        (4, {}, {}, (False, ["save"])),  # save.every
        (3, {"due": True}, {}, (False, ["save"])),
        (3, {"written": True}, {}, (False, ["finish"])),
        (4, {"written": True}, {}, (False, ["finish", "save"])),
        (3, {"stop": True}, {}, (True, ["save"])),
        (3, {}, {"steps": {"exit_interval": 3}}, (True, ["save"])),
        (2, {}, {"steps": {"exit_interval": 3}}, (False, [])),
        (8, {"stop": True}, {"save": {"every": 5}}, (False, ["save"])),  # the end is no interruption
        (8, {}, {"steps": {"exit_interval": 4}, "save": {"every": 5}}, (False, ["save"])),
        (3, {"loss": float("nan"), "stop": True}, {}, ("refused", ["finish"])),  # what is being written stays
        (4, {"norm": float("inf"), "due": True}, {}, ("refused", ["finish"])),
        (4, {}, {"data": {"validation": {"one": "P"}}}, (False, ["save", "finish", "evaluate"])),
        (3, {}, {"data": {"validation": {"one": "P"}}}, (False, [])),
        (3, {}, {"data": {"validation": {"one": "P"}}, "evaluate": {"every": 3}}, (False, ["finish", "evaluate"])),
        (4, {}, {"data": {"validation": {"one": "P"}}, "evaluate": {"every": 3}}, (False, ["save"])),
        (8, {}, {"data": {"validation": {"one": "P"}}, "save": {"every": 5}}, (False, ["save", "finish", "evaluate"])),
    ],
)  # fmt: skip
def test_what_follows_a_step(follows, done, step, sections, expected):
    assert follows(done, STEP._replace(**step), **sections) == expected


@pytest.mark.parametrize(
    ("mine", "others", "expected"),
    [
        ({}, {}, (False, False, False)),
        ({"stopped": True}, {}, (True, False, False)),
        ({}, {"stopped": 1}, (True, False, False)),
        ({"ready": True}, {}, (False, False, False)),  # not all have written
        ({}, {"ready": 2}, (False, False, False)),
        ({"ready": True}, {"ready": 2}, (False, True, False)),
        ({"ready": True, "running": None}, {"ready": 2}, (False, False, False)),
        ({"due": True}, {}, (False, False, True)),
        ({"due": True, "first": False}, {}, (False, False, False)),  # clocks differ: the first rank's counts
        ({"first": False}, {"due": 1}, (False, False, True)),
    ],
)
def test_three_ranks_want_one_thing(mine, others, expected):
    """What this one sums with the two others, which have as many tokens."""
    state = {"stopped": False, "ready": False, "running": "checkpoint", "due": False, "first": True} | mine
    added = [8, 10, 0, *(others.get(name, 0) for name in ("stopped", "ready", "due"))]
    world = SimpleNamespace(
        first=state["first"], ranks=3, tensor=1, sums=lambda *values: (np.array(values) + added).tolist()
    )
    saver = SimpleNamespace(ready=state["ready"], running=state["running"], due=state["due"])
    model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=2, num_hidden_layers=1, hidden_size=4))
    run = SimpleNamespace(world=world, saver=saver, engine=SimpleNamespace(model=model), parameters=1.0)
    ids, empty = np.arange(5), Flat(np.zeros(1, np.int64), np.full(1, -100), np.zeros(1), np.array([0, 1]), 0, 0)
    batches = [Flat(ids, ids, ids, np.array([0, 2, 5], np.int32), 3, 4), empty]
    counts = reduce_counts(run, batches, state["stopped"])
    assert (counts.stop, counts.written, counts.due) == expected
    assert (counts.trained, counts.tokens) == (12, 15)
