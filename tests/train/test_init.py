"""Run folders: what `train init` writes is what `train run` takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from tests.train.conftest import GOLDEN, ROOT
from train.data.rows import open_rows
from train.settings.config import Config, Lora, keys
from train.settings.config_file import load_config


def test_every_setting_is_there_and_explained(train, model, data, tmp_path):
    ran = train("init", tmp_path / "run", "--from", model("llama", vocab_size=253), "--data", data)
    assert ran.code == 0, ran.err
    text = (tmp_path / "run/config.yml").read_text()
    for name, explanation in keys().items():
        lines = [line for line in text.splitlines() if line.strip().lstrip("# ").startswith(f"{name.split('.')[-1]}:")]
        assert any(explanation in line for line in lines), name
    assert "(tensorboard | wandb | mlflow | " in text
    assert "(rouge | bleu)" in text
    config, notes = load_config(tmp_path / "run/config.yml")
    assert not notes
    assert (config.model.path, config.data.train) == (tmp_path / "run/start", [data])
    assert (config.data.seq_length, config.steps.iteration_offset) == (128, 0)
    assert not config.model.path.readlink().is_absolute()


def test_what_is_commented_out_is_the_default(train, model, data, tmp_path):
    assert train("init", tmp_path / "run", "--from", model("llama", vocab_size=253), "--data", data).code == 0
    lines = (tmp_path / "run/config.yml").read_text().splitlines()[3:]
    bare = [line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line for line in lines]
    tree = yaml.safe_load("\n".join(line for line in bare if not line.split("#")[0].rstrip().endswith(": null")))
    tree["steps"].pop("train_iters", None)
    assert Lora(**tree.pop("lora")) == Lora()
    given, _ = load_config(tmp_path / "run/config.yml")
    assert Config(**{name: section for name, section in tree.items() if section is not None}) == given


@pytest.mark.distributed
def test_a_phase_begins_at_a_step_and_another_follows(train, run, model, data, tmp_path):
    """F13, F58, F60: the start is linked beside what is to come; the next phase goes on in the same folder."""
    start = tmp_path / "final_train_v2/global_step423858"
    start.parent.mkdir()
    start.symlink_to(model("llama", vocab_size=253))
    ran = train("init", tmp_path / "one", "--from", start, "--data", data)
    assert ran.code == 0, ran.err
    save = tmp_path / "one/checkpoints"
    assert (save / "latest").read_text() == "global_step423858"
    assert (save / "global_step423858").readlink().parts[:3] == ("..", "..", "final_train_v2")
    text = (
        (tmp_path / "one/config.yml")
        .read_text()
        .replace("epochs: 1 ", "train_iters: 2 ")
        .replace("size: 64", "size: 8")
    )
    (tmp_path / "one/config.yml").write_text(text)
    options = ["--model.dtype", "fp32", "--data.seq_length", "64", "--save.keep", "1"]
    first = run(tmp_path / "one/config.yml", *options, save="one/checkpoints")
    assert first.code == 0, first.out
    ran = train("init", tmp_path / "two", "--after", tmp_path / "one/config.yml", "--data", data)
    assert ran.code == 0, ran.err
    second = run(tmp_path / "two/config.yml", *options, "--steps.train_iters", 2, save="one/checkpoints")
    assert second.code == 0, second.out
    assert second.series("global_step") == [423859, 423860, 423861, 423862]
    left = sorted(path.name for path in save.glob("global_step*"))
    assert left == ["global_step423858", "global_step423860", "global_step423862"]


def test_the_folder_of_a_run_is_its_latest_checkpoint(train, model, data, convert, tmp_path):
    ran = convert("hf2neox", model("llama", vocab_size=253), tmp_path / "final", "--iteration", 423858)
    assert ran.code == 0, ran.err
    assert (tmp_path / "final/latest").read_text().strip() == "global_step423858"
    ran = train("init", tmp_path / "run", "--from", tmp_path / "final", "--data", data)
    assert ran.code == 0, ran.err
    config, _ = load_config(tmp_path / "run/config.yml")
    assert config.steps.iteration_offset == 423858
    assert config.model.path.readlink().name == "global_step423858"


def test_the_steps_of_the_next_phase_are_those_of_its_data(train, data, tmp_path):
    """F58: `train_iters` of a yml is a number of its own pack."""
    (tmp_path / "U1.yml").write_text(
        f"train_data_paths: [/gone]\nvalid_data_paths: [{data}]\nseq_length: 64\ntrain_batch_size: 8\n"
        "train_iters: 29790\niteration_offset: 2000\noptimizer: {type: Adam, params: {lr: 1.6e-4}}\n"
        "lr_decay_style: constant\nwarmup: 0\npack_impl: k_bin_packed\nsave: /c\nload: /c\n"
    )
    ran = train("init", tmp_path / "N_2", "--after", tmp_path / "U1.yml", "--data", data)
    assert ran.code == 0, ran.err
    config, notes = load_config(tmp_path / "N_2/config.yml")
    rows = len(open_rows(config.data, [data], config.seed))
    assert (config.steps.train_iters, config.steps.iteration_offset) == (-(-rows // 8), 31790)
    assert (config.data.train, config.data.validation, notes) == ([data], {data.name: data}, [])
    assert (config.schedule.style, config.data.loss, config.optim.weight_decay) == ("constant", "all", 0.1)


@pytest.mark.parametrize(
    ("schedule", "warmup"),
    [({}, 0.1), ({"end": 8}, 0.1), ({"end": 20}, 0.0), ({"style": "constant"}, 0.0)],
)
def test_the_next_phase_warms_up_where_the_rate_begins_anew(train, settings, data, tmp_path, schedule, warmup):
    before = settings(schedule={"warmup": 0.1, **schedule}, export=str(tmp_path / "out"), steps={"iteration_offset": 0})
    ran = train("init", tmp_path / "two", "--after", before, "--data", data)
    assert ran.code == 0, ran.err
    config, _ = load_config(tmp_path / "two/config.yml")
    assert (config.schedule.warmup, config.export, config.steps.iteration_offset) == (warmup, None, 8)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--from", "nowhere"], 3, "nowhere does not exist"),
        ([], 2, "give one of --from CHECKPOINT and --after CONFIG"),
        (["--from", "MODEL", "--data", "nothing"], 3, "nothing.idx is not there"),
        (["--from", "MODEL", "--full"], 7, "has something in it"),
    ],
)
def test_what_cannot_be_begun(train, model, data, tmp_path, options, code, message):
    if "--full" in options:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/file").touch()
    named = [str(model("llama", vocab_size=253)) if word == "MODEL" else word for word in options if word != "--full"]
    ran = train("init", tmp_path / "run", *named, "--data", data)
    assert ran.code == code
    assert message in ran.err


def test_a_full_disk_is_told_with_the_file(model, data, tmp_path):
    start = model("llama", vocab_size=253)
    argv = ["tests.data.limited", "4096", "init", tmp_path / "run", "--from", start, "--data", data]
    line = [sys.executable, "-m", *map(str, argv)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (7, f"error: {tmp_path / 'run/config.yml'}: File too large\n")
    assert not (tmp_path / "run/config.yml").exists()


def test_the_doctor_looks_at_this_machine(train):
    ran = train("doctor")
    assert ran.code == 0, ran.err
    assert "torch             2." in ran.out
    assert "attention sdpa    documents of a row differ by" in ran.out
    assert "attention flash   the attention flash does not compute llama in float32 on cpu here" in ran.out


def test_the_doctor_wants_a_model(train, tmp_path):
    ran = train("doctor", tmp_path / "none")
    assert (ran.code, "none/config.json: " in ran.err) == (3, True), ran.err


@pytest.mark.distributed
def test_the_doctor_adds_up_ranks(forks):
    code, out = forks(["doctor", "--json"], 3)
    assert code == 0, out
    assert "3 ranks sum 67.1 MB" in out


def test_token_files_by_any_of_their_names(train, model, data, tmp_path):
    for number, end in enumerate((".bin", ".idx")):
        ran = train("init", tmp_path / str(number), "--from", model("llama", vocab_size=253), "--data", f"{data}{end}")
        assert ran.code == 0, ran.err


def test_a_refused_training_tells_where_it_looked(run, settings):
    """Paths begin where the command is run."""
    ran = run(settings(), "--data.train", "[../gone]")
    assert (ran.code, f"{ROOT}/../gone.idx is not there" in ran.out) == (3, True), ran.out


def test_an_order_that_nobody_guesses_is_told_once(train, data, tmp_path):
    """Where heads share keys in GPT-NeoX: `init` takes what `convert` takes, and the settings keep it."""
    argv = ("init", tmp_path / "run", "--from", GOLDEN.parents[1] / "neox/llama-grouped-tp2", "--data", data)
    assert train(*argv).code == 3
    assert train(*argv, "--gqa-layout", "grouped").code == 0
    planned = train("plan", tmp_path / "run/config.yml")
    assert (planned.code, "13,984 parameters" in planned.out) == (0, True), planned.err
