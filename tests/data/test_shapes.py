"""Which format a record has, and that a record with two readings loses none without a word."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.data.test_templates import MODEL
from train.data.tokens.documents import open_documents
from train.data.tokens.records import GRAVE, REASONS, Malformed, reader
from train.data.tokens.shapes import BESIDE_TURNS, FORMS, SHAPES, form_of, shapes_of

TURNS = [{"role": "user", "content": "saule"}, {"role": "assistant", "content": "upe"}]
SPELLED = [{"from": "system", "value": "a"}, {"from": "human", "value": "saule"}, {"from": "gpt", "value": "upe"}]
MARKED = "<<<|user|>>>saule<<<|user|>>><<<|assistant|>>>upe<<<|assistant|>>>"
RECORDS = {
    "conversations": {"messages": TURNS},
    "sharegpt": {"conversations": SPELLED},
    "control-text": {"text": MARKED},
    "text": {"text": "paldies"},
}
"""Each format that auto can find, in a record."""
VALUES = {"conversations": TURNS, "messages": TURNS}


def record_of(shape):
    return {name: VALUES.get(name, "paldies") for name in shape.fields}


@pytest.fixture
def tokenized(train, tmp_path):
    def make(records, *options, suffix="jsonl"):
        source = tmp_path / f"{len(list(tmp_path.iterdir()))}.{suffix}"
        if suffix == "parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(records), source)
        else:
            source.write_text("".join(json.dumps(record) + "\n" for record in records))
        arguments = ("--input", source, "--output-prefix", source.with_suffix(""), "--workers", 1)
        ran = train("tokenize", *arguments, "--vocab-file", MODEL, *options)
        return ran, source.with_name(source.stem + "_text_document")

    return make


@pytest.mark.parametrize("form", RECORDS)
def test_auto_finds_each_format(tokenized, form):
    assert form_of(RECORDS[form]) == form
    automatic, named = tokenized([RECORDS[form]] * 3), tokenized([RECORDS[form]] * 3, "--format", form)
    for ran, _ in (automatic, named):
        assert ran.code == 0, ran.err
        assert f", {form}\n" in ran.err
    tokens = [
        [ids.tolist() for ids in map(open_documents(prefix).indexed.__getitem__, range(3))]
        for _, prefix in (automatic, named)
    ]
    assert tokens[0] == tokens[1]
    assert {"mixed", *RECORDS} == {*FORMS}


@pytest.mark.parametrize(
    ("others", "form"),
    [(["conversations"], "conversations"), (["control-text"], "mixed"), (["conversations", "control-text"], "mixed")],
    ids=str,
)
def test_texts_before_dialogues_are_read_as_texts_after_them(tokenized, train, others, form):
    records = [RECORDS[name] for name in ("text", "text", *others)]
    ran, prefix = tokenized(records)
    assert (ran.code, f", {form}\n" in ran.err) == (0, True), ran.err
    other, named = tokenized(records, "--format", "mixed")
    assert other.code == 0, other.err
    trained = [open_documents(each).trained(0, len(records)).tolist() for each in (prefix, named)]
    assert trained[0] == trained[1]
    assert train("lint", next(path for path in prefix.parent.iterdir() if path.suffix == ".jsonl")).code == 0


def test_texts_and_dialogues_in_two_files_are_one_input(train, tmp_path):
    for name in ("text", "conversations"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(RECORDS[name]) + "\n")
    named = f"{tmp_path}/text.jsonl,{tmp_path}/conversations.jsonl"
    ran = train("tokenize", "--input", named, "--output-prefix", tmp_path / "P", "--workers", 1, "--vocab-file", MODEL)
    assert (ran.code, "2 documents" in ran.out) == (0, True), ran.err


def test_texts_are_trained_as_a_whole_whatever_their_tokenizer(train, tmp_path):
    """Also where it has no control tokens, as beside dialogues that a chat template has written."""
    (tmp_path / "text.jsonl").write_text(json.dumps(RECORDS["text"]) + "\n")
    options = ("--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "P", "--workers", 1)
    ran = train("tokenize", *options, "--vocab-file", MODEL.parents[2] / "neox/spm101.model")
    assert ran.code == 0, ran.err
    documents = open_documents(tmp_path / "P_text_document")
    assert (documents.control, documents.silent) == ({}, False)
    for loss in ("assistant", "last_turn", "all"):
        mask = documents.trained(0, 1, loss).tolist()
        assert mask == [False] + [True] * (len(mask) - 1)


PAIRS = [pair for pair in itertools.combinations(SHAPES, 2) if any(shape.is_read for shape in pair)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "+".join("_".join(shape.fields) for shape in pair))
def test_no_pair_of_shapes_loses_one_of_them_without_a_word(pair):
    """`auto` refuses each by name; conversations and messages of the same turns are one shape."""
    record = record_of(pair[0]) | record_of(pair[1])
    read = reader(form_of(record), ("user", "assistant"), auto=True)
    if pair[0].fields + pair[1].fields == ("conversations", "messages"):
        assert read(record).contents == ["saule", "upe"]
        record["conversations"] = TURNS[:1]
        with pytest.raises(Malformed) as caught:
            read(record)
        assert caught.value.reason == "both"
        return
    with pytest.raises(Malformed) as caught:
        read(record)
    assert caught.value.reason == "shapes"
    assert all(name in caught.value.detail for shape in pair for name in shape.fields)
    assert "shapes" in GRAVE


@pytest.mark.parametrize("name", BESIDE_TURNS)
@pytest.mark.parametrize("turns", [{"messages": TURNS}, {"conversations": SPELLED}], ids=["messages", "conversations"])
def test_a_field_beside_turns_that_says_more_than_they_do_is_a_second_reading(turns, name):
    """As `rejected_response` of a set for DPO; one that repeats a turn, or is empty, loses nothing."""
    read = reader(form_of(turns), ("user", "assistant", "system"), auto=True)
    for copy in ("saule", "upe", "", None, next(iter(turns.values()))):
        assert "upe" in read(turns | {name: copy}).contents
    for value in ("tulko", [{"role": "assistant", "content": "tulko"}]):
        with pytest.raises(Malformed) as caught:
            read(turns | {name: value})
        assert (caught.value.reason, caught.value.detail) == ("shapes", f"{next(iter(turns))} beside {name}")
    named = reader(form_of(turns), ("user", "assistant", "system"))
    assert "upe" in named(turns | {name: "tulko"}).contents


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [({"text": "paldies"}, "messages beside text"),
     ({"prompt": "saule", "completion": "tulko"}, "messages beside prompt and completion")],
    ids=["text", "prompt"],
)  # fmt: skip
def test_a_later_record_with_two_readings_ends_the_work_and_a_format_chooses(tokenized, train, fields, named, suffix):
    records = [{"messages": TURNS, **dict.fromkeys(fields)}, {"messages": TURNS} | fields]
    ran, prefix = tokenized(records, suffix=suffix)
    assert ran.code == 5, ran.err
    assert f"0.{suffix}:2, {named}: {REASONS['shapes']}" in ran.err
    assert "--format conversations" in ran.err
    assert not list(prefix.parent.glob("*_document*"))
    assert named in train("lint", next(prefix.parent.iterdir())).out
    chosen, prefix = tokenized(records, "--format", "conversations", suffix=suffix)
    assert chosen.code == 0, chosen.err
    assert open_documents(prefix).indexed[0].tolist() == open_documents(prefix).indexed[1].tolist()


def test_mixed_reads_both_and_chooses_neither(tokenized):
    ran, _ = tokenized(
        [RECORDS["text"], RECORDS["conversations"], {"messages": TURNS, "text": "paldies"}], "--format", "mixed"
    )
    assert ran.code == 5
    assert ":3, messages beside text" in ran.err


def test_a_text_field_of_another_name_is_a_reading_too(tokenized):
    record = {"messages": TURNS, "summary": "paldies", "text": "a"}
    assert [shape.fields for shape in shapes_of(record, "summary")] == [("messages",), ("text",)]
    ran, _ = tokenized([record], "--jsonl-keys", "summary")
    assert ran.code == 5
    assert "messages beside summary" in ran.err


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.is_read], ids=lambda shape: shape.fields[0])
def test_fields_that_no_format_reads_are_named_with_the_command_that_does(tokenized, shape):
    ran, _ = tokenized([record_of(shape)] * 2)
    assert ran.code == 3
    assert "train fetch" in ran.err
    assert "recipe" in ran.err


def test_empty_fields_of_a_table_and_copies_are_no_second_reading(tokenized):
    """ultrachat_200k repeats the first message in `prompt`."""
    rows = [{"messages": TURNS, "text": None}, {"messages": TURNS, "text": "", "conversations": []}]
    ran, prefix = tokenized([{"messages": TURNS, "prompt": "saule", "prompt_id": "7"}, *rows])
    assert ran.code == 0, ran.err
    assert len(open_documents(prefix).indexed) == 3
    assert form_of({"messages": [], "text": "paldies"}) == "text"
