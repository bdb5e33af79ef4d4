"""Input files in ranges: every line once, whatever the file and wherever it is cut."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.errors import SourceError, UsageError
from train.data import inputs
from train.data.records import Malformed

lines = st.lists(st.one_of(st.integers(), st.text(max_size=30), st.none()), min_size=1, max_size=30)


def read(paths, key="text"):
    return [value for part in inputs.ranges(paths) for value in inputs.values(part, key)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=lines, size=st.integers(4, 50), end=st.booleans(), crlf=st.booleans(), bom=st.booleans())
def test_every_line_once_wherever_the_file_is_cut(tmp_path, monkeypatch, found, size, end, crlf, bom):
    monkeypatch.setattr(inputs, "RANGE", size)
    path, cut = tmp_path / "x.jsonl", "\r\n" if crlf else "\n"
    text = cut.join("" if one is None else json.dumps({"text": one}, ensure_ascii=False) for one in found)
    content = b"\xef\xbb\xbf" * bom + (text + cut * end).encode()
    path.write_bytes(content or b"\n")
    assert [value for value in read([path]) if value is not None] == [{"text": one} for one in found if one is not None]
    parts = inputs.ranges([path])
    assert sum(parts.size(part) for part in parts) == parts.nbytes == path.stat().st_size
    assert len(parts) == len(list(parts))


def test_lines_keep_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "RANGE", 7)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n\n{]\n{"text": "b"}\n')
    found = read([tmp_path / "x.jsonl"])
    assert [value if not isinstance(value, Malformed) else value.reason for value in found] == [
        {"text": "a"}, None, None, "json", {"text": "b"},
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "txt", "txt.gz"])
def test_other_files_have_the_same_records(tmp_path, kind):
    records = [{"text": f"document {number} ā"} for number in range(2500)]
    path = tmp_path / (f"x.{kind}" if "txt" in kind or kind == "parquet" else f"x.jsonl.{kind}")
    text = "".join((one["text"] if "txt" in kind else json.dumps(one)) + "\n" for one in records).encode()
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=1000)
    elif kind == "zst":
        import zstandard

        path.write_bytes(zstandard.compress(text[:1000]) + zstandard.compress(text[1000:]))
    else:
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    assert read([path]) == records


def test_long_lines_are_counted_and_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "LONGEST", 100)
    monkeypatch.setattr(inputs, "RANGE", 64)
    text = '{"text": "a"}\n' + '{"text": "' + "x" * 500 + '"}\n' + '{"text": "b"}\n'
    (tmp_path / "x.jsonl").write_text(text)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("x.jsonl", "y.jsonl.gz"):
        found = read([tmp_path / name])
        assert [one.reason if isinstance(one, Malformed) else one["text"] for one in found] == ["a", "long", "b"], name


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("x.jsonl", None, SourceError, "is not there"),
        ("x.jsonl", b"", SourceError, "is empty"),
        ("x.json", b'[{"text": "a"}]', SourceError, "one JSON array"),
        ("x.json", b'{\n "text": "a"\n}\n', SourceError, "one JSON object over several lines"),
        ("x.csv", b"a,b\n", UsageError, "is a table"),
        ("x.parquet", b"PAR1 no", SourceError, "no parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        inputs.ranges([tmp_path / name])


def test_a_file_named_twice_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="named twice"):
        inputs.ranges([tmp_path / "x.jsonl"] * 2)
