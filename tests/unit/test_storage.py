"""Safetensors headers, against the official library: the same bytes out, the same tensors in."""

from __future__ import annotations

import json
import os
import random
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from formats.disk.safetensors import (
    DTYPES,
    Entry,
    Fragment,
    file_size,
    read_into,
    read_safetensors,
    row_major,
    safetensors_header,
    write_from,
)
from formats.disk.zstd_stream import Reader, Stream
from formats.errors import SourceError
from formats.huggingface.folder import _shard

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAMES = [
    "plain", "Plain", "with space", 'with "quotes"', "back\\slash", "new\nline", "tab\t", "nul\x00", "bell\x07",
    "del\x7f", "héllo", "日本語", "🦙", "\ue000 before the astral", "\u2028", "a/b", "é", "e\u0301", "z" * 300,
]  # fmt: skip
SETS = {
    "every dtype": [Entry(f"t.{dtype}", dtype, (2, 3)) for dtype in TORCH],
    "every dtype, reversed names": [Entry(f"{100 - i}", dtype, (1,)) for i, dtype in enumerate(TORCH)],
    "odd names": [Entry(name, "F32" if i % 2 else "BF16", (i,)) for i, name in enumerate(NAMES)],
    "0-d and empty": [
        Entry("scalar", "F64", ()), Entry("empty", "F32", (0,)), Entry("empty 3-d", "I8", (4, 0, 2)),
        Entry("one", "U8", (1, 1, 1, 1)), Entry("also empty", "F32", (0, 0)), Entry("bool", "BOOL", ()),
    ],
    "no tensor at all": [],
    "numbered names": [Entry(f"layers.{i}.weight", "F16", (i % 3, 2)) for i in range(30)],
    "one odd byte": [Entry("x", "U8", (7,)), Entry("y", "F32", (3,))],
}  # fmt: skip


