"""From JSON lines to a model that answers: tokenize, train, convert, generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden/data/1_sft"
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
DIALOGUES = 100


@pytest.fixture
def start(convert, model, tmp_path):
    """A tiny model with the users' tokenizer and the control template."""
    folder = tmp_path / "start"
    small = model("llama", vocab_size=253, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).write_bytes((small / name).read_bytes())
    made = convert("tokenizer", GOLDEN / "model.model", tmp_path / "tokenizer", "--control", "<|user|>", "--control",
                   "<|assistant|>", "--eos", "<|endoftext|>", "--allow-mismatches", 1)  # fmt: skip
    assert made.code == 0, made.err
    for path in (tmp_path / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_model_learns_a_hundred_dialogues_by_heart(start, run, train, convert, tmp_path):
    lines = (GOLDEN / "sft.jsonl").read_text().splitlines()[:DIALOGUES]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    ran = train("tokenize", "--input", tmp_path / "data.jsonl", "--vocab-file", GOLDEN / "model.model", "--append-eod",
                "--output-prefix", tmp_path / "P", "--workers", 1)  # fmt: skip
    assert ran.code == 0, ran.err
    config = {
        "model": {"path": str(start), "dtype": "fp32", "activation_checkpointing": False},
        "data": {"train": [str(tmp_path / "P_text_document")], "seq_length": 256},
        "batch": {"size": 8, "micro": 4}, "optim": {"lr": 3e-3},
        "schedule": {"style": "cosine", "warmup": 5}, "steps": {"train_iters": 150, "iteration_offset": 1000},
        "save": {"path": str(tmp_path / "save"), "every": 100, "keep": 1}, "log": {"every": 50},
    }  # fmt: skip
    (tmp_path / "config.yml").write_text(json.dumps(config))
    trained = run(tmp_path / "config.yml", ranks=2)
    assert trained.code == 0, trained.out
    assert trained.series("loss")[-1] < 0.05
    assert [path.name for path in trained.save.glob("global_step*")] == ["global_step1150"]
    made = convert("fsdp2hf", trained.save / "global_step1150", tmp_path / "out", "--chat-template", "control")
    assert made.code == 0, made.err
    right = sum(answered(tmp_path / "out", json.loads(line)["text"]) for line in lines[:20])
    assert right >= 18


LOADED = {}


def answered(folder, text):
    """Whether the model says what it was taught, and stops."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder not in LOADED:
        LOADED[folder] = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, model = LOADED[folder]
    asked, told = (part.strip("<|>") for part in text.split("<<<|user|>>>")[1:])
    told = told.split("|>>>")[1].removesuffix("<<<|assistant")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    stopped = int(out[-1]) in model.generation_config.eos_token_id
    return stopped and tokenizer.decode(out, skip_special_tokens=True).strip() == told.strip()
