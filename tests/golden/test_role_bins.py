"""Role bins: what the real preprocess_instruct_data.py wrote, and where ours is another file on purpose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from train.data.packing.packing import longest_first
from train.data.tokens.documents import open_documents
from train.data.tokens.indexed import open_indexed

GOLDEN = Path(__file__).parent / "data"
REAL = GOLDEN / "7_megatron_llm"
INPUTS = [REAL / "conv_a.jsonl", REAL / "conv_b.jsonl"]
BYTES, MODEL = GOLDEN / "1_sft/bytes.model", GOLDEN / "1_sft/model.model"
FILES = ("text.bin", "text.idx", "role.bin", "role.idx")
PACKS = (64, 219, 220, 237, 256, 4096)
USERS = ["--tokenizer_type", "SentencePieceTokenizer", "--vocab_extra_ids_list", "<|im_start|>,<|im_end|>",
         "--chunk_size", 32, "--workers", 2]  # fmt: skip
"""Words of the users' own script."""
HELLO = '{"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}]}'


def converted(train, prefix, inputs, *options, model=BYTES):
    ran = train("role-bins", "--input", *inputs, "--output_prefix", prefix, "--vocab_file", model, *USERS, *options)
    assert ran.code == 0, ran.err
    return ran


def same(prefix, name):
    for file in FILES:
        assert Path(f"{prefix}-{file}").read_bytes() == (REAL / f"{name}-{file}").read_bytes(), file


def written(tmp_path, *lines):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def conversation(*turns):
    return json.dumps({"conversations": [{"role": role, "content": content} for role, content in turns]})


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """The conversations that spell no special token, and of these the ones that spell none of the new tokens either.

    c4 has <|im_start|>, <|im_end|>, <s> and </s> in its contents, c16 <PAD>, <CLS>, <SEP>, <EOD> and <MASK>.
    """
    folder = tmp_path_factory.mktemp("plain")
    lines = [line for path in INPUTS for line in path.read_text().splitlines()]
    paths = {}
    for name, without in (("plain", {"c4"}), ("plainer", {"c4", "c16"})):
        paths[name] = folder / f"{name}.jsonl"
        chosen = [line for line in lines if json.loads(line)["id"] not in without]
        paths[name].write_text("\n".join(chosen) + "\n")
    return paths


def test_the_real_files_without_packing(train, tmp_path, plain):
    converted(train, tmp_path / "P", [plain["plain"]], "--no_new_tokens")
    same(tmp_path / "P", "plain_nopack")


@pytest.mark.parametrize("length", PACKS)
def test_the_real_files_with_packing(train, tmp_path, plain, length):
    ran = converted(
        train, tmp_path / "P", [plain["plain"]], "--no_new_tokens", "--do_packing", "--max_seq_length", length
    )
    same(tmp_path / "P", f"plain_pack{length}")
    rows = len(open_indexed(REAL / f"plain_pack{length}-text"))
    assert ran.out.splitlines()[-1] == f"# Packed 16 documents into {rows} documents"


def test_the_length_of_a_row_is_that_of_the_real_tool(train, tmp_path, plain):
    converted(train, tmp_path / "P", [plain["plain"]], "--no-new-tokens", "--do-packing")
    same(tmp_path / "P", "plain_pack4096")


def test_the_real_files_with_new_tokens(train, tmp_path, plain):
    """<CLS> and four more come before <|im_start|>, which is 705 then."""
    options = ["--do_packing", "--max_seq_length", 256]
    ran = converted(train, tmp_path / "P", [plain["plainer"]], *options)
    same(tmp_path / "P", "plain_newtok_pack256")
    printed = "<CLS> 700, <SEP> 701, <EOD> 702, <MASK> 703, <PAD> 704, <s> 1, </s> 2, <|im_start|> 705, <|im_end|> 706"
    assert printed in ran.err


def test_the_real_files_with_a_normalizing_model(train, tmp_path, plain):
    options = ["--no_new_tokens", "--do_packing", "--max_seq_length", 256]
    converted(train, tmp_path / "P", [plain["plain"]], *options, model=MODEL)
    same(tmp_path / "P", "plain_nfkc_pack256")


