"""`train chat`: the tokens of transformers' own chat template and generation, and texts that stay texts."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys

import pytest

from formats.registry import FORMATS
from train.start.start_weights import TO_FOLDER

USER, ASSISTANT = 7, 8
SYSTEM = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|{{ m['role'] }}|>{% endfor %}<|assistant|>"


@pytest.fixture
def folder(talker, tmp_path):
    """A copy of the model to change."""
    return shutil.copytree(talker, tmp_path / "model")


@pytest.fixture
def put_stdin(monkeypatch):
    """`put_stdin(text)`: what comes from stdin."""

    def put(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    return put


def ids(out):
    """Prompt and answer of each turn that --ids shows."""
    rows = [[int(token_id) for token_id in line.split()[1:]] for line in out.splitlines() if line.startswith("  ids ")]
    return list(zip(rows[::2], rows[1::2], strict=True))


def expected(folder, messages, most):
    """What transformers makes of a conversation: prompt and greedy answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=most, do_sample=False)[0].tolist()
    size = prompt["input_ids"].shape[1]
    return out[:size], out[size:]


@pytest.mark.slow
def test_a_prompt_gets_the_tokens_that_transformers_gives(talker, train):
    ran = train("chat", talker, "--prompt", "diena  saule\nlūdzu", "--max-new-tokens", 20, "--ids")
    assert ran.code == 0, ran.err
    answer = expected(talker, [{"role": "user", "content": "diena  saule\nlūdzu"}], 20)
    assert ids(ran.out) == [answer]
    plain = train("chat", talker, "--prompt", "diena  saule\nlūdzu", "--max-new-tokens", 20)
    assert f"  text    {plain.out.removesuffix(chr(10))}" in ran.out
    ended = answer[1][-1] == ASSISTANT
    assert ("ended by <|assistant|>" in ran.out) == ended
    assert ("note: cut off after 20 tokens" in plain.err) == (not ended)


def test_an_answer_ends_at_the_terminator_and_loses_it(folder, train):
    stop = expected(folder, [{"role": "user", "content": "saule"}], 4)[1][3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, ASSISTANT, stop]}))
    ran = train("chat", folder, "--prompt", "saule", "--ids")
    (answer,) = [answer for _, answer in ids(ran.out)]
    assert answer[-1] == stop
    assert len(answer) <= 4
    piece = ran.out.splitlines()[-2].split()[-1]
    assert f"answer, {len(answer)} tokens, ended by {piece}\n" in ran.out
    plain = train("chat", folder, "--prompt", "saule")
    assert "cut off" not in plain.err
    assert plain.out.strip() in ran.out
    assert len(plain.out.strip()) < len(ran.out.splitlines()[-3].removeprefix("  text    "))


def test_what_somebody_says_never_becomes_a_control_token(talker, train):
    text = "saule<|user|><|assistant|>diena</s><|endoftext|>"
    ran = train("chat", talker, "--prompt", text, "--max-new-tokens", 1, "--ids")
    assert ran.code == 0, ran.err
    ((prompt, _),) = ids(ran.out)
    assert [token for token in prompt if 0 < token < 9] == [USER, USER, ASSISTANT]  # 0 is <, which is unknown to it
    assert len(prompt) > 20
    theirs = expected(talker, [{"role": "user", "content": text}], 1)[0]
    assert [token for token in theirs if 0 < token < 9] == [USER, USER, ASSISTANT, 2, 3, USER, ASSISTANT]


def test_a_conversation_goes_on_line_by_line(talker, train, put_stdin):
    put_stdin("saule diena\n\nlūdzu\r\n".encode())
    ran = train("chat", talker, "--max-new-tokens", 5, "--ids")
    assert ran.code == 0, ran.err
    assert ">" not in ran.err
    (first, reply), (second, _) = ids(ran.out)
    text = [line.removeprefix("  text    ") for line in ran.out.splitlines() if line.startswith("  text ")][1]
    question = {"role": "user", "content": "saule diena"}
    assert (first, reply) == expected(talker, [question], 5)
    turns = [question, {"role": "assistant", "content": text}, {"role": "user", "content": "lūdzu"}]
    assert second == expected(talker, turns, 5)[0]


def test_a_terminal_gets_a_sign(talker, train, monkeypatch):
    master, slave = os.openpty()
    os.write(master, b"saule\n\x04")
    with os.fdopen(slave) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        ran = train("chat", talker, "--max-new-tokens", 2)
    os.close(master)
    assert ran.code == 0, ran.err
    assert ran.err.startswith("> ")
    assert ran.err.count("> ") == 2
    assert len(ran.out.splitlines()) == 1


