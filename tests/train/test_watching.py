"""What people watch: the best evaluation and early stopping, answers to prompts, norms by layer, spikes, trackers."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from formats.errors import RefusedError, UsageError
from train.run.best import Best
from train.run.log import LEAST, Log
from train.settings.config import Config


def config_of(tmp_path="save", **evaluate):
    return Config(
        model={"path": "M"}, data={"train": ["P"], "seq_length": 8, "validation": {"eu": "E"}}, batch={},
        optim={"lr": 1e-3}, save={"path": str(tmp_path)}, evaluate=evaluate,
    )  # fmt: skip


@given(
    st.lists(st.integers(1, 6) | st.just(math.nan), min_size=1, max_size=12), st.integers(1, 3),
    st.sampled_from([0.0, 1.0]), st.sampled_from(["eu_loss", "eu_bleu"]),
)  # fmt: skip
def test_patience_and_best_are_those_of_transformers(values, patience, delta, metric):
    """The Trainer asks its callback before it updates the best metric."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

    best = Best(config_of(best=metric, metrics=["bleu"], patience=patience, min_delta=delta))
    callback = EarlyStoppingCallback(patience, delta)
    state, control, greater = TrainerState(), TrainerControl(), metric == "eu_bleu"
    arguments = SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater)
    for step, value in enumerate(values, 1):
        callback.on_evaluate(arguments, state, control, {f"eval_{metric}": float(value)})
        if state.best_metric is None:  # as `_determine_best_metric` begins
            state.best_metric = -math.inf if greater else math.inf
        if value > state.best_metric if greater else value < state.best_metric:
            state.best_metric, state.best_global_step = float(value), step
        best.add(step, float(value))
        assert (best.step, best.value) == (state.best_global_step, state.best_metric)
        assert best.is_over == control.should_training_stop
        if best.is_over:
            return


def test_a_set_of_which_no_token_is_trained_is_refused(monkeypatch):
    """Its loss would be 0, and its perplexity 1: the best of all."""
    from train.run import evaluate

    monkeypatch.setattr(evaluate, "rank_part", lambda flat, world: SimpleNamespace(trained=0, labels=[]))
    rows = type("Rows", (), {"__len__": lambda self: 2, "flat": lambda self, numbers: None})()
    world = SimpleNamespace(readers=1, reader=0, tensor=1, device="cpu", sums=lambda *sums: sums)
    trainee = type("Scoring", (), {"eval": lambda self: None, "__call__": lambda self, part, device: 0.0})()
    with pytest.raises(RefusedError, match=r"none of 2 rows of data\.validation\.eu has a token that is trained"):
        evaluate.evaluate(trainee, {"eu": rows}, world)


def test_a_metric_that_is_not_evaluated_is_refused():
    with pytest.raises(UsageError, match=r"evaluate.best is eu_bleu, which is not evaluated"):
        Best(config_of(best="eu_bleu"))


@pytest.mark.parametrize(("loss", "noted"), [(4.3, False), (9.0, True)])
def test_a_spike_is_noted_after_a_resume_too(tmp_path, loss, noted):
    from tests.train.test_loop import Step
    from train.run.checkpoint import Progress

    lines = []
    config = config_of(tmp_path)
    for number in range(1, LEAST + 2):
        progress = Progress(number, 0, 8, 1, "", 0, 100)
        value = loss if number == LEAST + 1 else 4 + number % 3 / 10
        step = Step(value, 1.0, 1, 1, 1.0, 1, 1e-3, stop=False, written=False, due=False)
        log = Log(config, 1, Progress(number - 1, 0, 8, 1, "", 0, 100), 100, None)  # each step by a job of its own
        log.line(progress, 100, step, 1.0, lines.append)
    notes = [line for line in lines if line.startswith("note ")]
    assert len(notes) == noted
    assert not noted or f"global step {LEAST + 1}: loss 9 is" in notes[0]


