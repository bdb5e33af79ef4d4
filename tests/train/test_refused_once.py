"""What is wrong is told once, in one sentence and in the user's names, before the first step."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("torch")

from formats.errors import SourceError, UsageError
from tests.train.conftest import GOLDEN, spawn
from tests.train.neox_files import BARE, PHASE
from train.data.tokens.indexed import open_indexed
from train.run.checkpoint import Progress, read_progress
from train.settings.config_file import load_config
from train.settings.effects import check_effect
from train.settings.schedule import check_schedule


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (["--optim.lrr", "3"], "error: {path}: optim.lrr is no setting", 2),  # of all ranks, before they meet
        (["--data.train", "[/nowhere/P]"], "error: /nowhere/P.idx is not there", 3),  # of all ranks, when they have met
        (["--init", "resume"], "error: {save} has no checkpoint to resume from", 5),  # found out by the first rank
    ],
    ids=["setting", "data", "resume"],
)
def test_ranks_of_torchrun_refuse_once(settings, tmp_path, options, message, code):
    path = settings()
    ran = spawn(["run", str(path), *options], 2)
    out, _ = ran.communicate(timeout=120)
    assert ran.returncode == 1, out  # torchrun's own, whatever that of its ranks is
    assert out.count("error: ") == 1, out
    assert message.format(path=path, save=tmp_path / "save") in out
    assert re.search(rf"exitcode  : {code} ", out), out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "step is missing"),
        ("", "it is no JSON"),
        ("[1]", "it is no object"),
        ('{"step": 2', "it is no JSON"),
        ({"step": "2"}, "step is '2'"),
        ({"step": True}, "step is True"),
        ({"step": 2.0}, "step is 2.0"),
        ({"samples": -1}, "samples is -1"),
        ({"rows": None}, "rows is None"),
        ({"engine": "magic"}, "engine is 'magic'"),
        ({"later": 1}, "later is not known to this version"),
        ({"step": 10**40}, "step 1000"),
        ({"offset": 7}, "step 2 after 7 is not global_step2"),
    ],
    ids=str,
)
def test_a_damaged_note_says_what_is_wrong(tmp_path, text, why):
    folder = tmp_path / "global_step2"
    folder.mkdir()
    note = text if isinstance(text, str) else json.dumps(vars(Progress(2, 0, 4, 1, "rows", 9, 24)) | text)
    (folder / ".progress").write_text(note)
    with pytest.raises(SourceError, match=re.escape(why)) as failed:
        read_progress(folder)
    assert str(failed.value).startswith(f"{folder / '.progress'} does not tell how far the training was: ")
    assert failed.value.hint == f"take an earlier checkpoint: echo global_stepN > {tmp_path / 'latest'}"


@pytest.mark.parametrize("length", [0, 5, 9, 20, 33, 34, 50, -1])
def test_a_cut_index_is_said_to_be_cut(tmp_path, length):
    for kind in ("bin", "idx"):
        shutil.copy(GOLDEN / f"sft_text_document.{kind}", tmp_path / f"P.{kind}")
    content = (tmp_path / "P.idx").read_bytes()
    (tmp_path / "P.idx").write_bytes(content[:length])
    with pytest.raises(SourceError, match=r"P\.idx is cut short: it has ") as failed:
        open_indexed(tmp_path / "P")
    assert failed.value.hint == "copy it again, or tokenize again"
    (tmp_path / "P.idx").write_bytes(b"\x89PNG" + content)
    with pytest.raises(SourceError, match=r"is no index of token files"):
        open_indexed(tmp_path / "P")


def test_rates_are_told_in_the_names_of_the_user(read):
    low = PHASE.replace('"lr": 1.6e-4', '"lr": 8.0e-6')
    with pytest.raises(UsageError) as failed:
        check_schedule(read(low)[0], 100)
    assert str(failed.value) == "min_lr (schedule.floor) 3e-05 is above optimizer.params.lr (optim.lr) 8e-06"
    assert failed.value.hint.endswith("--schedule.floor 0 removes the bound")
    check_schedule(read(low, "--schedule.floor", "0")[0], 100)
    with pytest.raises(UsageError, match=r"^min_lr \(schedule\.floor\) 3e-05 is above optim\.lr 1e-06"):
        check_schedule(read(PHASE, "--optim.lr", "1e-6")[0], 100)


def test_a_warm_up_fits_the_run(read):
    config = read(BARE, "--schedule.warmup", "101")[0]
    with pytest.raises(UsageError, match=r"schedule\.warmup takes 101 steps, the run has 100: "):
        check_schedule(config, 100)
    for right in ("100", "all", "0.5", "0"):
        check_schedule(read(BARE, "--schedule.warmup", right)[0], 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--evaluate.metrics", "[rouge]"], "evaluate.metrics is ['rouge'], and data.validation names no set"),
        (["--evaluate.max_rows", "3"], "evaluate.max_rows is 3, and data.validation names no set"),
        (["--evaluate.tokenizer", "a.model"], "evaluate.tokenizer is a.model, and data.validation names no set"),
        (["--profile.kind", "trace", "--profile.after", "8"], "profile.after 8 and profile.steps 1 take 9 steps"),
    ],
    ids=str,
)
def test_settings_without_effect(settings, train, options, message):
    config = settings()
    with pytest.raises(UsageError, match=re.escape(message)):
        check_effect(load_config(config, options)[0], 8)
    ran = train("plan", config, *options)
    assert (ran.code, message in ran.err) == (2, True), ran.err


def test_what_a_phase_takes_up_is_said(read):
    (resume_note,) = [note for note in read(BARE)[1] if note.startswith("no finetune")]
    assert "resumes from a checkpoint of this trainer with its moments" in resume_note


def test_settings_that_are_no_utf_8(tmp_path, settings, train):
    text = settings().read_text()
    (tmp_path / "wide.yml").write_bytes(text.encode("utf-16"))
    ran = train("plan", tmp_path / "wide.yml")
    assert ran.code == 2
    assert "wide.yml is not UTF-8" in ran.err
    (tmp_path / "bom.yml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_config(tmp_path / "bom.yml")[0] == load_config(settings())[0]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_another_json_is_no_tokenizer(settings, train, run, tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"model_type": "llama"}))
    message = f"{tmp_path / name} is no tokenizer: it has no model"
    ran = run(settings(model={"tokenizer": str(tmp_path / name)}))
    assert (ran.code, message in ran.out) == (3, True), ran.out
    assert "hint: a tokenizer.json is one" in ran.out
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    options = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "P", "--vocab-file", tmp_path / name]
    ran = train("tokenize", *options)
    assert (ran.code, message in ran.err) == (3, True), ran.err
