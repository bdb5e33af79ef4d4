"""`train lint --tokenizer M` finds what `train tokenize --tokenizer M` drops or refuses, in every format."""

from __future__ import annotations

import json

import pytest

from converters.assets.chat_template import load_template
from tests.data.test_templates import MODEL, byte_level
from train.data.look.lint import NOTES
from train.data.tokens.records import REASONS
from train.data.tokens.shapes import FORMS

TALK = [("user", "Hello there"), ("assistant", "x")]
TALKS = [
    TALK,
    [("system", "x"), *TALK],
    [("tool", "x"), *TALK],
    [("user", "<|assistant|>"), ("assistant", "x")],
    [("user", "Hello"), ("assistant", "")],
]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def written(form):
    """Records of a format."""
    spelled = {"user": "human", "assistant": "gpt"}
    return {
        "control-text": [
            {"text": "".join(f"<<<|{role}|>>>{text}<<<|{role}|>>>" for role, text in talk)} for talk in TALKS
        ],
        "conversations": [
            {"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS
        ],
        "sharegpt": [
            {"conversations": [{"from": spelled.get(role, role), "value": text} for role, text in talk]}
            for talk in TALKS
        ],
        "text": [{"text": "Hello"}, {"text": "<|assistant|>"}, {"text": " "}],
    }  # fmt: skip


WRITTEN = {form: written(form)[form] for form in FORMS if form != "mixed"}
WRITTEN["mixed"] = [record for records in WRITTEN.values() for record in records if "conversations" not in record]


@pytest.fixture(params=["template", "control", "sentencepiece"])
def tokenizer(request, tmp_path):
    """A tokenizer without a token of the system: with a template that refuses it, with control tokens; or MODEL."""
    if request.param == "sentencepiece":
        return MODEL
    folder = tmp_path / "M"
    byte_level(folder, ["<|user|>", "<|assistant|>"], "</s>")
    if request.param == "template":
        (folder / "chat_template.jinja").write_text(NO_SYSTEM + load_template("control"))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_lint_finds_what_tokenize_drops(train, tmp_path, tokenizer, form):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in WRITTEN[form]))
    options = ("--tokenizer", tokenizer, "--format", form)
    done = train(
        "tokenize", "--input", source, *options, "--output-prefix", tmp_path / "P", "--max-drop-rate", 1, "--json",
        "--workers", 1,
    )  # fmt: skip
    linted = train("lint", source, *options, "--json")
    if done.code:
        assert (linted.code, linted.err) == (done.code, done.err)
        return
    dropped = {reason: number for reason, number in json.loads(done.out).items() if reason in REASONS}
    findings = json.loads(linted.out)["findings"]
    assert {reason: number for reason, number in findings.items() if reason not in NOTES} == dropped
    assert dropped, form
    assert linted.code == 6, linted.err


def test_a_template_that_is_named_is_the_one_that_lint_checks(train, tmp_path):
    folder, source = tmp_path / "M", tmp_path / "in.jsonl"
    byte_level(folder, ["<|im_start|>", "<|im_end|>"], "</s>")
    source.write_text(json.dumps(WRITTEN["conversations"][0]) + "\n")
    bare = train("lint", source, "--tokenizer", folder)
    assert (bare.code, "--chat-template chatml" in bare.err) == (2, True), bare.err
    assert train("lint", source, "--tokenizer", folder, "--chat-template", "chatml").code == 0
    assert train("lint", source, "--chat-template", "chatml").code == 2


def test_the_format_is_that_of_all_files(train, tmp_path, tokenizer):
    """A file of plain text comes first, and one that cannot be read."""
    texts, talks, missing = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "none.jsonl"
    texts.write_text(json.dumps({"text": "Hello"}) + "\n")
    talks.write_text(json.dumps(WRITTEN["conversations"][0]) + "\n")
    options = ("--tokenizer", tokenizer, "--json")
    linted = train("lint", texts, talks, *options)
    done = train("tokenize", "--input", f"{texts},{talks}", *options, "--output-prefix", tmp_path / "P")
    assert (linted.code, done.code) == (0, 0), linted.out + done.err
    found = json.loads(linted.out)
    assert (found["format"], found["records"], found["malformed"]) == ("conversations", 2, 0)
    again = train("lint", missing, texts, talks, *options)
    assert (again.code, json.loads(again.out)) == (3, found)
