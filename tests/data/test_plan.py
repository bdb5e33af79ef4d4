"""Pack plans: counted, written once, and refused for any other files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError
from train.data.packing.pack_plan import document_sizes, make_plan, open_plan, write_plan
from train.data.rows import open_rows
from train.data.tokens.indexed import open_indexed, write_index
from train.data.tokens.sidecar import Facts, facts_path, read_facts
from train.settings.config import Data

GOLDEN = Path(__file__).parents[1] / "golden/data"


def made(prefix, sizes, documents=None, dtype="uint16"):
    """Token files of documents of some lengths; the tokens are their places."""
    sizes = np.array(sizes, np.int32)
    np.arange(sizes.sum(), dtype=np.int64).astype(dtype).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), np.dtype(dtype), sizes, documents)
    return Path(prefix)


@pytest.fixture
def prefix(tmp_path):
    random = np.random.default_rng(1)
    return made(tmp_path / "P", np.clip(random.lognormal(3, 1, 2000), 1, 400).astype(int))


@pytest.mark.parametrize("algorithm", ["bfd", "k_bin", "overflow", "packed"])
def test_rows_of_every_algorithm(prefix, algorithm):
    indexed = open_indexed(prefix)
    plan = make_plan(indexed, algorithm=algorithm, seq_length=127, seed=1)
    taken = np.zeros(indexed.total, np.int64)
    for number in range(len(plan)):
        row = plan.row(number, indexed.sizes)
        assert 0 < sum(many for _, _, many in row) <= 128
        for document, low, many in row:
            begin = int(indexed.pointers[document]) // 2 + low
            assert low + many <= indexed.sizes[document]
            taken[begin : begin + many] += 1
    long = indexed.sizes > 128
    if algorithm == "packed":
        assert taken.min() == 1
        assert taken.sum() == indexed.total + len(plan) - 1, "one token is shared with each next row"
    else:
        assert taken.sum() == indexed.sizes[~long].sum() == plan.counts["tokens"]
        assert plan.counts["overlong"] == long.sum() > 0
    assert plan.counts["rows"] == len(plan)


def test_overlong_documents(prefix):
    indexed = open_indexed(prefix)
    with pytest.raises(RefusedError, match=r"of 2000 documents are longer than 128 tokens, such as document \d+ with"):
        make_plan(indexed, algorithm="bfd", seq_length=127, seed=1, overlong="error")
    plan = make_plan(indexed, algorithm="bfd", seq_length=127, seed=1, overlong="truncate")
    assert plan.counts["packed"] == 2000
    rows = [piece for number in range(len(plan)) for piece in plan.row(number, indexed.sizes)]
    assert sorted(document for document, _, _ in rows) == list(range(2000))
    assert all(many == min(128, indexed.sizes[document]) and low == 0 for document, low, many in rows)


@pytest.mark.parametrize("done", ["drop", "truncate", "packed"])
@pytest.mark.parametrize("asked", ["drop", "truncate", "error"])
def test_a_plan_whose_long_documents_are_treated_otherwise(prefix, train, tmp_path, done, asked):
    def opened(seq_length):
        algorithm = ["--algorithm", done] if done == "packed" else ["--overlong", done]
        ran = train("pack", prefix, "--seq-length", seq_length, *algorithm, "--out", tmp_path / f"{seq_length}.pack")
        assert ran.code == 0, ran.err
        return open_rows(
            Data(train=[prefix], seq_length=seq_length, overlong=asked, loss="all"),
            [tmp_path / f"{seq_length}.pack"],
            1,
        )

    if done == asked:
        assert len(opened(127))
    else:
        with pytest.raises(RefusedError, match=f"with overlong {'cut' if done == 'packed' else done}, not {asked}"):
            opened(127)
    assert len(opened(100_000)), "no document is that long"


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_packed_cuts_long_documents_whatever_is_asked(prefix, train, tmp_path, overlong):
    words = ["pack", prefix, "--seq-length", 127, "--algorithm", "packed", "--out", tmp_path / "plan"]
    ran = train(*words, "--overlong", overlong)
    assert (ran.code, f"overlong {overlong} has no effect with packed" in ran.err) == (2, True)
    assert not (tmp_path / "plan").exists()
    assert "longer than 128 tokens" in train(*words, "--overlong", "error").err
    assert "cut over several rows" in train(*words).err
    with pytest.raises(UsageError, match="has no effect with packed"):
        open_rows(Data(train=[prefix], seq_length=127, packing="packed", overlong=overlong, loss="all"), [prefix], 1)


def test_splits_are_kept_apart(prefix):
    indexed = open_indexed(prefix)
    plan = make_plan(indexed, algorithm="bfd", seq_length=511, seed=1, split=(90, 5, 5))
    bounds = {"train": (0, 1800), "validation": (1800, 1900), "test": (1900, 2000)}
    for name, (low, high) in bounds.items():
        rows = range(*plan.splits[name])
        documents = sorted(document for number in rows for document, _, _ in plan.row(number, indexed.sizes))
        assert documents == list(range(low, high))
        part = plan.part(name, indexed.sizes)
        rows = [part.row(number, indexed.sizes) for number in range(len(part))]
        assert sorted(document for row in rows for document, _, _ in row) == documents
        assert part.counts["tokens"] == sum(many for row in rows for _, _, many in row)
    with pytest.raises(UsageError, match="validation data would be trained"):
        make_plan(indexed, algorithm="k_bin", seq_length=511, seed=1, split=(90, 10))


def test_megatrons_splits():
    from train.data.packing.pack_plan import _bounds

    cases = json.loads((GOLDEN / "4_pack/splits_weights.json").read_text())["get_train_valid_test_split_"]
    for text, number, ends in cases:
        shares = [float(share) for share in text.replace("/", ",").split(",")]
        bounds = _bounds(number, shares + [0.0] * (3 - len(shares)))
        assert [0, *(high for _, high in bounds)] == ends


def test_splits_never_overlap_and_leave_nothing_out():
    from train.data.packing.pack_plan import _bounds

    shares = (0, 1e-300, 0.5, 1, 2, 3.7, 5, 33, 50, 98)
    for split in [(a, b, c) for a in shares for b in shares for c in shares if a or b or c] + [(1,), (1, 1), (0, 7)]:
        for number in (*range(40), 99, 101, 199, 299, 300):
            bounds = _bounds(number, split)
            assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
            assert bounds[-1][1] == number
            assert all(low <= high for low, high in bounds)
            assert all(low == high for (low, high), share in zip(bounds, split, strict=True) if not share)
    for number in range(301):
        for split in ((0, 50, 50), (1, 1, 1), (0, 1, 1), (2, 1, 1), (0, 3, 1), (98, 1, 1)):
            documents = [document for low, high in _bounds(number, split) for document in range(number)[low:high]]
            assert documents == list(range(number))


@pytest.mark.parametrize(
    "options",
    [
        ("--split", "nan"), ("--split", "inf,1"), ("--split", "1e308,1e308"), ("--split", "-1,2"),
        ("--split", "0"), ("--seq-length", 2**31 - 1), ("--seq-length", 2**70),
    ],
)  # fmt: skip
def test_shares_and_lengths_that_are_none(train, prefix, options):
    assert train("pack", prefix, "--seq-length", 63, *options).code == 2
    assert not prefix.with_name("P.pack").exists()


def test_only_a_plan_is_replaced(train, prefix, tmp_path):
    assert train("pack", prefix, "--seq-length", 63).code == 0
    (tmp_path / "P.pack/thesis.tex").write_text("years of work")
    ran = train("pack", prefix, "--seq-length", 127, "--force")
    assert ran.code == 7
    assert "holds 1 files that are not part of a plan, such as 'thesis.tex'" in ran.err
    assert (tmp_path / "P.pack/thesis.tex").exists()
    (tmp_path / "P.pack/thesis.tex").rename(tmp_path / "thesis.tex")
    (tmp_path / "P.pack.partial").mkdir()
    (tmp_path / "P.pack.partial/mine").touch()
    assert train("pack", prefix, "--seq-length", 127, "--force").code == 7
    (tmp_path / "P.pack.partial/mine").unlink()
    assert train("pack", prefix, "--seq-length", 127, "--force").code == 0


def test_a_full_disk_leaves_no_plan(prefix, tmp_path):
    argv = ["tests.data.limited", "4096", "pack", str(prefix), "--seq-length", "63"]
    ran = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, check=False)
    assert ran.returncode == 7
    assert "documents.npy: File too large" in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["P.bin", "P.idx"]


@pytest.mark.parametrize("name", ["", ".", "/", ".."])
def test_prefixes_without_a_name(train, tmp_path, name):
    for argv in (("count", name), ("show", name), ("pack", name, "--seq-length", 8),
                  ("packs", "append-eod", name, 3, "append")):  # fmt: skip
        ran = train(*argv)
        assert (ran.code, ("not a prefix" if name else "it is empty") in ran.err) == (2, True), argv
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    argv = ("--vocab-file", GOLDEN / "1_sft/model.model", "--format", "text", "--output-prefix", name)
    assert train("tokenize", "--input", tmp_path / "x.jsonl", *argv).code == 2


def test_an_index_with_a_negative_size_is_not_counted(train, tmp_path):
    prefix = made(tmp_path / "P", [3, 4, 5])
    content = bytearray((tmp_path / "P.idx").read_bytes())
    content[38:42] = (-4).to_bytes(4, "little", signed=True)
    (tmp_path / "P.idx").write_bytes(content)
    ran = train("count", prefix)
    assert ran.code == 3
    assert "has a sequence of -4 tokens" in ran.err


def test_a_plan_is_for_the_files_that_it_was_made_from(prefix, tmp_path):
    plan = make_plan(open_indexed(prefix), algorithm="bfd", seq_length=127, seed=1)
    write_plan(plan, tmp_path / "plan")
    opened = open_plan(tmp_path / "plan")
    assert np.array_equal(opened.documents, plan.documents)
    assert np.array_equal(opened.rows, plan.rows)
    assert opened.splits == {"train": [0, len(plan)]}
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)
    tokens[len(tokens) // 2 :] ^= 1
    tokens.tofile(f"{prefix}.bin")
    with pytest.raises(RefusedError, match=r"was made from other files than .*P: \.bin differ"):
        open_plan(tmp_path / "plan")


@pytest.mark.parametrize("name", ["plan.json", "documents.npy", "rows.npy"])
def test_damaged_plans(prefix, tmp_path, name):
    write_plan(make_plan(open_indexed(prefix), algorithm="bfd", seq_length=127, seed=1), tmp_path / "plan")
    content = (tmp_path / "plan" / name).read_bytes()
    (tmp_path / "plan" / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match="is not a pack plan"):
        open_plan(tmp_path / "plan")


def test_arrays_of_another_plan(prefix, tmp_path):
    plan = make_plan(open_indexed(prefix), algorithm="bfd", seq_length=127, seed=1)
    for rows in ([0, len(plan.documents)], [*plan.rows[:-1], len(plan.documents) - 1]):
        write_plan(plan, tmp_path / "plan", force=True)
        np.save(tmp_path / "plan/rows.npy", np.array(rows, np.int64))
        with pytest.raises(SourceError, match="is damaged"):
            open_plan(tmp_path / "plan")


def test_a_plan_that_lost_its_files(prefix, tmp_path):
    write_plan(make_plan(open_indexed(prefix), algorithm="bfd", seq_length=127, seed=1), tmp_path / "plan")
    prefix.with_name("P.idx").unlink()
    with pytest.raises(SourceError, match=r"was made from .*P, which is not there"):
        open_plan(tmp_path / "plan")


def test_files_of_other_programs(tmp_path):
    """A merge of GPT-NeoX leaves no list of documents; one with sentences has several sequences in each."""
    merged = open_indexed(GOLDEN / "2_merge/merged_text_document")
    assert len(merged.documents) == 1
    assert len(document_sizes(merged)) == len(merged) == 21
    sentences = made(tmp_path / "S", [3, 4, 5, 6], np.array([0, 2, 4]))
    with pytest.raises(UnsupportedError, match="4 sequences in 2 documents"):
        document_sizes(open_indexed(sentences))


@pytest.mark.parametrize(
    ("split", "lost"),
    [("98,1,1", "validation and test"), ("90,10,0", ""), ("1,0,0", ""), ("1,0,1e-9", "test"), ("50,50", "")],
)
def test_a_share_that_gets_no_row_is_told(train, tmp_path, split, lost):
    few = made(tmp_path / "F", [30] * 20)
    for options in ((), ("--json",), ("-n",)):
        ran = train("pack", few, "--seq-length", 63, "--split", split, "--force", *options)
        assert ran.code == 0, ran.err
        message = f"note: --split leaves {lost} without a row, 20 of 20 documents are packed: too few for such a share"
        assert (message in ran.err) == bool(lost)
        assert "without a row" not in ran.err or lost


def test_the_line_that_users_know(train, prefix, tmp_path):
    ran = train("pack", prefix, "--seq-length", 127, "--split", "98,2")
    assert ran.code == 0, ran.err
    counts = json.loads((tmp_path / "P.pack/plan.json").read_text())["counts"]
    assert ran.out.startswith(f"# Packed {counts['packed']} documents into {counts['rows']} documents\n")
    assert "are longer than a row: left out" in ran.err
    assert train("pack", prefix, "--seq-length", 127).code == 7
    assert train("pack", prefix, "--seq-length", 63, "--force").code == 0
    assert train("pack", prefix, "--seq-length", 63, "-n", "--out", tmp_path / "no").code == 0
    assert not (tmp_path / "no").exists()
    assert train("pack", prefix, "--seq-length", 63, "--split", "a,b").code == 2
    assert train("pack", made(tmp_path / "L", [500, 600]), "--seq-length", 63).code == 5
    (tmp_path / "other").mkdir()
    assert train("pack", prefix, "--seq-length", 63, "--out", tmp_path / "other", "--force").code == 7


def test_counts(train, tmp_path):
    prefix = made(tmp_path / "P", [0, 1, 2, 3, 8, 9, 1000, 2_000_000], dtype="uint16")
    ran = train("count", prefix, tmp_path / "out.txt", "--seq-length", 7, "--json")
    stats = json.loads(ran.out)
    assert (stats["documents"], stats["tokens"], stats["shortest"], stats["longest"]) == (8, 2_001_023, 0, 2_000_000)
    assert stats["bars"] == [[0, 0, 1], [1, 1, 1], [2, 3, 2], [8, 15, 2], [512, 1023, 1], [1048576, 2_000_000, 1]]
    assert stats["over"] == [3, 2_001_009]
    assert stats["quantiles"]["0.5"] == 3
    assert (tmp_path / "out.txt").read_text().split() == ["0", "1", "2", "3", "8", "9", "1000", "2000000"]
    assert train("count", prefix, tmp_path / "out.txt").code == 7
    (tmp_path / "P.bin").unlink()
    assert train("count", prefix).code == 0, "the index alone is read"


def test_the_last_bar_has_the_longest_document(train, tmp_path):
    prefix = made(tmp_path / "P", [7, 1 << 20, 5_000_000], dtype="int8")
    stats = json.loads(train("count", prefix, "--json").out)
    assert stats["bars"] == [[4, 7, 1], [1 << 20, 5_000_000, 2]]


def test_a_full_disk_leaves_no_numbers(prefix, tmp_path):
    argv = ["tests.data.limited", "1000", "count", str(prefix), str(tmp_path / "out.txt")]
    ran = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, check=False)
    assert ran.returncode == 7
    assert "out.txt.tmp: File too large" in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["P.bin", "P.idx"]


def test_numbers_of_documents_go_to_a_file(train, prefix, tmp_path):
    assert train("count", prefix, tmp_path, "--force").code == 7
    (tmp_path / "link").symlink_to(tmp_path / "out.txt")
    assert train("count", prefix, tmp_path / "link", "--force").code == 0
    assert (tmp_path / "link").is_symlink()
    assert len((tmp_path / "out.txt").read_text().split()) == 2000


@pytest.mark.parametrize(
    "change",
    [
        {"control": []}, {"control": {"user": "7"}}, {"control": {"user": True}}, {"control": None}, {"eod": "3"},
        {"vocabulary": 1e3}, {"tokenizer": 5}, {"template": 5}, {"counts": 3}, {"eod": -1}, {"more": 1},
    ],
)  # fmt: skip
def test_odd_facts(tmp_path, change):
    facts = {"tokenizer": "aa", "vocabulary": 1000, "control": {"user": 7}, "eod": None, "template": None, "counts": {}}
    facts_path(tmp_path / "P").write_text(json.dumps(facts))
    assert read_facts(tmp_path / "P") == Facts(**facts)
    facts_path(tmp_path / "P").write_text(json.dumps(facts | change))
    with pytest.raises(SourceError, match=f"does not say how the tokens were made: .*{next(iter(change))}"):
        read_facts(tmp_path / "P")


@pytest.mark.parametrize("text", ["[]", "null", "{", "[" * 100_000])
def test_facts_that_are_none(tmp_path, text):
    facts_path(tmp_path / "P").write_text(text)
    with pytest.raises(SourceError, match="does not say how the tokens were made"):
        read_facts(tmp_path / "P")


def test_showing(train, tmp_path):
    argv = [GOLDEN / "1_sft/sft_text_document", "--tokenizer", GOLDEN / "1_sft/model.model", "--first", 1000]
    ran = train("show", *argv)
    assert ran.code == 0, ran.err
    assert ran.out.count("document ") == 200
    given = train("show", f"{argv[0]}.bin", argv[2], *argv[3:])  # as vis.py is called
    assert given.out == ran.out
    assert train("show", *argv, argv[2]).code == 2
    first = ran.out.splitlines()[:4]
    assert first == [
        "document 0, 16 tokens, 5 trained",
        "  text    thanks not sentence lūdzu to thanks diena paldies »saule sveiki tulko«",
        "  pieces  <|user|> ▁thanks ▁not ▁sentence ▁lūdzu ▁to ▁thanks ▁diena ▁paldies <|user|> <|assistant|> »▁saule "
        "▁sveiki ▁tulko <|assistant|> <|endoftext|>«",
        "  ids     7 120 117 105 75 106 120 85 96 7 8 »78 124 35 8 3«",
    ]
    coloured = train("show", *argv[:-1], 1, "--color")
    assert "\x1b[32m" in coloured.out
    assert "»" not in coloured.out
    assert train("show", argv[0], "--document", 200).code == 2
    other = train("show", argv[0], "--tokenizer", GOLDEN / "1_sft/sft.jsonl")
    assert other.code == 3
    neox = train("show", argv[0], "--compat", "neox", "--control-tokens", "user=7,assistant=8", "--document", 0)
    assert "5 trained" in neox.out
    unknown = train("show", argv[0], "--document", 0)
    assert "document 0, 16 tokens, it is not known which of them are trained: --control-tokens" in unknown.out
    assert "»" not in unknown.out
    assert "15 trained" in train("show", argv[0], "--document", 0, "--loss", "all").out
    small = made(tmp_path / "S", [300])
    wrong = train("show", small, "--tokenizer", GOLDEN / "1_sft/model.model")
    assert wrong.code == 5
    assert "it is not the tokenizer that made it" in wrong.err
