"""Chat templates on tokenizers that have their tokens, and do not find them in what the template writes."""

from __future__ import annotations

import json

import pytest

from converters.assets.chat_template import load_template, probe
from formats.errors import RefusedError
from tests.data.test_templates import TOKENS, byte_level


@pytest.fixture
def folder(tmp_path):
    return byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>")


def altered(folder, **flags):
    """Flags of every added token."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token.update(flags)
    path.write_text(json.dumps(content))


def tokenized(train, tmp_path, folder, template):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    options = ["--input", tmp_path / "c.jsonl", "--tokenizer", folder, "--chat-template", template]
    return train("tokenize", *options, "--output-prefix", tmp_path / "P", "--workers", 1)


def test_a_token_that_stands_alone_only_is_no_token_of_a_template(train, convert, model, tmp_path, folder):
    assert tokenized(train, tmp_path, folder, "chatml").code == 0
    altered(folder, single_word=True)
    ran = tokenized(train, tmp_path, folder, "chatml")
    assert ran.code == 5, ran.err
    assert "has the token <|im_start|>, and does not find it beside letters" in ran.err
    assert '"single_word": false' in ran.err
    converted = convert("hf2hf", model("llama", vocab_size=500), tmp_path / "m")
    assert converted.code == 0, converted.err
    (tmp_path / "m/tokenizer.model").unlink()
    ran = convert("assets", tmp_path / "m", "--from", folder, "--chat-template", "chatml")
    assert ran.code == 5, ran.err
    assert "has the token <|im_start|>, and does not find it beside letters" in ran.err


def test_a_template_that_writes_a_token_which_nobody_named(train, tmp_path):
    folder = byte_level(tmp_path / "t", TOKENS["llama3"], "<|end|>")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": None}))
    ran = tokenized(train, tmp_path, folder, "llama3")
    assert ran.code == 5, ran.err
    assert "the chat template writes bos_token, and the tokenizer has none" in ran.err
    assert "hint: " in ran.err
    assert "Undefined" not in ran.err
    with pytest.raises(RefusedError, match="writes eos_token"):
        probe(load_template("control"), bos_token=None, eos_token=None)
