"""What a record says of its turns: replies that are not trained, and what is refused because nobody understands it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor

from tests.data.test_templates import MODEL, TOKENS, byte_level
from train.data.tokens.documents import open_documents
from train.data.tokens.records import GRAVE, REASONS, Malformed, reader
from train.data.tokens.turn_flags import ALLOWED, FLAGS, HARMLESS, MORE

OFF = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"masked": True}]
WRONG = [
    {"weight": ""}, {"train": []}, {"masked": {}},
    {"weight": 0.5}, {"weight": "0"}, {"weight": True}, {"weight": 2}, {"train": 0}, {"train": "false"}, {"loss": 1},
    {"weight": 1, "train": False}, {"train_detail": [{"begin_offset": 0}]}, {"train_on_input": False}, {"Weight": 0},
]  # fmt: skip


def dialogue(*flags, names=("role", "content")):
    """A question and an answer for each of some flags."""
    pairs = [
        [{names[0]: "user", names[1]: f"question {number}"}, {names[0]: "assistant", names[1]: f"say {number}", **flag}]
        for number, flag in enumerate(flags)
    ]
    return {"messages": [turn for pair in pairs for turn in pair]}


@pytest.fixture
def tokenized(train, tmp_path):
    """`tokenized(records, words)`: what the command did, and the prefix of the files."""

    def make(records, *options):
        source = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        source.write_text("".join(line + "\n" for line in lines))
        options = options or ("--vocab-file", MODEL, "--append-eod")
        ran = train("tokenize", "--input", source, "--output-prefix", source.with_suffix(""), "--workers", 1, *options)
        return ran, source.with_name(source.stem + "_text_document")

    return make


@pytest.mark.parametrize("flag", OFF, ids=str)
def test_a_reply_that_its_record_leaves_out_is_not_trained(tokenized, train, flag):
    ran, prefix = tokenized([dialogue({}, flag, {"weight": 1}), dialogue({"train": True}, flag)])
    assert ran.code == 0, ran.err
    assert "2 replies are not trained, as their records say" in ran.err
    documents, model = open_documents(prefix), SentencePieceProcessor(str(MODEL))
    replies = [[*model.encode(f"say {number}"), model.piece_to_id("<|assistant|>")] for number in range(3)]
    tokens, mask = documents.indexed[0], documents.trained(0, 1)
    assert tokens[mask].tolist() == [*replies[0], *replies[2], model.piece_to_id("<|endoftext|>")]
    assert documents.indexed[1][documents.trained(1, 2)].tolist() == replies[0]  # the end belongs to the last reply
    assert documents.indexed[1][documents.trained(1, 2, "last_turn")].tolist() == []
    assert documents.trained(0, 1, "all").sum() == len(tokens) - 1
    stdout = train("show", prefix, "--tokenizer", MODEL, "--no-color").out
    assert f"{len(replies[0]) + len(replies[2]) + 1} trained" in stdout
    prefix.with_name(prefix.name + ".mask").unlink()
    assert train("show", prefix).code == 3  # control tokens alone would train all replies


def test_flags_that_change_nothing_leave_the_bytes(tokenized):
    plain, flagged = (tokenized([dialogue(flag, flag)])[1] for flag in ({}, {"weight": 1, "name": "b", "loss": None}))
    assert plain.with_name(plain.name + ".bin").read_bytes() == flagged.with_name(flagged.name + ".bin").read_bytes()
    assert not flagged.with_name(flagged.name + ".mask").exists()


def test_the_mask_of_control_tokens_is_the_same_whether_stored_or_read_off(tokenized):
    """All but the last record have no flag: what their masks say is what tokens alone say."""
    chosen = random.Random(1)
    texts = [{"text": "saule un upe"}, *(dialogue(*[{}] * chosen.randint(1, 4)) for _ in range(30))]
    texts[3]["messages"].insert(0, {"role": "user", "content": "first"})
    texts[5]["messages"].append({"role": "user", "content": "last"})
    for ending in (("--append-eod",), ()):
        options = ("--vocab-file", MODEL, "--format", "mixed", *ending)
        ran, prefix = tokenized([*texts, dialogue({}, {"weight": 0})], *options)
        assert ran.code == 0, ran.err
        _, bare = tokenized(texts, *options)
        stored, derived = open_documents(prefix), open_documents(bare)
        assert stored.stored is not None
        assert derived.stored is None
        for loss in ("assistant", "last_turn", "all"):
            assert np.array_equal(stored.trained(0, len(texts), loss), derived.trained(0, len(texts), loss)), loss


@pytest.mark.parametrize("flag", WRONG, ids=str)
def test_a_flag_that_nobody_understands_ends_the_work(tokenized, train, flag):
    rows = [dialogue({})] * 40 + [dialogue({}, flag)]
    ran, prefix = tokenized(rows)
    assert ran.code == 5, ran.err
    assert ".jsonl:41, turn 4" in ran.err
    assert "hint:" in ran.err
    assert not list(prefix.parent.glob("*_text_document*"))
    source = next(prefix.parent.glob("*.jsonl"))
    looked = train("lint", source)
    assert looked.code == 6
    assert f"{source}:41, turn 4" in looked.out


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"weight": 0}, "the record has 'weight'"),
        ({"train": False}, "the record has 'train'"),
        ({"system": "be kind"}, "the record has 'system'"),
        ({"kto_tag": False}, "the record has 'kto_tag'"),
        ({"label": False}, "the record has 'label' false"),
        ({"conversations": [{"role": "user", "content": "other"}]}, "conversations and messages"),
    ],
    ids=str,
)
def test_what_a_record_says_of_all_its_turns(tokenized, record, message):
    ran, _ = tokenized([dialogue({}), dialogue({}) | record])
    assert ran.code == 5
    assert f".jsonl:2, {message}" in ran.err


MARKED = "<<<|user|>>>ask<<<|user|>>><<<|assistant|>>>say<<<|assistant|>>>"


@pytest.mark.parametrize("text", [MARKED, "saule un upe"], ids=["markers", "plain"])
@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"masked": True}, {"weight": 0.5}], ids=str)
def test_texts_that_say_that_they_are_not_trained(tokenized, train, text, flag):
    ran, prefix = tokenized([{"text": text}, {"text": text} | flag])
    assert ran.code == 5
    assert f".jsonl:2, the record has '{next(iter(flag))}'" in ran.err
    assert train("lint", next(prefix.parent.glob("*.jsonl"))).code == 6


def test_a_column_of_another_kind_is_no_flag(tokenized):
    assert tokenized([{"text": "saule un upe", "loss": 2.31, "weight": 1, "train": True, "masked": None}])[0].code == 0


def test_a_key_that_stands_twice(tokenized):
    text = json.dumps(dialogue({}))
    for line in (text.replace("{", '{"messages": [], ', 1), text.replace('"say', '"no", "content": "say')):
        ran, _ = tokenized([dialogue({}), line])
        assert ran.code == 5
        assert ".jsonl:2, '" in ran.err
        assert "a key is given twice" in ran.err
    quoted = 'a "b": c \\" \\\\": d\\'
    reply = {"role": "assistant", "content": quoted, 'x\\": 1': None}
    record = {"messages": [{"role": "user", "content": quoted}, reply]}
    assert tokenized([record])[0].code == 0  # what only looks like it


def test_a_turn_of_the_user_that_is_to_be_trained(tokenized):
    record = dialogue({})
    record["messages"][0]["train"] = True
    ran, _ = tokenized([record])
    assert ran.code == 5
    assert "turn 1, of the role 'user': a turn of another role than the assistant" in ran.err
    record["messages"][0]["train"] = False
    assert tokenized([record])[0].code == 0


def test_a_key_that_the_template_reads_is_not_harmless():
    record = {"messages": [{"role": "user", "content": "a", "name": "b"}, {"role": "assistant", "content": "c"}]}
    plain = reader("conversations", (), template="{{ message['content'] }}{{ tool.name }}")
    assert plain(record).contents == ["a", "c"]
    assert reader("conversations", (), template="{{ message.name }}")(record).turns[0]["name"] == "b"
    record["messages"][0]["lang"] = "lv"
    with pytest.raises(Malformed) as failed:
        reader("conversations", (), template="{{ message.get('lang') }}")(record)
    assert (failed.value.reason, failed.value.detail) == ("unknown", "turn 1 has 'lang'")


def test_blocks_that_are_no_replies_cannot_be_left_out(tokenized, tmp_path):
    """A template with one generation block for all that the assistant says in a dialogue of two turns."""
    folder = byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>")
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% generation %}{{ m.content[:2] }}"
        "{% endgeneration %}{% generation %}{{ m.content[2:] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    options = ("--tokenizer", folder, "--chat-template", tmp_path / "t.jinja", "--max-drop-rate", 1)
    ran, _ = tokenized([dialogue({}, {}), dialogue({}, {"weight": 0})], *options)
    if ran.code == 0:
        assert "1 dropped: a reply is excluded from the training, but the chat template" in ran.err
    else:  # the check of templates has refused it before
        assert "generation blocks" in ran.err


def test_role_bins_and_markers_cannot_leave_a_reply_out(train, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [dialogue({}), dialogue({}, OFF[0])])
    )
    options = ["--vocab-file", MODEL, "--vocab-extra-ids-list", "<|im_start|>,<|im_end|>", "--max-drop-rate", 1]
    ran = train("role-bins", "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "R", *options)
    assert ran.code == 0, ran.err
    assert "1 dropped: a reply is excluded from the training, which role bins and markers cannot express" in ran.err
    for form, count in (("control-text", 1), ("conversations", 2)):
        (tmp_path / "r.yml").write_text(f"source: {tmp_path}/in.jsonl\nconversations: messages\nas: {form}\n")
        ran = train("fetch", tmp_path / "r.yml", tmp_path / f"{form}.jsonl")
        assert ran.code == 0, ran.err
        lines = (tmp_path / f"{form}.jsonl").read_text().splitlines()
        assert len(lines) == count
    assert json.loads(lines[1])["conversations"][3] == {"role": "assistant", "content": "say 1", "weight": 0}


KEYS = [{"reasoning_content": "hm"}, {"tool_calls": [{"function": {"name": "f"}}]},
        {"train_detail": [{"train": False}]}, {"weight": 0.5}, {"toxic": False}]  # fmt: skip


@pytest.mark.parametrize("more", KEYS, ids=str)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "columns"])
def test_what_is_fetched_is_judged_as_its_source(train, tmp_path, more, kind):
    """Of Parquet and of a column of lists too, where each turn has every key, null where it has none."""
    record = dialogue(more)
    path = tmp_path / f"in.{kind if kind == 'parquet' else 'jsonl'}"
    if kind == "parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([record]), path)
    elif kind == "columns":
        keys = ("role", "content", *more)
        columns = {key: [turn.get(key) for turn in record["messages"]] for key in keys}
        path.write_text(json.dumps({"messages": columns}) + "\n")
    else:
        path.write_text(json.dumps(record) + "\n")
    recipe = f"source: {path}\nconversations: messages\nas: "
    (tmp_path / "r.yml").write_text(recipe + "conversations\n")
    assert train("fetch", tmp_path / "r.yml", tmp_path / "out.jsonl").code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"conversations": record["messages"]}
    (tmp_path / "r.yml").write_text(recipe + "control-text\n")
    marked = train("fetch", tmp_path / "r.yml", tmp_path / "marked.jsonl")
    reason = "weight" if "weight" in more else "unknown" if more.keys() & {"train_detail", "toxic"} else "more"
    assert (marked.code, f"1 dropped ({reason} 1)" in marked.err) == (3, True)


def test_columns_of_parquet_are_looked_at(tokenized, train, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    rows = [dialogue({"weight": None}) | {"system": None}, dialogue({"weight": 1}) | {"system": "be kind"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    options = ["--vocab-file", MODEL, "--output-prefix", tmp_path / "P", "--workers", 1]
    ran = train("tokenize", "--input", tmp_path / "a.parquet", *options)
    assert ran.code == 5
    assert "a.parquet:2, the record has 'system'" in ran.err


def test_tables_know_each_key_once():
    assert not HARMLESS & (FLAGS.keys() | MORE)
    assert not MORE & ALLOWED.keys()
    assert set(GRAVE) <= REASONS.keys()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_text_of_wide_characters_is_named(train, tmp_path, encoding):
    (tmp_path / "a.jsonl").write_bytes((json.dumps(dialogue({})) + "\n").encode(encoding))
    ran = train("tokenize", "--input", tmp_path / "a.jsonl", "--vocab-file", MODEL, "--output-prefix", tmp_path / "P")
    assert ran.code == 3
    assert "not UTF-8" in ran.err
    assert "iconv -f UTF-" in ran.err
