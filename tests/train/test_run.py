"""Trainings on gloo: the same on any ranks, and the same after any interruption."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time

import pytest
import yaml

from tests.train.conftest import Trained, spawn, tree_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
NEAR = 2e-6
"""Of losses around 5 and norms around 3: sums in another order."""


@pytest.fixture(scope="module")
def reference(model, data, forks, tmp_path_factory):
    """The training that nothing interrupts, on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.yml").write_text(yaml.safe_dump(tree_of(model("llama", vocab_size=253), data, folder / "save")))
    trained = Trained(*forks(["run", str(folder / "config.yml")], 1), folder / "save")
    assert trained.code == 0, trained.out
    return trained


def require_same(ran, expected, near=NEAR):
    assert ran.series("trained_tokens") == expected.series("trained_tokens")
    assert ran.series("global_step") == list(range(101, 109))
    for name in ("loss", "grad_norm"):
        assert ran.series(name) == pytest.approx(expected.series(name), abs=near), name


def test_ranks_meshes_and_micro_batches_change_nothing(settings, run, reference):
    config = settings()
    require_same(run(config, ranks=2, save="two"), reference)
    require_same(run(config, "--parallel.replicas", 2, "--batch.micro", 1, ranks=4, save="hsdp"), reference)
    require_same(run(config, "--batch.micro", 8, save="micro"), reference)
    require_same(
        run(config, "--model.activation_checkpointing", "false", "--model.attention", "eager", save="e"), reference
    )


def test_an_interrupted_training_goes_on_bit_for_bit(settings, run, reference, convert):
    config = settings()
    stopped = run(config, "--steps.exit_interval", 4)
    assert stopped.code == 75, stopped.out
    assert "stopped after step 4 of 8, saved as global_step104" in stopped.out
    assert (stopped.save / "latest").read_text() == "global_step104"
    resumed = run(config)
    assert resumed.code == 0, resumed.out
    assert resumed.series("loss") == reference.series("loss")
    assert resumed.series("grad_norm") == reference.series("grad_norm")
    ours, theirs = (convert("digest", result.save / "global_step108").out.split()[0] for result in (resumed, reference))
    assert ours == theirs


def test_time_that_is_up_ends_all_ranks_at_the_same_step(settings, run, reference):
    config = settings()
    stopped = run(config, "--steps.exit_minutes", 0.0001, ranks=2)
    assert re.search(r"stopped after step [12] of 8, saved as global_step10[12]", stopped.out), stopped.out
    assert stopped.out.count("stopped after") == 1, "one rank tells for all"
    require_same(run(config, ranks=2), reference)


def test_loading_is_part_of_the_time(settings, monkeypatch):
    import train
    from train.run.step import time_is_up
    from train.settings.config_file import load_config

    monkeypatch.setattr("train.run.step.BEGAN", train.BEGAN - 90)
    assert time_is_up(load_config(settings(steps={"exit_minutes": 1.5}))[0])
    assert not time_is_up(load_config(settings())[0])
    monkeypatch.setattr("train.run.step.BEGAN", time.monotonic())
    assert not time_is_up(load_config(settings(steps={"exit_minutes": 1.5}))[0])


def test_checkpoints_by_the_clock(settings, run, reference):
    config = settings(save={"every": 1000, "every_minutes": 1e-6})
    ran = run(config, ranks=2)
    results = [ran.save / f"perplexity/{name}.csv" for name in ("103", "105", "tests/108", "109", "mean")]
    results[2].parent.mkdir(parents=True)
    for path in results:
        path.touch()
    require_same(ran, reference)
    names = sorted(path.name for path in ran.save.glob("global_step*"))
    assert names == [f"global_step{number}" for number in range(101, 109)]
    for name in names[3:]:
        shutil.rmtree(ran.save / name)
    (ran.save / "latest").write_text("global_step103")
    require_same(run(config, "--save.every_minutes", 60), reference)
    assert [path.name for path in results if path.is_file()] == ["103.csv", "109.csv", "mean.csv"]
    left = sorted(path.name for path in ran.save.glob("global_step*"))
    assert left == [*names[:3], "global_step108"]


def test_it_goes_on_with_other_ranks(settings, run, reference):
    config = settings()
    ran = spawn(["run", str(config), "--save.path", str(config.parent / "save"), "--steps.exit_interval", "3"], 2)
    out, _ = ran.communicate(timeout=120)
    assert ran.returncode, out  # torchrun makes 1 of 75
    require_same(run(config, ranks=4, save="save"), reference)


def test_killed_at_any_moment(settings, run, forks, reference, convert, tmp_path):
    """kill -9, again and again: the series and the weights are those of the unbroken run, on other ranks nearly so."""
    config, chosen, killed = settings(save={"every": 1}), random.Random(3), 0
    log = tmp_path / "save/log.jsonl"
    for _ in range(5):
        before = log.read_text() if log.is_file() else ""
        ran = forks.start(["run", str(config), "--save.path", str(tmp_path / "save")])
        while ran.poll() is None and (not log.is_file() or log.read_text() == before):
            time.sleep(0.02)
        if ran.wait(chosen.uniform(0, 0.6)) is None:
            ran.send(signal.SIGKILL)
            assert ran.wait(60) == -signal.SIGKILL
            killed += 1
    assert killed
    shutil.copytree(tmp_path / "save", tmp_path / "other")
    require_same(run(config, ranks=2, save="other"), reference)
    last = run(config)
    assert last.code == 0, last.out
    require_same(last, reference, near=0)
    ours, theirs = (convert("digest", result.save / "global_step108").out.split()[0] for result in (last, reference))
    assert ours == theirs


