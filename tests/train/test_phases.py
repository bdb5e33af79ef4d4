"""Where a training begins: any checkpoint, its own latest, or the end of the phase before it in the same folder."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def steps(run):
    return run.series("global_step")


def test_phases_follow_each_other_in_one_folder(settings, run):
    """F60: the next phase takes up weights and moments, has its own rows, and its first checkpoint survives `keep`."""
    first = run(settings(steps={"train_iters": 4}))
    assert first.code == 0, first.out
    second = settings(steps={"train_iters": 6, "iteration_offset": 104}, save={"keep": 1, "every": 2}, seed=7)
    stopped = run(second, "--steps.exit_interval", 3)
    assert stopped.code == 75, stopped.out
    assert "weights    " + str(stopped.save / "global_step104") in stopped.out
    assert (stopped.save / "RESUME").is_file()
    done = run(second)
    assert done.code == 0, done.out
    assert not (done.save / "RESUME").exists()
    assert steps(done) == list(range(101, 111))
    assert done.series("step") == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in done.save.glob("global_step*")) == ["global_step104", "global_step110"]
    moments = done.series("loss")[4]
    fresh = run(second, "--model.path", first.save / "global_step104", save="fresh")
    assert fresh.series("loss")[0] == pytest.approx(moments, abs=1e-6)  # the same weights ...
    assert fresh.series("loss")[1:] != done.series("loss")[5:]  # ... and no moments
    third = run(settings(steps={"train_iters": 2, "iteration_offset": 109}))
    assert third.code == 5
    assert "steps.iteration_offset: 104, now 109" in third.out


def test_a_surplus_job_ends_at_once(settings, run):
    config = settings(steps={"train_iters": 2})
    first = run(config, "--export", "")
    assert first.code == 0, first.out
    log = (first.save / "log.jsonl").read_bytes()
    surplus = run(config)
    lines = [line for line in surplus.out.splitlines() if not line.startswith("[Gloo]")]  # as it does in torch 2.10
    assert (surplus.code, lines) == (0, ["nothing left to do: global_step102 is after the last of 2 steps"])
    assert (surplus.save / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("how", ["megatron", "fsdp", "neox"])
def test_any_checkpoint_is_a_start(settings, run, model, convert, tmp_path, how):
    folder = model("llama", vocab_size=253)
    argv = {"megatron": ["hf2megatron", "--tp", 2], "fsdp": ["hf2fsdp"], "neox": ["hf2neox", "--tp", 2]}[how]
    converted = convert(argv[0], folder, tmp_path / how, *argv[1:])
    assert converted.code == 0, converted.err
    config = settings(steps={"train_iters": 2})
    ran = run(config, "--model.path", tmp_path / how, "--model.config", folder, ranks=2, save="any")
    assert ran.code == 0, ran.out
    assert f"weights    {tmp_path}/any/start" in ran.out
    assert ran.series("loss") == pytest.approx(run(config).series("loss"), abs=2e-6)


def test_dropout_goes_on_bit_for_bit(settings, run, model, tmp_path):
    folder = model("gpt_neox", vocab_size=253, hidden_dropout=0.3)
    config = settings("gpt_neox", steps={"train_iters": 4})
    still = run(config, save="still")
    config = settings("gpt_neox", steps={"train_iters": 4}, model={"path": str(folder)})
    reference = run(config, save="whole")
    assert abs(reference.series("loss")[0] - still.series("loss")[0]) > 1e-3
    assert run(config, "--steps.exit_interval", 2).code == 75
    assert run(config).series("loss") == reference.series("loss")


def test_a_run_keeps_its_settings(settings, run, tmp_path):
    from train.settings.config_file import load_config

    config = settings(steps={"train_iters": 1})
    done = run(config, "--optim.lr", "5e-4")
    assert done.code == 0, done.out
    saved, notes = load_config(done.save / "config.yml")
    assert not notes
    assert saved == load_config(config, ["--optim.lr", "5e-4"])[0]
    assert json.loads((done.save / "global_step101/.progress").read_text())["step"] == 1
