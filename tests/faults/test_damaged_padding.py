"""A changed bit in what no logical tensor has, such as rows of vocabulary padding: `convert verify` reads it too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from converters.prove import archive_crc
from converters.prove.archive_crc import archives
from formats.disk.handle import opened
from formats.torch_files.archive import StoredMember, members_of
from tests.faults.dcp_tools import refused, save
from tests.faults.test_fsdp_optim_faults import training
from tests.faults.test_source_checksums import flip

LARGE = 8 << 10
"""Fewest bytes of an entry that is damaged: a part of a matrix."""
COMMANDS: dict[str, tuple[object, ...]] = {
    "classic": ("hf2megatron", "--format", "torch"),
    "classic, optimizer": ("hf2megatron", "--format", "torch", "--with-optimizer"),
    "classic, padding alone": ("hf2megatron", "--tp", 2, "--make-vocab-size-divisible-by", 256, "--with-optimizer"),
    "torch_dist": ("hf2megatron", "--format", "torch_dist", "--with-optimizer"),
    "torch_dist, tp 2": ("hf2megatron", "--format", "torch_dist", "--tp", 2, "--with-optimizer"),
    "megatron-llm": ("hf2megatron", "--format", "megatron-llm", "--tp", 1),
    "neox": ("hf2neox", "--tp", 1),
    "mds": ("hf2mds", "--qkv", "grouped", "--tp", 1),
    "mds, optimizer": ("hf2mds", "--qkv", "grouped", "--tp", 1, "--with-optimizer"),
}


@pytest.fixture
def written(model, convert, tmp_path) -> Callable[[str], Path]:
    """`written(kind)`: what a command makes of a training; its vocabulary is padded."""

    def make(kind: str) -> Path:
        source, saved = training(model("llama-mha" if kind == "neox" else "llama", num_hidden_layers=1))
        for about in saved["optim"]["state"].values():
            about["step"] = 3.0
        run, (command, *options) = save(tmp_path / "dcp", saved), COMMANDS[kind]
        ran = convert(command, run, tmp_path / "out", *options, "--config", source)
        assert ran.code == 0, ran.err
        return tmp_path / "out"

    return make


def large(folder: Path) -> list[tuple[Path, StoredMember]]:
    """The entries of the files in a folder that are parts of matrices."""
    found = []
    for path in archives(folder):
        with opened(path) as file:
            found += [(path, member) for member in members_of(file, path) if member.size >= LARGE]
    return found


@pytest.fixture
def read(monkeypatch) -> list[tuple[Path, int]]:
    """The large entries, by file and first byte, that were read for their checksum alone."""
    found, crc_of = [], archive_crc.crc_of

    def seen(handle, offset, nbytes, path):
        found.extend([(path, offset)] if nbytes >= LARGE else [])
        return crc_of(handle, offset, nbytes, path)

    monkeypatch.setattr(archive_crc, "crc_of", seen)
    return found


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_last_byte_of_every_entry(written, convert, read, kind):
    """The last rows of an embedding and of an output layer are padding, as those of their moments are."""
    out, unhashed = written(kind), set[tuple[Path, int]]()
    for path, member in large(out):
        at = member.start + member.size - 1
        flip(path, at)
        ran = convert("verify", out)
        refused(ran, 6, out)
        if f"{out} is damaged: 1 part is not what was written: {path}: {member.name} (" in ran.err:
            unhashed.add((path, member.start))
        flip(path, at)
    assert unhashed, "padding is in no digest"
    read.clear()
    assert convert("verify", out).code == 0
    assert sorted(read) == sorted(unhashed), "what is hashed is not read twice"


@pytest.mark.parametrize("kind", ["classic, padding alone", "torch_dist, tp 2"])
def test_against_a_source(written, convert, read, tmp_path, kind):
    """The optimizer, which is not compared, is not read."""
    out, source = written(kind), (tmp_path / "dcp", "--config", tmp_path / "out/huggingface")
    assert convert("verify", out, *source).code == 0
    assert 0 < len(read) < len(large(out)) / 4
    for path, start in {*read}:
        flip(path, start + 1)
        assert convert("verify", out, *source).code == 6
        flip(path, start + 1)


def test_in_parts(written, convert, read):
    """The call that finishes reads what is in no digest, and all of it."""
    out = written("classic")
    assert convert("verify", out).code == 0
    unhashed = {*read}
    (path, start), *_ = sorted(unhashed)
    (member,) = (member for of, member in large(out) if (of, member.start) == (path, start))
    flip(path, start + member.size - 1)
    read.clear()
    assert [convert("verify", out, "--part", f"{part}/2").code for part in (1, 2)] == [0, 0]
    assert not read
    refused(convert("verify", out), 6, f"{path}: {member.name}")
    assert {*read} == unhashed