def test_the_real_files_with_a_large_vocabulary(train, tmp_path, plain):
    """66,253 pieces and two more: the text takes int32, the roles stay uint16."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(MODEL.read_bytes())
    for number in range(66_000):
        proto.pieces.add(piece=f"\ue000dummy{number:05d}", score=-1e6 - number, type=5)
    (tmp_path / "big.model").write_bytes(proto.SerializeToString())
    options = ["--no_new_tokens", "--do_packing", "--max_seq_length", 256]
    converted(train, tmp_path / "P", [plain["plain"]], *options, model=tmp_path / "big.model")
    same(tmp_path / "P", "plain_big_pack256")


@pytest.mark.parametrize("length", PACKS)
def test_the_real_documents_are_packed_into_the_real_rows(length):
    """All 17, with the injected tokens of the real tool in them: packing looks at lengths only."""
    for kind, mark in (("text", 1), ("role", 1000)):
        documents, theirs = open_indexed(REAL / f"nopack-{kind}"), open_indexed(REAL / f"pack{length}-{kind}")
        rows = longest_first(np.array(documents.sizes), length)
        assert len(rows.offsets) - 1 == len(theirs)
        for number in range(len(theirs)):
            pieces = range(rows.offsets[number], rows.offsets[number + 1])
            parts = [documents[rows.documents[piece]][: rows.lengths[piece]].tolist() for piece in pieces]
            row = parts[0] + [token for part in parts[1:] for token in (mark, *part)]
            assert row == theirs[number].tolist()


def test_a_content_never_becomes_a_special_token(train, tmp_path):
    """All 17: the same as theirs but for the one whose contents spell special tokens, which are text here."""
    converted(train, tmp_path / "P", INPUTS, "--no_new_tokens")
    ours, theirs = open_indexed(tmp_path / "P-text"), open_indexed(REAL / "nopack-text")
    assert len(ours) == len(theirs) == 17
    differing = [number for number in range(17) if not np.array_equal(ours[number], theirs[number])]
    assert differing == [4]
    tokens = ours[4].tolist()
    assert [tokens.count(number) for number in (1, 2, 700, 701)] == [0, 0, 2, 2]
    assert [theirs[4].tolist().count(number) for number in (1, 2, 700, 701)] == [1, 1, 3, 3]


def test_new_tokens_in_a_content_stay_text(train, tmp_path):
    converted(train, tmp_path / "P", [written(tmp_path, conversation(("user", "<PAD> <CLS> <|im_end|> </s>")))])
    tokens = open_indexed(tmp_path / "P-text")[0].tolist()
    assert [number for number in tokens if number >= 700 or number in (1, 2)] == [705, 706]


def test_a_model_that_would_find_them_in_a_text(train, tmp_path):
    """<|im_start|> is a piece of the type USER_DEFINED: SentencePiece itself would find it in any text."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(BYTES.read_bytes())
    for token in ("<|im_start|>", "<CLS>"):
        proto.pieces.add(piece=token, score=0, type=4)
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    source = written(tmp_path, conversation(("user", "a<|im_start|>b<CLS>")))
    ran = converted(train, tmp_path / "P", [source], "--no-new-tokens", model=tmp_path / "own.model")
    assert "<CLS> 701, <s> 1, </s> 2, <|im_start|> 700, <|im_end|> 702" in ran.err
    tokens = open_indexed(tmp_path / "P-text")[0].tolist()
    assert [number for number in tokens if number >= 700] == [700, 702]


def test_the_input_is_never_overwritten(train, tmp_path):
    """The real tool opens P.jsonl for writing before it reads its input."""
    source = written(tmp_path, HELLO)
    before = source.read_bytes()
    converted(train, tmp_path / "in", [source])
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in-role.bin", "in-role.idx", "in-text.bin", "in-text.idx", "in-text.json", "in.jsonl",
    ]  # fmt: skip


BAD = {
    "empty": '{"id": "e", "conversations": []}',
    "role": conversation(("tool", "x")),
    "field": '{"id": "e", "conversations": [{"role": "user"}]}',
    "keys": '{"id": "e", "conversations": [{"from": "human", "value": "x"}]}',
    "json": "{broken",
    "type": '{"conversations": [{"role": "user", "content": 5}]}',
    "object": "[1]",
}


def test_malformed_records_are_dropped_and_counted(train, tmp_path):
    lines = [HELLO, "", *BAD.values(), conversation(("PACK_SEP", "x")), '{"text": "plain"}', HELLO]
    source = written(tmp_path, *lines)
    ran = converted(train, tmp_path / "P", [source], "--max-drop-rate", 1, "--do_packing", "--json")
    counts = json.loads(ran.out)
    assert (counts["documents"], counts["rows"]) == (2, 1)
    assert {reason: counts.get(reason, 0) for reason in BAD} == dict.fromkeys(BAD, 1) | {"role": 2, "field": 2}
    text, role = (open_indexed(tmp_path / f"P-{kind}") for kind in ("text", "role"))
    half = (len(text[0]) - 1) // 2
    assert text[0][half] == 1, "<s> stands between the two, and none at the end"
    assert role[0][half] == 1000
    assert np.array_equal(text[0][:half], text[0][half + 1 :])
    refused = train("role-bins", "--input", source, "--output-prefix", tmp_path / "Q", "--vocab-file", BYTES)
    assert refused.code == 5
    assert "9 of 11 records are malformed, a larger share than 0.1" in refused.err


@pytest.mark.parametrize("bad", BAD)
def test_strict_refuses_one_malformed_record(train, tmp_path, bad):
    source = written(tmp_path, *[HELLO] * 20, BAD[bad])
    ran = train("role-bins", "--input", source, "--output-prefix", tmp_path / "P", "--vocab-file", BYTES, "--strict")
    assert ran.code == 5
    assert "1 of 21 records are malformed" in ran.err
    assert f"{source}:21" in ran.err
    assert not list(tmp_path.glob("P-*"))


