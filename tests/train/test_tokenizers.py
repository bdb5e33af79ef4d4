"""Ids mean what the model takes them for, or nothing is trained."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import yaml

from tests.train.conftest import GOLDEN, spawn, tree_of
from train.data.tokens.sidecar import read_facts
from train.data.tokens.tokenizers import made_with, open_vocabulary


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Token files of the same dialogues, by another tokenizer with as many tokens."""
    import sentencepiece as spm

    folder = tmp_path_factory.mktemp("foreign")
    texts = [json.loads(line)["text"] for line in (GOLDEN / "sft.jsonl").read_text().splitlines()]
    (folder / "words.txt").write_text("\n".join(sorted(word for text in texts for word in text.split())))
    roles = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
    spm.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "other"), vocab_size=253, minloglevel=2,
        control_symbols=roles, byte_fallback=False, hard_vocab_limit=False, character_coverage=1.0,
    )  # fmt: skip
    argv = ["tokenize", "--input", GOLDEN / "sft.jsonl", "--vocab-file", folder / "other.model", "--append-eod"]
    ran = spawn([*map(str, argv), "--output-prefix", str(folder / "P"), "--workers", "1", "-q"], 1)
    assert ran.wait(timeout=60) == 0
    return folder / "P_text_document"


@pytest.fixture
def file(talker, data, tmp_path):
    def write(**sections):
        tree = tree_of(talker, data, tmp_path / "save")
        for name, section in sections.items():
            tree[name] = tree.get(name, {}) | section
        path = tmp_path / "config.yml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def test_a_plan_refuses_what_a_training_does(file, train, foreign):
    ran = train("plan", file(data={"train": [str(foreign)]}))
    assert (ran.code, f"{foreign} was made with another tokenizer" in ran.err) == (5, True), ran.err


def test_files_of_another_tokenizer_are_refused(file, run, data, foreign):
    for sections in (
        {"train": [str(foreign)]},
        {"train": [str(data), str(foreign)]},
        {"validation": {"v": str(foreign)}},
    ):
        ran = run(file(data=sections))
        assert (ran.code, f"{foreign} was made with another tokenizer" in ran.out) == (5, True), ran.out
        assert "hint: train tokenize --tokenizer" in ran.out


def test_the_same_tokenizer_in_another_form_is_the_same(talker, data):
    """Files made with the SentencePiece model; the model has the fast tokenizer, with a token more."""
    from tokenizers import Tokenizer

    facts = read_facts(data)
    assert facts.tokenizer != open_vocabulary(talker / "tokenizer.json").digest
    assert made_with(facts, open_vocabulary(talker / "tokenizer.json"))
    grown = talker.parent / "grown.json"
    tokenizer = Tokenizer.from_file(str(talker / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|more|>"])
    tokenizer.save(str(grown))
    assert made_with(facts, open_vocabulary(grown))


def test_an_id_that_no_row_belongs_to(file, run, data, tmp_path):
    """Files of other programs do not tell their tokenizer."""
    for suffix in (".bin", ".idx"):
        shutil.copy(data.with_name(data.name + suffix), tmp_path / f"Q{suffix}")
    tokens = np.memmap(tmp_path / "Q.bin", open_rows_dtype(tmp_path / "Q"), "r+")
    tokens[5] = 253
    tokens.flush()
    ran = run(file(data={"train": [str(tmp_path / "Q")], "loss": "all"}))
    assert (ran.code, "has the token 253, the model's embedding 253 rows" in ran.out) == (5, True), ran.out


def open_rows_dtype(prefix):
    from train.data.tokens.indexed import open_indexed

    return open_indexed(prefix).dtype


def test_rows_of_a_plan_and_its_splits(file, run, data, tmp_path):
    """Documents of the validation split are not trained; the plan moves with its files."""
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(data.with_name(data.name + suffix), tmp_path / f"Q{suffix}")
    assert spawn(["pack", str(tmp_path / "Q"), "--seq-length", "64", "--split", "80,20"], 1).wait(timeout=60) == 0
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("Q*"):
        path.rename(tmp_path / "moved" / path.name)
    plan = str(tmp_path / "moved/Q.pack")
    ran = run(file(data={"train": [plan], "validation": {"validation": plan}}, evaluate={"every": 8}))
    assert ran.code == 0, ran.out
    splits = json.loads((tmp_path / "moved/Q.pack/plan.json").read_text())["splits"]
    assert f"rows       {splits['train'][1]} of" in ran.out
    reference = run(file(data={"train": [str(data)]}), save="whole")
    assert ran.series("loss") != reference.series("loss")
    for changed, message in (
        ({"seq_length": 63}, "has rows of seq_length 64, not 63"),
        ({"packing": "k_bin"}, "has rows of packing bfd, not k_bin"),
        ({"validation": {"test": plan}}, "has the splits train, validation, none is named test"),
    ):
        ran = run(file(data={"train": [plan], **changed}), save="refused")
        assert (ran.code, message in ran.out) == (5, True), ran.out