def tensors_for(entries: list[Entry]) -> dict[str, torch.Tensor]:
    """Tensors with distinct bytes; valid booleans."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, dtype, shape in entries:
        nbytes = prod(shape) * DTYPES[dtype]
        raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (nbytes,), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(TORCH[dtype]).reshape(shape) if nbytes else torch.empty(shape, dtype=TORCH[dtype])
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same_file(entries: list[Entry], metadata: dict[str, str] | None) -> None:
    tensors = tensors_for(entries)
    official = save(tensors, metadata)
    header, offsets = safetensors_header(entries, metadata or {})
    assert header == official[: len(header)]
    assert len(official) == len(header) + sum(prod(entry.shape) * DTYPES[entry.dtype] for entry in entries)
    assert set(offsets) == set(tensors)
    for name, offset in offsets.items():
        assert official[offset : offset + len(raw(tensors[name]))] == raw(tensors[name]), name


@pytest.mark.parametrize(
    "metadata", [None, {"format": "pt"}, {'odd "key" 日本': "välue\n\x01"}], ids=["-", "pt", "odd"]
)
@pytest.mark.parametrize("entries", SETS.values(), ids=SETS)
def test_headers_are_those_of_the_official_writer(entries, metadata):
    assert_same_file(entries, metadata)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
        max_size=8,
    )
)
@settings(max_examples=60)
def test_headers_of_any_names_and_shapes_are_those_of_the_official_writer(wanted):
    assert_same_file([Entry(name, dtype, shape) for name, (dtype, shape) in wanted.items()], {"format": "pt"})


def test_every_dtype_of_the_table_is_compared():
    assert set(TORCH) == set(DTYPES)


def test_the_order_of_entries_does_not_matter():
    entries = SETS["every dtype"]
    assert safetensors_header(entries, {}) == safetensors_header(entries[::-1], {})


def test_several_metadata_entries_are_read_back(tmp_path):
    metadata = {name: name.upper() for name in NAMES}
    header, _ = safetensors_header([], metadata)
    (tmp_path / "m.safetensors").write_bytes(header)
    assert read_safetensors(tmp_path / "m.safetensors") == ({}, metadata)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == metadata


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"a": "", "b": "日本"}], ids=["-", "pt", "two"])
@pytest.mark.parametrize("entries", SETS.values(), ids=SETS)
def test_what_the_official_library_writes_is_read(tmp_path, entries, metadata):
    path = tmp_path / "model.safetensors"
    save_file(tensors_for(entries), path, metadata)
    fragments, header = read_safetensors(path)
    official, content = load_file(path), path.read_bytes()
    assert header == (metadata or {})
    assert set(fragments) == set(official) == {entry.name for entry in entries}
    for entry in entries:
        fragment = fragments[entry.name]
        assert (fragment.dtype, fragment.shape, fragment.path) == (entry.dtype, entry.shape, path)
        assert fragment.row_major
        assert content[fragment.offset : fragment.offset + fragment.nbytes] == raw(official[entry.name])


@pytest.mark.parametrize("spaces", [0, 1, 8, 1000])
def test_padding_behind_the_header_is_read(tmp_path, spaces):
    header = json.dumps({"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode() + b" " * spaces
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    assert load_file(path)["x"].tolist() == list(b"abc")
    assert read_safetensors(path)[0] == {"x": Fragment(path, 8 + len(header), "U8", (3,), (1,))}


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((5,), (1,)), ((2, 3), (3, 1)), ((4, 2, 3), (6, 3, 1)), ((2, 0, 3), (0, 3, 1)), ((1, 1), (1, 1))],
)
def test_row_major(shape, strides):
    assert row_major(shape) == strides
    assert Fragment(Path("x"), 0, "F32", shape, strides).row_major
    if 0 not in shape:
        assert strides == torch.empty(shape).stride()


def test_reading_past_the_end_says_what_is_missing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        buffer = bytearray(4)
        read_into(file.fileno(), memoryview(buffer), 6, path)
        assert buffer == b"6789"
        with pytest.raises(SourceError, match=r"file: the file ends at byte 10, 1 bytes are missing"):
            read_into(file.fileno(), memoryview(buffer), 7, path)


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    path, content, read, write = tmp_path / "file", bytes(range(256)), os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:5]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:7], offset))
    with path.open("w+b") as file:
        write_from(file.fileno(), memoryview(content), 3)
        buffer = bytearray(256)
        read_into(file.fileno(), memoryview(buffer), 3, path)
    assert buffer == content
    assert path.read_bytes() == b"\0\0\0" + content


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"absent: No such file"):
        file_size(tmp_path / "absent")


@pytest.mark.parametrize("seed", range(10))
def test_tensors_are_spread_over_files_as_huggingface_hub_does(seed):
    """Tensors as large as a file may be, and larger ones, among them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    dice = random.Random(seed)
    sizes = [dice.choice((5, 10, 20, 39, 40, 41)) for _ in range(12)]
    tensors = {f"{number:02d}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=40).filename_to_tensors
    entries = [Entry(name, "U8", tuple(tensor.shape)) for name, tensor in tensors.items()]
    assert {file: [entry.name for entry in shard] for file, shard in _shard(entries, 40).items()} == theirs


def test_a_compressed_stream_is_read_from_any_place(tmp_path):
    """Forwards without beginning again: a stream may have gigabytes."""
    zstandard = pytest.importorskip("zstandard")
    content = random.Random(0).randbytes(1 << 20)
    packed = zstandard.compress(content)
    (tmp_path / "file").write_bytes(b"head" + packed + b"tail")
    with (tmp_path / "file").open("rb") as file:
        reader = Reader(file.fileno(), tmp_path / "file", Stream(4, len(packed)))
        for offset in (0, 700_000, 10, 300_000, 300_000, 0):
            decoder, forwards, buffer = reader.decoder, offset >= reader.position, bytearray(1000)
            reader.read_into(memoryview(buffer), offset)
            assert buffer == content[offset : offset + 1000]
            assert (reader.decoder is decoder) == forwards