@pytest.mark.parametrize("engine", ["fsdp", "transformers"])
def test_sigterm_saves_and_ends_with_75(settings, forks, tmp_path, engine):
    config = settings(engine=engine, steps={"train_iters": 400}, save={"every": 1000})
    ran = forks.start(["run", str(config), "--save.path", str(tmp_path / "save")])
    log = tmp_path / "save/log.jsonl"
    for _ in range(2400):
        if log.is_file() and log.read_text().count("\n") > 2:
            break
        time.sleep(0.05)
    ran.send(signal.SIGTERM)
    code, out = ran.wait(60), ran.out.read_text()
    assert code == 75, out
    done = json.loads((tmp_path / "save" / (tmp_path / "save/latest").read_text() / ".progress").read_text())["step"]
    assert done == len(log.read_text().splitlines())
    assert f"stopped after step {done} of 400" in out


@pytest.mark.parametrize("family", ["llama-tied", "mistral", "qwen3", "gpt_neox"])
def test_every_family_trains_and_converts_without_a_flag(settings, run, convert, tmp_path, family):
    config = settings(family, steps={"train_iters": 3})
    ran = run(config, "--export", tmp_path / "out", ranks=2)
    assert ran.code == 0, ran.out
    losses = ran.series("loss")
    assert losses[-1] < losses[0]
    verified = convert("verify", tmp_path / "out", "--json")
    assert verified.code == 0, verified.err


def test_an_export_has_the_chat_template_that_is_asked_for(settings, run, talker, tmp_path):
    shutil.copytree(talker, tmp_path / "start")
    (tmp_path / "start/chat_template.jinja").unlink()
    config = settings(steps={"train_iters": 1}, model={"path": str(tmp_path / "start")})
    ran = run(config, "--export", tmp_path / "out", "--chat_template", "control")
    assert ran.code == 0, ran.out
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (talker / name).read_bytes()


def test_perplexity_is_the_same_on_any_ranks(settings, run, data):
    config = settings(data={"validation": {"one": str(data), "two": str(data)}}, steps={"train_iters": 2})
    scores = []
    for ranks in (1, 3):
        ran = run(config, "--batch.micro", "1", "--batch.size", "6", ranks=ranks, save=f"eval{ranks}")
        assert ran.code == 0, ran.out
        assert "global_step=102 one: eval_ppl=" in ran.out
        scores.append(json.loads((ran.save / "evaluations.jsonl").read_text()))
        head, values = (ran.save / "perplexity/102.csv").read_text().splitlines()
        assert head == "time,step,one_TotalCE,one_CE,one_PPL,two_TotalCE,two_CE,two_PPL"
        assert float(values.split(",")[3]) == scores[-1]["one_loss"] == scores[-1]["two_loss"]
    assert scores[0]["one_loss"] == pytest.approx(scores[1]["one_loss"], abs=NEAR)


WATCHED = """
from pathlib import Path
from train.run import step
from train.cli import main
evaluate = step.evaluate

def watched(trainee, sets, world, *more):
    if world.first:
        print("latest is", Path("SAVE/latest").read_text(), flush=True)
    return evaluate(trainee, sets, world, *more)

step.evaluate = watched
main()
"""


@pytest.mark.parametrize("engine", ["fsdp", "transformers"])
def test_a_checkpoint_has_its_name_before_an_evaluation(settings, forks, data, tmp_path, engine):
    config = settings(engine=engine, data={"validation": {"one": str(data)}}, steps={"train_iters": 2})
    (tmp_path / "watched.py").write_text(WATCHED.replace("SAVE", str(tmp_path / "save")))
    code, out = forks(["run", str(config), "--save.every", "1", "--evaluate.max_rows", "1"], 1, tmp_path / "watched.py")
    assert (code, re.findall("latest is (.*)", out)) == (0, ["global_step101", "global_step102"]), out


def test_bf16_is_near(settings, run, reference):
    require_same(run(settings(model={"dtype": "bf16"}), save="bf16"), reference, near=0.05)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--optim.rl", "1"], 2, "did you mean optim.lr?"),
        (["--optim.lr", "fast"], 2, "optim.lr is 'fast'"),
        (["--batch.micro", "3"], 2, "batch.size is 8"),
        (["--steps.epochs", "1"], 2, "give one of steps.train_iters and steps.epochs"),
        (["--parallel.replicas", "2"], 2, "1 ranks cannot be 2 replicas"),
        (["--model.path", "nowhere"], 3, "nowhere does not exist"),
        (["--init", "resume"], 5, "no checkpoint to resume from"),
        (["--data.train", "[nowhere]"], 3, "nowhere.idx is not there"),
    ],
)
def test_wrong_settings_are_one_sentence(settings, run, options, code, message):
    ran = run(settings(), *options)
    assert ran.code == code, ran.out
    assert message in ran.out
    assert "Traceback" not in ran.out


def test_another_run_in_the_same_folder_is_refused(settings, run):
    assert run(settings()).code == 0
    other = run(settings(), "--seed", 5)
    assert other.code == 5
    assert "seed: 1234, now 5" in other.out
    finetuned = run(settings(), "--init", "finetune")
    assert (finetuned.code, "nothing left to do" in finetuned.out) == (0, True), finetuned.out
    other = run(settings(), "--init", "finetune", "--seed", 5)
    assert (other.code, "seed: 1234, now 5" in other.out) == (5, True), other.out