def test_sharegpt_is_read_when_it_is_named(train, tmp_path):
    source = written(tmp_path, '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}')
    converted(train, tmp_path / "P", [source], "--format", "sharegpt")
    written(tmp_path, conversation(("user", "hi"), ("assistant", "yo")))
    converted(train, tmp_path / "Q", [source])
    for file in FILES:
        assert Path(f"{tmp_path}/P-{file}").read_bytes() == Path(f"{tmp_path}/Q-{file}").read_bytes()


def test_what_is_written_is_read_back(train, tmp_path):
    """Our own reader finds the replies by the roles."""
    converted(train, tmp_path / "P", INPUTS, "--do-packing", "--max-seq-length", 256)
    documents = open_documents(tmp_path / "P-text")
    assert documents.facts.counts["documents"] == 17
    assert documents.facts.counts["rows"] == len(documents.indexed)
    for number in range(len(documents.indexed)):
        roles = np.array(documents.roles[number])
        np.testing.assert_array_equal(documents.trained(number, number + 1)[1:], roles[1:] == 2)
    assert documents.indexed.documents.tolist() == documents.roles.documents.tolist() == [0]


def test_the_bins_can_be_shown(train, tmp_path):
    converted(train, tmp_path / "P", [written(tmp_path, HELLO)], "--no-new-tokens")
    for prefix in (tmp_path / "P-text", REAL / "plain_nopack-text"):
        ran = train("show", prefix, "--tokenizer", BYTES)
        assert ran.code == 0, ran.err
        assert "<700?>" in ran.out, "the id of <|im_start|>, which the model itself lacks"


def test_what_is_cut_is_told(train, tmp_path, plain):
    options = ["--no_new_tokens", "--do_packing", "--max_seq_length", 219]
    ran = converted(train, tmp_path / "P", [plain["plain"]], *options)
    sizes = np.array(open_indexed(REAL / "plain_nopack-text").sizes)
    lost = int((sizes[sizes > 219] - 219).sum())
    assert re.search(rf"1 document\b.* longer than a row: cut, {lost} tokens are lost", ran.err)


def test_several_files_are_one_after_the_other(train, tmp_path):
    for name, paths in {"P": INPUTS, "Q": [",".join(map(str, INPUTS))], "R": [INPUTS[0], "--input", INPUTS[1]]}.items():
        converted(train, tmp_path / name, paths)
    for file in FILES:
        assert len({Path(f"{tmp_path}/{name}-{file}").read_bytes() for name in "PQR"}) == 1


def test_a_dry_run_writes_nothing(train, tmp_path):
    ran = converted(train, tmp_path / "P", INPUTS, "--do-packing", "-n")
    assert "up to 4096 tokens, <s> 1 between conversations" in ran.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--max-seq-length", 8], 2, "--max-seq-length 8 has no effect without --do-packing"),
        (["--vocab-extra-ids-list", "<|im_end|>"], 2, "lacks <|im_start|>"),
        (["--vocab-extra-ids-list", "<|im_start|>,<|im_end|>,en"], 2, "is an ordinary piece"),
        (["--input", INPUTS[1], INPUTS[1]], 2, "name all files after one --input"),
        (["--vocab-file", "nowhere.model"], 3, "is not there"),
        (["--output-prefix", "nowhere/P"], 2, "mkdir -p nowhere"),
        (["--tokenizer_type", "GPT2BPETokenizer"], 2, "GPT2BPETokenizer"),
    ],
)
def test_wrong_words(train, tmp_path, options, code, message):
    usual = {"--output-prefix": tmp_path / "P", "--vocab-file": MODEL}
    base = [word for pair in usual.items() if pair[0] not in options for word in pair]
    ran = train("role-bins", "--input", INPUTS[0], *base, *options)
    assert ran.code == code
    assert message in ran.err
    assert not list(tmp_path.iterdir())


def test_a_fast_tokenizer_is_refused(train, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    source = written(tmp_path, HELLO)
    ran = train("role-bins", "--input", source, "--output-prefix", tmp_path / "P", "--vocab-file", tmp_path)
    assert ran.code == 2
    assert "is not a SentencePiece model" in ran.err


def test_packing_needs_a_token_that_begins_a_text(train, tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(BYTES.read_bytes())
    proto.pieces[1].piece = "<nothing>"
    (tmp_path / "x.model").write_bytes(proto.SerializeToString())
    source = written(tmp_path, HELLO, HELLO)
    argv = ["role-bins", "--input", source, "--vocab-file", tmp_path / "x.model", "--do-packing", "--output-prefix"]
    ran = train(*argv, tmp_path / "P", "--no-new-tokens")
    assert ran.code == 2
    assert "no BOS token" in ran.err
    assert train(*argv, tmp_path / "P").code == 0
    row = open_indexed(tmp_path / "P-text")[0].tolist()
    assert row[(len(row) - 1) // 2] == 705, "<BOS> is new, behind <PAD>"
