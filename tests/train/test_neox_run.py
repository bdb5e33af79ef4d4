"""A training as GPT-NeoX's users begin it: their checkpoint, their token files, their yml, one job after the other."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.train.conftest import GOLDEN

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
YML = """{{
  "train_data_paths": ["{data}"], "valid_data_paths": ["{data}"], "seq_length": 64, "vocab_file": "{vocab}",
  "pack_impl": "k_bin_packed", "loss_mask_pairs": [7, 7], "loss_mask_alternating_individual": [8],
  "finetune": true, "optimizer": {{"type": "Adam", "params": {{"lr": 8.0e-4, "betas": [0.9, 0.95], "eps": 1.0e-8}}}},
  "train_micro_batch_size_per_gpu": 2, "train_batch_size": 8, "lr_decay_style": "constant", "warmup": 0,
  "train_iters": 4, "iteration_offset": 500, "checkpoint_factor": 2, "eval_iters": 1, "precision": "fp32",
  "save": "{run}", "load": "{run}", "comms_logger": {{"enabled": false}},
}}"""


@pytest.fixture
def config(model, convert, tmp_path):
    """Their run folder at step 500, as GPT-NeoX leaves it: no Hugging Face folder in it, the tokenizer elsewhere."""
    ran = convert("hf2neox", model("llama", vocab_size=253), tmp_path / "run", "--tp", 2, "--iteration", 500)
    assert ran.code == 0, ran.err
    for folder in [path for path in (tmp_path / "run").iterdir() if path.is_dir() and (path / "config.json").is_file()]:
        shutil.rmtree(folder)
    for suffix in (".bin", ".idx"):  # without the facts that `train tokenize` writes
        shutil.copy(GOLDEN / f"sft_text_document{suffix}", tmp_path / f"P_text_document{suffix}")
    paths = {"data": tmp_path / "P_text_document", "vocab": GOLDEN / "model.model", "run": tmp_path / "run"}
    (tmp_path / "c.yml").write_text(YML.format(**paths))
    return tmp_path / "c.yml"


def test_a_chain_of_their_jobs(config, run, convert, train, tmp_path, monkeypatch):
    """With `finetune: true` in the folder that the start lies in; the next job goes on, and the last one exports."""
    options = ["--export", tmp_path / "out", "--chat_template", "control"]
    monkeypatch.setenv("SFT_ENABLED", "0")
    first = run(config, *options, "--steps.exit_interval", 2, save="run")
    assert first.code == 75, first.out
    assert "loss_mask_pairs, loss_mask_alternating_individual -> data.control_tokens" in first.out
    assert "note: SFT_ENABLED 0 in the environment has no effect: data.loss says what is trained" in first.out
    assert "note       steps.train_iters 4 are" in first.out
    trained, tokens = (sum(first.series(name)) for name in ("trained_tokens", "tokens"))
    assert 0 < trained < tokens
    assert (tmp_path / "run/latest").read_text() == "global_step502"
    second = run(config, *options, save="run")
    assert second.code == 0, second.out
    planned = train("plan", config)
    assert (planned.code, "steps.train_iters 4 are" in planned.err) == (0, True), planned.err
    assert "note: SFT_ENABLED 0 in the environment has no effect" in planned.err
    assert "weights    " + str(tmp_path / "run/global_step502") in second.out
    assert second.series("global_step") == [501, 502, 503, 504]
    assert (tmp_path / "run/global_step500/configs").is_dir()  # theirs is untouched
    out = tmp_path / "out"
    assert (out / "tokenizer.json").is_file()
    assert "<|assistant|>" in (out / "chat_template.jinja").read_text()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 3
    third = run(config, "--steps.iteration_offset", 504, "--seed", 9, save="run")
    assert third.code == 0, third.out
    ours = convert("digest", tmp_path / "run/global_step504").out.split()[0]
    assert convert("digest", tmp_path / "run/start").out.split()[0] == ours  # the next phase: weights, no moments
    assert third.series("global_step")[4:] == [505, 506, 507, 508]


def test_what_an_export_lacks_is_said_before_the_first_step(config, run, model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model("llama", vocab_size=253), bare, ignore=shutil.ignore_patterns("tokenizer*"))
    gone = run(config, "--model.tokenizer", tmp_path / "gone.model", save="run")
    assert (gone.code, "gone.model, the tokenizer of" in gone.out) == (3, True), gone.out
    none = run(config, "--model.tokenizer", "null", "--export", tmp_path / "out", save="run")
    assert (none.code, "would have no tokenizer" in none.out) == (5, True), none.out
    assert "convert tokenizer FILE FOLDER, convert assets OUT --from FOLDER" in none.out
    bare_run = run(config, "--model.path", bare, "--export", tmp_path / "out", save="run")
    assert (bare_run.code, "would have no tokenizer" in bare_run.out) == (5, True), bare_run.out
    wrong = run(config, "--export", tmp_path / "out", "--chat_template", "nosuch", save="run")
    assert wrong.code != 0
    assert "nosuch" in wrong.out
    assert not (tmp_path / "run/log.jsonl").exists()
