"""A flipped bit in a checkpoint that a training would resume from, or begin with."""

from __future__ import annotations

import pytest

from tests.faults.dcp_tools import save, weights
from tests.faults.test_source_checksums import flip, flip_weight
from tests.train.test_deepspeed import zero

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("engine", "ranks"), [("fsdp", 2), ("deepspeed", 2)])
def test_a_damaged_checkpoint_is_not_resumed(settings, run, engine, ranks):
    """Of whichever rank: one sentence with the name of the file, and none about the learning rate."""
    options = zero(2) if engine == "deepspeed" else []
    config = settings(save={"every": 1})
    stopped = run(config, "--steps.exit_interval", 2, *options, ranks=ranks)
    assert stopped.code == 75, stopped.out
    newest = stopped.save / "global_step102"
    path = max(newest.glob("*.distcp" if engine == "fsdp" else "*optim_states.pt"), key=lambda file: file.name)
    flip(path, path.stat().st_size // 2)
    ran = run(config, *options, ranks=ranks)
    assert ran.code == 3, ran.out
    assert ran.out.count("error: ") == 1, ran.out
    assert f"{newest} is damaged: 1 parts are not what was written: {path}: " in ran.out
    assert f"echo global_step101 > {stopped.save}/latest" in ran.out
    assert "optim.lr" not in ran.out


def test_a_training_does_not_begin_with_damaged_weights(settings, run, model, tmp_path):
    """Those of a checkpoint in another format are converted, and checked there."""
    base = model("llama", vocab_size=253)
    start = save(tmp_path / "start", weights(base))
    path = flip_weight(start, config=base)
    ran = run(settings(), "--model.path", start, "--model.config", base)
    assert ran.code == 3, ran.out
    assert f"{path} is damaged: the " in ran.out