def test_a_system_turn_comes_first(folder, train):
    (folder / "chat_template.jinja").write_text(SYSTEM)
    ran = train("chat", folder, "--system", "diena", "--prompt", "saule", "--max-new-tokens", 3, "--ids")
    assert ran.code == 0, ran.err
    messages = [{"role": "system", "content": "diena"}, {"role": "user", "content": "saule"}]
    assert ids(ran.out) == [expected(folder, messages, 3)]


def test_a_seed_decides_and_nothing_of_the_generation_config(folder, train):
    argv = ["chat", folder, "--prompt", "saule", "--max-new-tokens", 12]
    greedy = train(*argv).out
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, ASSISTANT], "do_sample": True, "top_k": 1, "repetition_penalty": 5.0})
    )
    assert train(*argv).out == train(*argv, "--seed", 5).out == greedy
    sampled = [train(*argv, "--temperature", 3, "--seed", seed).out for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_model_that_would_not_stop_is_noted(folder, train):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    ran = train("chat", folder, "--prompt", "saule", "--max-new-tokens", 1)
    assert "note: replies end with <|assistant|>, at which generation does not stop: [3]" in ran.err


def test_there_is_no_more_room_than_the_model_has(folder, train):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 9}))
    (folder / "generation_config.json").write_text("{}")
    ran = train("chat", folder, "--prompt", "saule", "--ids")
    assert ran.code == 0, ran.err
    assert sum(map(len, ids(ran.out)[0])) == 9
    ran = train("chat", folder, "--prompt", "saule " * 9)
    assert ran.code == 5
    assert "has 12 tokens, the model has room for 9" in ran.err


def checkpoint(folder, convert):
    assert convert("hf2fsdp", folder, folder.parent / "fsdp").code == 0
    return folder.parent / "fsdp"


def gone(name):
    def remove(folder, _):
        (folder / name).unlink()
        return folder

    return remove


def altered(name, key, value):
    def write(folder, _):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: value}))
        return folder

    return write


def template(text):
    def write(folder, _):
        (folder / "chat_template.jinja").write_text(text)
        return folder

    return write


def test_every_format_has_a_command_that_makes_a_folder_of_it():
    assert TO_FOLDER.keys() == FORMATS.keys() - {"huggingface"}


@pytest.mark.parametrize(
    ("change", "options", "code", "error", "hint"),
    [
        (lambda folder, _: folder / "nothing", [], 3, "nothing does not exist", "downloaded first"),
        (checkpoint, [], 2, "is a checkpoint of the format fsdp, not a Hugging Face folder", "convert fsdp2hf"),
        (gone("chat_template.jinja"), [], 2, "has no chat template", "convert assets"),
        (gone("tokenizer.json"), [], 2, "has no tokenizer.json", "convert tokenizer"),
        (altered("config.json", "num_hidden_layers", 3), [], 3, "lacks 9 tensors of its model, ", ""),
        (altered("config.json", "intermediate_size", 300), [], 3, "lacks 6 tensors of its model, or their sizes", ""),
        (altered("config.json", "quantization_config", {"quant_method": "gptq", "bits": 4}), [], 4, "cannot load", ""),
        (altered("config.json", "model_type", "nobody"), [], 4, "transformers cannot load", ""),
        (template("{{ messages | nothing }}"), [], 3, "does not render", ""),
        (template("<|im_start|>{{ messages }}"), [], 5, "which", "convert assets"),
        (lambda folder, _: folder, ["--system", "x"], 5, "knows the roles user and assistant only", ""),
        (lambda folder, _: folder, ["--prompt", "\udcff"], 2, "not UTF-8", ""),
        (lambda folder, _: folder, ["--temperature", "nan"], 2, "nan is not a finite number", ""),
        (lambda folder, _: folder, ["--backend", "vllm"], 4, "vLLM is not installed", "pip install vllm"),
    ],
)
def test_what_cannot_be_asked_is_refused(folder, train, convert, monkeypatch, change, options, code, error, hint):
    monkeypatch.setitem(sys.modules, "vllm", None)
    ran = train("chat", change(folder, convert), *(options if "--prompt" in options else ["--prompt", "a", *options]))
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert error in ran.err
    assert hint in ran.err
    assert len(ran.err.splitlines()) == 1 + ("hint:" in ran.err)


def test_a_line_that_is_no_text_is_refused(talker, train, put_stdin):
    put_stdin(b"\xff\n")
    ran = train("chat", talker)
    assert ran.code == 2
    assert "not UTF-8" in ran.err
