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

    def make(records, *words):
        number = len(list(tmp_path.iterdir()))
        source, folder = tmp_path / f"{number}.jsonl", tmp_path / f"out{number}"
        folder.mkdir()
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        ran = train(
            "tokenize", "--input", source, "--vocab-file", GOLDEN / "model.model", "--output-prefix", folder / "P",
            "--workers", 1, "-q", *words,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        return {path.stem: path.with_suffix(".bin").read_bytes() for path in folder.glob("*.idx")}

    return make


def test_several_fields_get_files_of_their_own(tokenized):
    records = [{"text": f"saule {place}", "summary": f"upe {place} māja"} for place in range(20)]
    found = tokenized(records, "--jsonl-keys", "text,summary")
    assert found.keys() == {"P_text_document", "P_summary_document"}
    for key in ("text", "summary"):
        assert found[f"P_{key}_document"] == tokenized(records, "--jsonl-keys", key)[f"P_{key}_document"]


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


def test_without_the_library(train, tmp_path, monkeypatch):
    def lacking(_):
        raise PackageNotFoundError

    monkeypatch.setattr(sys.modules["train.commands.tokenize"], "version", lacking)
    (tmp_path / "in.jsonl").write_text('{"text": "saule"}\n')
    ran = train(
        "tokenize", "--input", tmp_path / "in.jsonl", "--vocab-file", GOLDEN / "model.model", "--output-prefix",
        tmp_path / "P", "--ftfy",
    )  # fmt: skip
    assert (ran.code, "pip install '.[ftfy]'" in ran.err) == (4, True), ran.err