@pytest.fixture
def watched(settings, data, tmp_path):
    """Settings whose evaluations become worse: the learning rate is far too high."""

    def write(**sections):
        return settings(
            optim={"lr": 0.3, "clip": 0}, data={"validation": {"eu": str(data)}}, steps={"train_iters": 12},
            save={"every": 100}, evaluate={"every": 1, "max_rows": 4, "best": "eu", "patience": 2} | sections,
        )  # fmt: skip

    return write


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_training_stops_early_and_exports_the_best(watched, run, convert, tmp_path):
    config = watched()
    reference = run(config, "--export", tmp_path / "out")
    assert reference.code == 0, reference.out
    losses = [json.loads(line)["eu_loss"] for line in (reference.save / "evaluations.jsonl").read_text().splitlines()]
    place = losses.index(min(losses))
    assert len(losses) == place + 3 < 12
    best = f"global_step{101 + place}"
    assert (reference.save / "best").read_text() == best
    assert f"exported {best} to" in reference.out
    weights = [convert("digest", path).out.split()[0] for path in (reference.save / best, tmp_path / "out")]
    assert weights[0] != weights[1]  # float32 and bf16
    assert convert("digest", tmp_path / "out").code == 0
    assert "nothing left to do" in run(config).out
    assert not (reference.save / "RESUME").exists()
    resumed = run(config, "--steps.exit_interval", 1, "--save.keep", 1, ranks=2, save="two")
    for _ in range(len(losses)):
        assert resumed.code, resumed.out  # torchrun makes 1 of 75, and so do forks of several ranks
        resumed = run(config, "--steps.exit_interval", 1, "--save.keep", 1, ranks=2, save="two")
        if resumed.code == 0:
            break
    assert (resumed.save / "best").read_text() == best
    assert sorted(path.name for path in resumed.save.glob("global_step*")) == sorted(
        {best, f"global_step{100 + len(losses)}"}
    )
    others = [json.loads(line)["eu_loss"] for line in (resumed.save / "evaluations.jsonl").read_text().splitlines()]
    assert others == pytest.approx(losses, abs=1e-4)


@pytest.mark.timeout(300)
def test_best_follows_the_evaluations_when_a_run_was_set_back(watched, run, tmp_path):
    ran = run(watched(every=2), "--steps.train_iters", 4, "--save.every", 2)
    assert ran.code == 0, ran.out
    best = (ran.save / "best").read_text()
    other = {"global_step102": "global_step104", "global_step104": "global_step102"}[best]
    (ran.save / "best").write_text(other)  # as if the run had been set back, and trained with other settings
    ran = run(watched(every=2), "--steps.train_iters", 4, "--save.every", 2, "--export", tmp_path / "out")
    assert (ran.code, f"exported {best} to" in ran.out) == (0, True), ran.out
    assert (ran.save / "best").read_text() == best


