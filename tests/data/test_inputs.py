"""Input files in ranges: every line once, whatever the file and wherever it is cut."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.errors import SourceError, UsageError
from train.data.tokens import input_ranges
from train.data.tokens.records import Malformed

lines = st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.text(max_size=30), st.none()), min_size=1, max_size=30)


def read(paths, key="text"):
    return [value for part in input_ranges.ranges(paths) for value in input_ranges.values(part, key)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=lines, size=st.integers(4, 50), end=st.booleans(), crlf=st.booleans(), bom=st.booleans())
def test_every_line_once_wherever_the_file_is_cut(tmp_path, monkeypatch, texts, size, end, crlf, bom):
    monkeypatch.setattr(input_ranges, "RANGE", size)
    path, cut = tmp_path / "x.jsonl", "\r\n" if crlf else "\n"
    text = cut.join("" if entry is None else json.dumps({"text": entry}, ensure_ascii=False) for entry in texts)
    content = b"\xef\xbb\xbf" * bom + (text + cut * end).encode()
    path.write_bytes(content or b"\n")
    assert [value for value in read([path]) if value is not None] == [
        {"text": entry} for entry in texts if entry is not None
    ]
    parts = input_ranges.ranges([path])
    assert sum(parts.size(part) for part in parts) == parts.nbytes == path.stat().st_size
    assert len(parts) == len(list(parts))


def test_lines_keep_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(input_ranges, "RANGE", 7)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n\n{]\n{"text": "b"}\n')
    records = read([tmp_path / "x.jsonl"])
    assert [value if not isinstance(value, Malformed) else value.reason for value in records] == [
        {"text": "a"}, None, None, "json", {"text": "b"},
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "txt", "txt.gz"])
def test_other_files_have_the_same_records(tmp_path, kind):
    records = [{"text": f"document {number} ā"} for number in range(2500)]
    path = tmp_path / (f"x.{kind}" if "txt" in kind or kind == "parquet" else f"x.jsonl.{kind}")
    text = "".join((record["text"] if "txt" in kind else json.dumps(record)) + "\n" for record in records).encode()
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
    monkeypatch.setattr(input_ranges, "LONGEST", 100)
    monkeypatch.setattr(input_ranges, "RANGE", 64)
    text = '{"text": "a"}\n' + '{"text": "' + "x" * 500 + '"}\n' + '{"text": "b"}\n'
    (tmp_path / "x.jsonl").write_text(text)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("x.jsonl", "y.jsonl.gz"):
        records = read([tmp_path / name])
        assert [row.reason if isinstance(row, Malformed) else row["text"] for row in records] == ["a", "long", "b"], (
            name
        )


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("x.jsonl", None, SourceError, "is not there"),
        ("x.jsonl", b"", SourceError, "is empty"),
        ("x.json", b'[{"text": "a"}]', SourceError, "one JSON array"),
        ("x.json", b'{\n "text": "a"\n}\n', SourceError, "one JSON object over several lines"),
        ("x.csv", b"a,b\n", UsageError, "is a table"),
        ("x.parquet", b"PAR1 no", SourceError, "not a parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        input_ranges.ranges([tmp_path / name])


def test_a_file_named_twice_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="named twice"):
        input_ranges.ranges([tmp_path / "x.jsonl"] * 2)


def packed(kind, text):
    import zstandard

    if kind == "gz":
        return gzip.compress(text)
    return zstandard.compress(text[:1000]) + zstandard.compress(text[1000:])


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("cut", [1, 5, 40, "frame"])
def test_compressed_files_that_are_cut_short(tmp_path, kind, cut):
    text = b"".join(b'{"text": "%x"}\n' % (number**7) for number in range(5000))
    content = packed(kind, text)
    keep = len(packed(kind, text[:1000])) // 2 if cut == "frame" else len(content) - cut
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes(content[:keep])
    with pytest.raises(
        SourceError, match=rf"x\.jsonl\.{kind} is cut short: its \d+ bytes end within a compressed stream"
    ):
        read([path])


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_with_other_bytes(tmp_path, kind):
    text = b"".join(b'{"text": "%x"}\n' % (number**7) for number in range(5000))
    path = tmp_path / f"x.jsonl.{kind}"
    valid = packed(kind, text)
    for content in (valid[: len(valid) // 2] + b"\xff" * 300 + valid[len(valid) // 2 + 300 :], valid + b"no frame"):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"is damaged after|is cut short"):
            read([path])
    path.write_bytes(text)
    with pytest.raises(SourceError, match="is not compressed with"):
        input_ranges.ranges([path])
    plain = tmp_path / "x y.jsonl"
    plain.write_bytes(valid)
    with pytest.raises(SourceError, match=rf"is compressed with .*does not end in \.{kind}") as caught:
        input_ranges.ranges([plain])
    assert caught.value.hint == f"mv '{plain}' '{plain}.{kind}'"


def test_of_parquet_only_what_records_need_is_read(tmp_path):
    import pyarrow
    from pyarrow import parquet

    odd = pyarrow.array([-(10**17), 2], pyarrow.timestamp("ms"))  # no date that Python has
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, pyarrow.array([b"a", b"\xff\xfe"], pyarrow.binary()).buffers()
    )
    messages = pyarrow.array([[{"role": "user", "content": "a"}], None])
    parquet.write_table(pyarrow.table({"odd": odd, "bad": bad, "messages": messages}), tmp_path / "x.parquet")
    assert read([tmp_path / "x.parquet"]) == [{"messages": [{"role": "user", "content": "a"}]}, {"messages": None}]
    parquet.write_table(pyarrow.table({"odd": odd}), tmp_path / "y.parquet")
    assert read([tmp_path / "y.parquet"]) == [{}, {}]
    for key in ("odd", "bad"):
        with pytest.raises(SourceError, match=r"x\.parquet is damaged in row group 0: "):
            read([tmp_path / "x.parquet"], key)
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[4 : len(content) // 3] = bytes(len(content) // 3 - 4)
    (tmp_path / "z.parquet").write_bytes(content)
    with pytest.raises(SourceError, match=r"z\.parquet"):
        read([tmp_path / "z.parquet"], "bad")


def test_a_file_named_twice_in_other_words_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.jsonl").write_text("{}\n")
    (tmp_path / "y.jsonl").symlink_to(tmp_path / "in/x.jsonl")
    for other in (tmp_path / "y.jsonl", tmp_path / "in/../in/x.jsonl"):
        with pytest.raises(UsageError, match="named twice, first as"):
            input_ranges.ranges([tmp_path / "in/x.jsonl", other])


def test_paths_that_lead_nowhere():
    from train.commands.tokenize import paths

    with pytest.raises(UsageError, match="home directory"):
        paths(["~nosuch-user-of-this-test/x.jsonl"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"text": 1e400}', "number"), ('{"text": -1e400}', "number"), (f'{{"text": {10**400}}}', "number"),
     ('{"text": NaN}', "json"), ('{"text": "\\ud83d"}', "json"), ('{"text": 1e400', "json")],
)  # fmt: skip
def test_a_number_that_no_float_holds_is_called_that(tmp_path, line, reason):
    (tmp_path / "x.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    first, second = read([tmp_path / "x.jsonl"])
    assert first == {"text": "a"}
    assert isinstance(second, Malformed)
    assert second.reason == reason
