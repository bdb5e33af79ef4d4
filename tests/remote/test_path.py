"""A path in a store does what readers do with a path of the disk, and refuses the rest."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
from pathlib import Path

import pytest

import vitruvian
from converters.remote import path as paths
from converters.remote.path import Mount, RemotePath, remote
from converters.remote.ranges import BOUND, CACHE, GROWN, SMALLEST
from converters.remote.store import Entry
from formats.disk.handle import open_handle, opened, pread, size_of
from formats.errors import SourceError, UnsupportedError


class Memory:
    """A store in memory, and what it was asked for."""

    url = "s3://bucket"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.held, self.asked, self.broken = files, list[tuple[int, int]](), 0

    def list_folder(self, folder: str) -> dict[str, Entry | None]:
        below = [key.removeprefix(f"{folder}/") for key in self.held if key.startswith(f"{folder}/")]
        return {
            name.partition("/")[0]: None if "/" in name else self.stat(f"{folder}/{name}") for name in below
        }  # fmt: skip

    def stat(self, key: str) -> Entry | None:
        return Entry(len(self.held[key]), f'"{hash(self.held[key])}"') if key in self.held else None

    def fetch(self, key: str, entry: Entry, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        if self.broken:
            self.broken -= 1
            raise SourceError("broken")
        return memoryview(self.held[key])[start:stop]


def mounted(files: dict[str, bytes]) -> tuple[RemotePath, Memory]:
    """The folder `run` of a store in memory."""
    store = Memory(files)
    paths.MOUNTS["s3:/bucket"] = Mount(store, ["run"])
    return RemotePath("s3:/bucket/run"), store


def refused(act) -> str:
    """What an error says."""
    try:
        act()
    except UnsupportedError as error:
        return str(error)
    raise AssertionError


def test_a_path_is_listed_and_read():
    run, store = mounted({"run/a.txt": b"one", "run/sub/b.bin": bytes(range(200)), "latest": b"run", "other/c": b""})
    assert str(run) == "s3://bucket/run"
    assert str(run / "sub" / "b.bin") == "s3://bucket/run/sub/b.bin"
    assert [type(entry) for entry in (run / "a", run.parent, run.with_name("x"), *run.parents)] == [RemotePath] * 6
    assert [path.name for path in run.iterdir()] == ["a.txt", "sub"]
    assert [str(path) for path in run.glob("*/*.bin")] == ["s3://bucket/run/sub/b.bin"]
    assert [run.is_dir(), run.is_file(), run.exists(), (run / "a.txt").is_file()] == [True, False, True, True]
    assert not any(
        path.exists() for path in (run / "none", run / ".." / "latest", run.parent / "none", RemotePath("x"))
    )
    assert (run.parent / "latest").read_text() == "run"  # above what the user named, without a list of the bucket
    assert (run / "a.txt").read_bytes() == (run / "a.txt").open("rb").read() == b"one"
    assert (run / "sub" / "b.bin").stat().st_size == 200
    assert (run / "sub").relative_to(run) == Path("sub")
    assert (run / "a").is_relative_to(run)
    assert run.resolve() == run != Path("s3:/bucket/run")
    assert len({run, run / "a", RemotePath("s3:/bucket/run")}) == 2
    assert pickle.loads(pickle.dumps(run)) == run
    before = (run / "a.txt").stat()
    store.held["run/a.txt"] = b"two"
    assert (run / "a.txt").stat() == before
    paths.MOUNTS["s3:/bucket"] = Mount(store, ["run"])
    assert (run / "a.txt").stat().st_mtime_ns != before.st_mtime_ns
    for act in (
        run.mkdir, lambda: next(os.walk(run)), lambda: (run / "x").write_bytes(b""), lambda: shutil.rmtree(run),
        (run / "a.txt").unlink, lambda: os.open(run / "a.txt", os.O_RDONLY),
    ):  # fmt: skip
        assert "is in a store, and this needs a folder of this machine" in refused(act)


def test_reads_grow_while_they_go_on_and_stay_within_a_bound():
    content = os.urandom(1 << 20) * 48
    run, store = mounted({"run/large": content, "run/small": b"x" * 100})
    with opened(run / "large") as handle:
        assert size_of(handle) == len(content)
        assert pread(handle, 8, 0) == content[:8]
        assert pread(handle, 100, 8) == content[8:108]
        assert store.asked == [(0, SMALLEST)]
        assert pread(handle, 50, 40_000_000) == content[40_000_000:40_000_050]
        assert store.asked[1:] == [(40_000_000, 40_000_000 + SMALLEST)]
        joined = b"".join(pread(handle, 100_000, at) for at in range(0, len(content), 100_000))
        assert joined == content
        assert CACHE.nbytes <= BOUND
        assert len(store.asked) < 40  # of 480 reads
        assert sum(stop - start for start, stop in store.asked) <= len(content) + 2 * SMALLEST
        assert max(stop - start for start, stop in store.asked) > GROWN
        assert pread(handle, 100, len(content) - 10) == content[-10:]
    assert not CACHE.nbytes
    assert not CACHE.held


def test_what_fails_is_not_remembered():
    run, store = mounted({"run/one": b"x" * 50_000})
    handle = open_handle(run / "one")
    store.broken = 1
    try:
        pread(handle, 10, 0)
        raise AssertionError
    except SourceError:
        assert pread(handle, 10, 0) == b"x" * 10
    handle.close()


def test_a_path_that_is_opened_anew_is_listed_anew():
    paths.MOUNTS.clear()
    there = remote(Path("s3://models/run"))
    assert paths.MOUNTS["s3:/models"].roots == ["run"]
    first = paths.MOUNTS["s3:/models"]
    assert remote(Path("s3:/models/run/sub")) == there / "sub"
    assert paths.MOUNTS["s3:/models"] is not first
    paths.MOUNTS.clear()


def test_a_bucket_without_obstore_names_the_extra(monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr(paths, "MOUNTS", {})
    monkeypatch.setattr("converters.remote.object_store.find_spec", lambda name: own("no_" + name))
    with pytest.raises(UnsupportedError, match="s3://bucket needs the package obstore") as error:
        vitruvian.open("s3://bucket/run")
    assert error.value.hint == "pip install 'vitruvian[remote]'"
