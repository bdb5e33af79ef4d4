"""From JSON lines to a model on a Hub that answers: the commands of `make demo`, those with torch as forks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import demo, demo_train
from tests.demo_train import chain, dialogues, turns
from tests.hub.conftest import environment, finish, spawn
from tests.hub.server import Hub
from train.tools.chat import Sampling, open_chat

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
PULL = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = (kind.from_pretrained("acme/dialogues") for kind in (AutoTokenizer, AutoModelForCausalLM))
for asked in json.loads(sys.argv[1]):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0][prompt["input_ids"].shape[1]:]
    text = tokenizer.decode(out, skip_special_tokens=True).strip()
    print(json.dumps([prompt["input_ids"][0].tolist(), out.tolist(), text]))
"""


def test_dialogues_become_a_model_on_a_hub_that_answers(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*argv: str, **settings: str) -> str:
        if not {"run", "chat"} & {*argv}:
            return demo.command(*argv, **settings)
        code, out = forks([*argv[argv.index("train") + 1 :]], 2 if argv[0] == "torchrun" else 1)
        assert code == 0, out
        return out

    monkeypatch.setattr(demo_train, "command", command)
    prompts, replies = zip(*map(turns, dialogues()[:20]), strict=True)
    with Hub(tmp_path / "hub") as hub:
        stdout = chain(hub)
        pulled = finish(spawn(PULL, json.dumps(prompts), env=environment(hub, tmp_path / "an empty cache")))
    assert not hub.server.broken, hub.server.broken
    assert f"ended by <|assistant|>\n  text    {replies[0]}<|assistant|>\n" in stdout
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert (log[0]["global_step"], log[-1]["global_step"]) == (1001, 1060)
    assert log[-1]["loss"] < 0.05
    assert [path.name for path in Path("run").glob("global_step*")] == ["global_step1060"]
    assert pulled.code == 0, pulled.err
    theirs = [json.loads(line) for line in pulled.out.splitlines()]
    right = [
        answer for answer, text in zip(theirs, replies, strict=True) if answer[2] == text.strip() and answer[1][-1] == 8
    ]
    assert len(right) >= 18, theirs
    chat = open_chat(Path("pulled"), "transformers")
    ours = [chat.answer(["user"], [text], Sampling(40)) for text in prompts]
    assert [(answer.prompt, answer.ids) for answer in ours] == [(prompt, ids) for prompt, ids, _ in theirs]
