"""`train tokenize` with ftfy, and with several fields at once: the files of texts that are mended or alone already."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from ftfy import fix_text

from tests.data.test_tokenize_faults import GOLDEN

BROKEN = "lÅ«dzu, âœ” paldies &amp; saule"
TURNS = "<<<|user|>>>{}<<<|user|>>><<<|assistant|>>>{}<<<|assistant|>>>"


@pytest.fixture
def tokenized(train, tmp_path):
    """`tokenized(records, words)`: the bytes of the files of each field."""

    def make(records, *options):
        number = len(list(tmp_path.iterdir()))
        source, folder = tmp_path / f"{number}.jsonl", tmp_path / f"out{number}"
        folder.mkdir()
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        ran = train(
            "tokenize", "--input", source, "--vocab-file", GOLDEN / "model.model", "--output-prefix", folder / "P",
            "--workers", 1, "-q", *options,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        return {path.stem: path.with_suffix(".bin").read_bytes() for path in folder.glob("*.idx")}

    return make


def test_several_fields_get_files_of_their_own(tokenized):
    records = [{"text": f"saule {place}", "summary": f"upe {place} māja"} for place in range(20)]
    files = tokenized(records, "--jsonl-keys", "text,summary")
    assert files.keys() == {"P_text_document", "P_summary_document"}
    for key in ("text", "summary"):
        assert files[f"P_{key}_document"] == tokenized(records, "--jsonl-keys", key)[f"P_{key}_document"]


@pytest.mark.parametrize(
    "record",
    [
        lambda text: {"text": text},
        lambda text: {"text": TURNS.format(text, text)},
        lambda text: {"conversations": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]},
    ],
    ids=["text", "control-text", "conversations"],
)
def test_ftfy_mends_a_text_before_anything_else(tokenized, record):
    """As GPT-NeoX does (tools/datasets/preprocess_data.py: the whole text), so `&amp;` beside a marker stays."""
    mended = record(BROKEN)
    mended = {"text": fix_text(mended["text"])} if "text" in mended else record(fix_text(BROKEN))
    assert "lūdzu, ✔ paldies &" in json.dumps(mended, ensure_ascii=False)
    assert tokenized([record(BROKEN)], "--ftfy") == tokenized([mended]) != tokenized([record(BROKEN)])


@pytest.fixture(scope="module")
def roleless(tmp_path_factory):
    """A SentencePiece model without control tokens."""
    import sentencepiece as spm

    folder = tmp_path_factory.mktemp("roleless")
    (folder / "words.txt").write_text("saule sveiki tulko paldies diena\n" * 20)
    spm.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "m"), vocab_size=40, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return folder / "m.model"


TALK = {"conversations": [{"role": "user", "content": "saule"}, {"role": "assistant", "content": "diena"}]}


@pytest.mark.parametrize(
    ("record", "options", "messages"),
    [
        ({"text": TURNS.format("saule", "diena")}, [], ["records with markers need a tokenizer that has them"]),
        (TALK, [], ["and no chat template", "FOLDER --add --control '<|im_start|>' --control '<|im_end|>'"]),
        (TALK, ["--chat-template", "chatml"], ["the chat template chatml needs a fast tokenizer"]),
    ],
)
def test_hints_lead_on(train, tmp_path, roleless, record, options, messages):
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n")
    ran = train(
        "tokenize",
        "--input",
        tmp_path / "in.jsonl",
        "--vocab-file",
        roleless,
        "--output-prefix",
        tmp_path / "P",
        *options,
    )
    assert (ran.code, [message for message in messages if message not in ran.err]) == (2, []), ran.err


def test_a_sentencepiece_model_gets_the_tokens_of_a_template(train, convert, tmp_path, roleless):
    """What the hints say, done."""
    (tmp_path / "in.jsonl").write_text(json.dumps(TALK) + "\n")
    argv = [
        "tokenize",
        "--input",
        tmp_path / "in.jsonl",
        "--chat-template",
        "chatml",
        "--output-prefix",
        tmp_path / "P",
    ]
    assert convert("tokenizer", roleless, tmp_path / "bare", "--check", 1).code == 0
    bare = train(*argv, "--vocab-file", tmp_path / "bare")
    assert "FOLDER --add --control '<|im_start|>' --control '<|im_end|>'" in bare.err
    control = ["--control", "<|im_start|>", "--control", "<|im_end|>"]
    assert convert("tokenizer", roleless, tmp_path / "with", "--check", 1, "--add", *control).code == 0
    ran = train(*argv, "--vocab-file", tmp_path / "with", "--workers", 1)
    assert ran.code == 0, ran.err


def test_plain_text_of_a_tokenizer_without_roles(train, tmp_path, roleless):
    (tmp_path / "in.jsonl").write_text('{"text": "saule"}\n')
    (tmp_path / "P").mkdir()
    ran = train(
        "tokenize", "--input", tmp_path / "in.jsonl", "--vocab-file", roleless, "--output-prefix", f"{tmp_path}/P/",
        "--workers", 1,
    )  # fmt: skip
    assert (ran.code, f"{tmp_path}/P/NAME writes them into it" in ran.err) == (0, True), ran.err
    display = train("show", tmp_path / "P_text_document", "--tokenizer", roleless)
    assert "document 0, 4 tokens, 3 trained\n" in display.out  # all but the first, which nothing predicts


def test_lint_tells_of_the_others_before_a_file_that_is_empty(train, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "b.jsonl").touch()
    ran = train("lint", tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    assert (ran.code, "a.jsonl:1" in ran.out, "b.jsonl is empty" in ran.err) == (3, True, True), ran.err


def test_without_torch(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "train.tools.doctor", raising=False)
    monkeypatch.delitem(sys.modules, "train.distributed", raising=False)
    ran = train("doctor")
    assert ran.code == 4, ran.err
    assert "error: this needs torch, which is not installed\nhint: pip install 'vitruvian[transformers]'" in ran.err


def test_without_the_library(train, tmp_path, monkeypatch):
    def lacking(_):
        raise PackageNotFoundError

    monkeypatch.setattr(sys.modules["train.commands.tokenize"], "version", lacking)
    (tmp_path / "in.jsonl").write_text('{"text": "saule"}\n')
    ran = train(
        "tokenize", "--input", tmp_path / "in.jsonl", "--vocab-file", GOLDEN / "model.model", "--output-prefix",
        tmp_path / "P", "--ftfy",
    )  # fmt: skip
    assert (ran.code, "pip install 'vitruvian[ftfy]'" in ran.err) == (4, True), ran.err