@pytest.mark.timeout(300)
def test_an_evaluation_that_a_kill_has_lost_is_told(watched, run, train, tmp_path):
    """The job was killed in it, after its checkpoint was written."""
    argv = ("--optim.lr", 1e-3, "--steps.train_iters", 4, "--save.every", 2)
    ran = run(watched(every=2), *argv)
    evaluations, whole = ran.save / "evaluations.jsonl", (ran.save / "evaluations.jsonl").read_text()
    best = (ran.save / "best").read_text()
    assert best == "global_step104", whole
    evaluations.write_text(whole.splitlines(keepends=True)[0] + '{"step": 4, "glo')
    (ran.save / "best").write_text("global_step102")
    ran = run(watched(every=2), *argv, "--export", tmp_path / "out")
    told = "the evaluation of global_step104 was due and is not in evaluations.jsonl"
    command = f"train eval {ran.save} --checkpoint 104"
    assert (ran.code, told in ran.out, command in ran.out) == (5, True, True), ran.out
    assert not (tmp_path / "out").exists()
    assert told in run(watched(every=2), *argv).out
    evaluated = train("eval", ran.save, "--checkpoint", 104)
    assert (evaluated.code, "had another" in evaluated.err) == (0, False), evaluated.err
    assert [json.loads(line)["global_step"] for line in evaluations.read_text().splitlines()] == [102, 104]
    ran = run(watched(every=2), *argv, "--export", tmp_path / "out")
    assert (ran.code, f"exported {best} to" in ran.out) == (0, True), ran.out


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_answers_are_those_of_generate(data, talker, run, tmp_path):
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.train.conftest import tree_of

    tree = tree_of(talker, data, tmp_path / "save")
    tree["data"] |= {"validation": {"eu": str(data)}}
    tree["steps"] = {"train_iters": 2}
    tree["evaluate"] = {"prompts": ["Sveiki!", "saule un upe"], "new_tokens": 12, "max_rows": 2}
    (tmp_path / "c.yml").write_text(yaml.safe_dump(tree))
    trained = run(tmp_path / "c.yml", "--export", tmp_path / "out", ranks=2)
    assert trained.code == 0, trained.out
    assert "answer     Sveiki! ->" in trained.out
    generations = [json.loads(line) for line in (trained.save / "generations.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in generations] == [2, 2]
    folder = tmp_path / "whole"
    shutil.copytree(tmp_path / "out", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for line in generations:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": line["prompt"]}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        ids = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
        ends = model.generation_config.eos_token_id
        ended = ids[-1] in (ends if isinstance(ends, list) else [ends])
        assert (line["ended"], line["text"]) == (ended, tokenizer.decode(ids[: len(ids) - ended]))


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_norms_of_layers_are_those_of_a_plain_loop(settings, run, model, data):
    from transformers import AutoModelForCausalLM

    from train.data.rows import open_rows
    from train.settings.batching import Order
    from train.settings.config import Data

    config = settings(steps={"train_iters": 1}, log={"layer_norms": True})
    plain = AutoModelForCausalLM.from_pretrained(model("llama", vocab_size=253), dtype=torch.float32)
    rows = open_rows(Data(train=[data], seq_length=64), [data], 1234)
    flat = rows.flat([Order(len(rows), 1234, 8).row(sample) for sample in range(8)])
    total = 0.0
    for begin, stop in zip(flat.cu_seqlens[:-1], flat.cu_seqlens[1:], strict=True):
        ids, labels = (torch.from_numpy(array[begin:stop]) for array in (flat.input_ids, flat.labels))
        logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    (total / flat.trained).backward()
    expected = {}
    for name, tensor in plain.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else None
        key = f"grad_norm/layers.{layer}" if layer else "grad_norm/" + name.split(".")[-2]
        expected[key] = expected.get(key, 0) + float(tensor.grad.double().square().sum())
    for options, ranks in (((), 1), (("--parallel.replicas", 2), 4)):
        (line,) = run(config, *options, ranks=ranks, save=f"s{ranks}").lines
        norms = {name: value for name, value in line.items() if name.startswith("grad_norm/")}
        assert norms == pytest.approx({name: value**0.5 for name, value in expected.items()}, abs=1e-5)
        assert sum(value**2 for value in norms.values()) ** 0.5 == pytest.approx(line["grad_norm"], abs=1e-5)


def test_mlflow_goes_on(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    from train.run.trackers import open_tracker

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step in (1, 2):
        open_tracker("mlflow", config_of(tmp_path), step)(step, {"loss": 4.0 - step})
        mlflow.end_run()
    (tracked,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
    history = mlflow.MlflowClient().get_metric_history(tracked.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.0), (2, 2.0)]
    assert tracked.data.params["optim.lr"] == "0.001"


def test_a_tracker_of_transformers_gets_each_step(tmp_path, monkeypatch):
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    from formats.errors import UnsupportedError
    from train.run.trackers import open_tracker

    calls = []

    class Callback(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            calls.append((args.run_name, state.global_step, state.is_world_process_zero, logs))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", Callback)
    open_tracker("trackio", config_of(tmp_path), 0)(7, {"loss": 1.5})
    assert calls == [(tmp_path.name, 7, True, {"loss": 1.5})]
    with pytest.raises(UnsupportedError, match="clearml, which is not installed"):
        open_tracker("clearml", config_of(tmp_path), 0)
