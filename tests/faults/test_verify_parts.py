"""`convert verify --part`: a copy is compared with its manifest in parts, and after a kill nothing is read twice."""

from __future__ import annotations

import errno
import os

import pytest

from converters.move import journal
from converters.prove import resumed


@pytest.fixture
def copy(convert, model, tmp_path):
    assert convert("hf2megatron", model("llama", "bfloat16"), tmp_path / "copy", "--tp", 2).code == 0
    return tmp_path / "copy"


def test_parts_together_are_the_whole(convert, copy, tmp_path, monkeypatch):
    stdout = convert("verify", copy).out
    counts = [int(convert("verify", copy, "--part", f"{part}/3").out.split(": ")[1].split()[0]) for part in (1, 3)]
    assert (tmp_path / "copy.verify/journal-3-of-3.jsonl").is_file()
    read, execute = [], resumed.execute

    def seen(jobs, *args, **options):
        read.extend(jobs)
        return execute(jobs, *args, **options)

    monkeypatch.setattr(resumed, "execute", seen)
    ran = convert("verify", copy)
    assert (ran.code, ran.out) == (0, stdout)
    assert len(read) + sum(counts) == int(stdout.split(": ")[1].split()[0])
    assert not (tmp_path / "copy.verify").exists()


def test_a_part_tells_what_differs_in_it_and_a_new_copy_is_read_anew(convert, copy, tmp_path):
    shard = next((copy / "release").rglob("*01/*.pt"))
    content = shard.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    shard.write_bytes(damaged)
    codes = [convert("verify", copy, "--part", f"{part}/2").code for part in (1, 2)]
    assert sorted(codes) == [0, 6]
    shard.write_bytes(content)
    os.utime(shard, ns=(0, 0))
    ran = convert("verify", copy, "--part", "1/2")
    assert (ran.code, "remove" in ran.err) == (7, True), ran.err
    assert convert("verify", copy).code == 0


def test_what_was_verified_of_a_file_that_was_changed_since_is_read_again(convert, copy, monkeypatch):
    """Changed in place, with size and time kept, where no sample is."""
    monkeypatch.setattr("converters.move.journal.samples_of", lambda paths: ["unchanged"] * len(paths))
    assert [convert("verify", copy, "--part", f"{part}/2").code for part in (1, 2)] == [0, 0]
    shard = next((copy / "release").rglob("*01/*.pt"))
    before, content = shard.stat(), bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert convert("verify", copy).code == 6


def test_a_part_needs_a_manifest(convert, copy, model):
    assert convert("verify", copy, model("llama", "bfloat16"), "--part", "1/2").code == 2
    next(copy.rglob("vitruvian.json")).unlink()
    ran = convert("verify", copy, "--part", "1/2")
    assert (ran.code, "compares with a manifest" in ran.err) == (2, True), ran.err


def test_a_part_without_room_leaves_nothing(convert, copy, tmp_path, monkeypatch):
    """Its journals had a name each, and no line; but what somebody else has put there stays."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = tmp_path / "copy.verify"
    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_all", full)
        ran = convert("verify", copy, "--part", "1/2")
        assert (ran.code, "No space left on device" in ran.err, place.exists()) == (7, True, False), ran.err
        place.mkdir()
        (place / "mine").write_text("mine")
        assert convert("verify", copy, "--part", "1/2").code == 7
        assert (place / "mine").read_text() == "mine"


def test_empty_journals_are_none(convert, copy, tmp_path, monkeypatch):
    """Those of a run that found a full disk: on one that is only read they kept a copy from being checked."""
    place = tmp_path / "copy.verify"
    place.mkdir()
    for name in ("journal.jsonl", "journal-1-of-2.jsonl"):
        (place / name).touch()

    def read_only(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be written")

    monkeypatch.setattr(resumed, "open_journal", read_only)
    assert convert("verify", copy).code == 0
