"""`train bench`: the command of lm-evaluation-harness, word for word."""

from __future__ import annotations

import json
import os
import shutil

import pytest


@pytest.fixture
def folder(model, tmp_path):
    """A model's folder with a chat template, where the test itself runs."""
    shutil.copytree(model("llama", "bfloat16"), tmp_path / "hf")
    return tmp_path / "hf"


COMMANDS = [
    (
        [],
        "lm_eval --model hf --model_args pretrained={0},dtype=bfloat16 --tasks hellaswag,gsm8k --batch_size auto "
        "--output_path {0}/benchmarks --apply_chat_template --fewshot_as_multiturn",
    ),
    (
        ["--gpus", 4, "--no-chat", "--dtype", "float16", "--out", "/results"],
        "accelerate launch --multi_gpu --num_processes 4 -m lm_eval --model hf "
        "--model_args pretrained={0},dtype=float16 --tasks hellaswag,gsm8k --batch_size auto --output_path /results",
    ),
    (
        ["--backend", "vllm", "--gpus", 2, "--chat", "--", "--num_fewshot", 5, "--limit", 10],
        "lm_eval --model vllm --model_args pretrained={0},dtype=bfloat16,data_parallel_size=2 --tasks hellaswag,gsm8k "
        "--batch_size auto --output_path {0}/benchmarks --num_fewshot 5 --limit 10 "
        "--apply_chat_template --fewshot_as_multiturn",
    ),
]


@pytest.mark.parametrize(("options", "command"), COMMANDS)
def test_the_command(train, folder, options, command):
    ran = train("bench", folder, "-n", "--tasks", "hellaswag,gsm8k", *options)
    assert ran.code == 0, ran.err
    assert ran.out == command.format(folder) + "\n"


def test_it_runs_what_it_prints(train, folder, tmp_path, monkeypatch):
    """A harness that tells its words, and ends with a code of its own."""
    harness = tmp_path / "bin/lm_eval"
    harness.parent.mkdir()
    harness.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/got\nexit 9\n')
    harness.chmod(0o755)
    monkeypatch.setenv("PATH", f"{harness.parent}:{os.environ['PATH']}")
    ran = train("bench", folder, "--tasks", "mmlu", "--no-chat")
    assert ran.code == 9
    assert "lm_eval " + (tmp_path / "got").read_text() == ran.out
    assert f"pretrained={folder},dtype=bfloat16 --tasks mmlu" in ran.out


def test_what_cannot_be_run(train, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = train("bench", folder, "--tasks", "mmlu")
    assert missing.code == 4
    assert "lm_eval is not installed here" in missing.err
    assert "pip install 'lm_eval[hf]'" in missing.err
    none = train("bench", tmp_path, "--tasks", "mmlu", "-n")
    assert none.code == 2
    assert "is not a Hugging Face folder" in none.err
    (folder / "chat_template.jinja").unlink()
    assert "--apply_chat_template" not in train("bench", folder, "--tasks", "mmlu", "-n").out
    chat = train("bench", folder, "--tasks", "mmlu", "-n", "--chat")
    assert chat.code == 2
    assert "has no chat template" in chat.err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if "dtype" not in name})
    )
    silent = train("bench", folder, "--tasks", "mmlu", "-n")
    assert silent.code == 3
    assert "--dtype bfloat16" in silent.err
    comma = folder.rename(tmp_path / "a,b")
    assert "commas and = separate its arguments" in train("bench", comma, "--tasks", "mmlu", "-n").err
