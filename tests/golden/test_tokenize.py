"""Token files: what the users' own tool wrote, what SentencePiece gives, and what Megatron reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from train.data.tokens.indexed import best_dtype, open_indexed, write_index
from train.data.tokens.records import REASONS

GOLDEN = Path(__file__).parent / "data/1_sft"


def tokenized(train, tmp_path, inputs, model, *options):
    ran = train(
        "tokenize", "--input", inputs, "--tokenizer-type", "SPMTokenizer", "--vocab-file", model, "--append-eod",
        "--output-prefix", tmp_path / "P", "--workers", 2, "--max-drop-rate", 1, *options,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    return tmp_path / "P_text_document", ran


def test_the_users_file_byte_for_byte(train, tmp_path):
    prefix, _ = tokenized(train, tmp_path, GOLDEN / "sft.jsonl", GOLDEN / "model.model")
    for kind in ("bin", "idx"):
        assert prefix.with_suffix(f".{kind}").read_bytes() == (GOLDEN / f"sft_text_document.{kind}").read_bytes()


@pytest.mark.parametrize("model", ["model", "bytes"])
def test_hard_documents_have_the_ids_of_the_users_tool(train, tmp_path, model):
    """Odd spaces, unicode, many turns: whatever is well-formed. What is not is dropped, under a name."""
    name = "sft_hard_text_document" if model == "model" else "sft_hard_bytes_text_document"
    theirs = open_indexed(GOLDEN / name)
    prefix, _ = tokenized(train, tmp_path, GOLDEN / "sft_hard.jsonl", GOLDEN / f"{model}.model")
    ours, facts = open_indexed(prefix), json.loads(prefix.with_suffix(".json").read_text())
    dropped = sum(number for reason, number in facts["counts"].items() if reason in REASONS)
    assert len(ours) + dropped == len(theirs) == 66
    left = [theirs[number].tolist() for number in range(len(theirs))]
    place = -1
    for number in range(len(ours)):
        place = left.index(ours[number].tolist(), place + 1)  # in their order; a ValueError names the ids
    assert len(ours) >= 44


@pytest.mark.parametrize(("pieces", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_the_type_of_tokens_at_its_boundary(pieces, dtype):
    theirs = open_indexed(GOLDEN / f"three_v{pieces}_text_document")
    assert theirs.dtype == best_dtype(pieces) == np.dtype(dtype)
    assert [theirs[number].tolist() for number in range(3)] == [
        open_indexed(GOLDEN / "sft_text_document")[number].tolist() for number in range(3)
    ]


@pytest.mark.parametrize("name", ["sft", "sft_hard_int32", "three_v65500"])
def test_an_index_is_written_as_it_was_read(tmp_path, name):
    indexed = open_indexed(GOLDEN / f"{name}_text_document")
    write_index(tmp_path / "x.idx", indexed.dtype, indexed.sizes)
    assert (tmp_path / "x.idx").read_bytes() == (GOLDEN / f"{name}_text_document.idx").read_bytes()


def test_spans_are_encoded_by_themselves(train, tmp_path):
    """Each span has the ids of raw SentencePiece, between the control tokens."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(GOLDEN / "bytes.model"))
    turns = [
        ("user", " two  spaces "),
        ("assistant", "Sveiki, kā jums klājas?"),
        ("user", "\n\n"),
        ("assistant", "x\t🙂"),
    ]
    turns[2] = ("user", "\na")
    text = "".join(f"<<<|{role}|>>>{content}<<<|{role}|>>>" for role, content in turns)
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    prefix, _ = tokenized(train, tmp_path, tmp_path / "in.jsonl", GOLDEN / "bytes.model")
    marks = {role: model.piece_to_id(f"<|{role}|>") for role in ("user", "assistant")}
    expected = [token for role, content in turns for token in (marks[role], *model.encode(content), marks[role])]
    assert open_indexed(prefix)[0].tolist() == [*expected, model.piece_to_id("<|endoftext|>")]


def test_conversations_are_the_same_dialogues(train, tmp_path):
    records = [json.loads(line)["text"] for line in (GOLDEN / "sft.jsonl").read_text().splitlines()]
    parts = [[part for part in text.split("<<<|") if "|>>>" in part and part.split("|>>>")[1]] for text in records]
    turns = [
        [dict(zip(("role", "content"), part.split("|>>>"), strict=True)) for part in document] for document in parts
    ]
    lines = [json.dumps({"conversations": document}) for document in turns]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    prefix, _ = tokenized(train, tmp_path, tmp_path / "c.jsonl", GOLDEN / "model.model")
    assert prefix.with_suffix(".bin").read_bytes() == (GOLDEN / "sft_text_document.bin").read_bytes()


@pytest.mark.megatron
def test_megatron_core_reads_our_files(train, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix, _ = tokenized(train, tmp_path, GOLDEN / "sft.jsonl", GOLDEN / "model.model")
    real, ours = IndexedDataset(str(prefix), mmap=True), open_indexed(prefix)
    assert len(real) == len(ours) == 200
    np.testing.assert_array_equal(real.document_indices, ours.documents)
    for number in range(200):
        np.testing.assert_array_equal(real[number], ours[number])
