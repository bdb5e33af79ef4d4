"""What threads share: one of them is stopped where another one would come between, and nothing is lost."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

import vitruvian
from converters.move.crc32 import MANY, Checksums, sizes_of
from converters.move.source_checks import SourceChecks
from converters.remote import path as remote_path
from converters.remote.path import RemotePath
from formats.checkpoint import OutputFile
from formats.disk.safetensors import Fragment, Member
from formats.errors import UsageError

PATIENCE = 0.2
"""Seconds in which another thread would have come between."""


class Between(dict[Any, Any]):
    """A dict that lets another thread come when it is asked for the n-th time."""

    def __init__(self, entries: dict[Any, Any], turn: int, work: Callable[[], object]) -> None:
        super().__init__(entries)
        self.turn, self.thread = turn, Thread(target=work)

    def come(self) -> None:
        self.turn -= 1
        if not self.turn:
            self.thread.start()
            self.thread.join(PATIENCE)

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        self.come()
        return value

    def __contains__(self, key: object) -> bool:
        present = super().__contains__(key)
        self.come()
        return present


def test_a_storage_that_is_forgotten_while_another_thread_counts_stays_forgotten():
    file = OutputFile(Path("f"), 8, (), {"s": (0, 8)}, lambda _: ())
    sums, fragment = Checksums(sizes_of([file])), Fragment(Path("f"), 0, "U8", (8,), (1,))
    sums.small = watched = Between({(Path("f"), 0): 0}, 2, lambda: sums.forget(fragment))
    sums.add(fragment, 0, memoryview(b"12345678"))
    watched.thread.join(10)
    assert dict(watched) == {(Path("f"), 0): MANY}
    assert sums.get(Path("f"), 0) is None


def test_an_entry_that_another_thread_begins_meanwhile_is_counted_once():
    content = bytes(range(256)) * 256
    member = Member(0, len(content), zlib.crc32(content))
    fragment = Fragment(Path("f"), 0, "U8", (len(content),), (1,), member=member)
    job = SimpleNamespace(name="t", sources=[SimpleNamespace(fragment=fragment)], replicas={}, twins={}, partial=False)
    checks = SourceChecks([SimpleNamespace(reads=[job])])
    checks.entries = watched = Between({}, 1, lambda: checks.passed(fragment, 0, memoryview(content)))

    def read(_: Fragment, at: int, buffer: memoryview) -> None:
        buffer[:] = content[at : at + len(buffer)]

    assert checks.complete(read, 1).entries == 1
    watched.thread.join(10)
    assert len(checks.noted()) == 1


@pytest.mark.parametrize(
    ("error", "sentence", "hints"),
    [
        (MemoryError(), "memory is short: Python got no more", ("--memory", "ulimit -v")),
        (MemoryError("Unable to allocate 9 GiB"), "memory is short: Unable to allocate 9 GiB", ("--memory",)),
        (RuntimeError("can't start new thread"), "no further thread can be started", ("ulimit -u", "ulimit -v")),
    ],
)
def test_a_machine_that_is_full_is_no_bug(convert, monkeypatch, error, sentence, hints):
    """Wherever in a command it is seen."""

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("converters.commands.combine.settings_of", full)
    ran = convert("average", "a", "b", "out")
    assert (ran.code, ran.err.count("error:")) == (2, 1)
    assert f"error: {sentence}\n" in ran.err
    assert all(hint in ran.err.partition("hint:")[2] for hint in hints)


def test_an_exporter_whose_thread_is_not_started(tmp_path, monkeypatch):
    def refused(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refused)
    with pytest.raises(UsageError, match="no further thread can be started"):
        vitruvian.exporter(tmp_path / "hub")


def test_threads_have_the_same_store(monkeypatch):
    slow, done, stores = Event(), Event(), list[object]()

    def store(*_: object) -> object:
        if not slow.is_set():
            slow.set()
            assert done.wait(10)
        return object()

    monkeypatch.setattr(remote_path, "_store", store)
    monkeypatch.setattr(remote_path, "MOUNTS", {})
    path = RemotePath("s3://bucket/run")
    first = Thread(target=lambda: stores.append(path.mount()[0]))
    first.start()
    assert slow.wait(10)
    stores.append(path.mount()[0])
    done.set()
    first.join(10)
    assert len(stores) == 2
    assert stores[0] is stores[1]
