"""How files are written: by one at a time on some file systems, and to the disk while others are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

import vitruvian
from converters import convert
from converters.move import blocks, turns
from converters.move.blocks import Files
from converters.move.journal import open_journal
from converters.move.turns import Turns
from formats.disk.safetensors import Fragment
from tests.faults.test_workers import ENV, SCRIPT

PIECE = memoryview(b"piece")


class Watched:
    """Takes the place of `write_from`: how many write at the same time, at most."""

    def __init__(self) -> None:
        self.lock, self.now, self.most, self.calls = threading.Lock(), 0, 0, 0

    def __call__(self, *_: object) -> None:
        with self.lock:
            self.now, self.calls = self.now + 1, self.calls + 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self.lock:
            self.now -= 1


@pytest.fixture
def watched(monkeypatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr(blocks, "write_from", watched)
    return watched


def fragment(path: Path) -> Fragment:
    path.touch()
    return Fragment(path, 0, "U8", (9,), (1,))


@pytest.mark.parametrize(("taken", "most"), [(True, 1), (False, 4)])
def test_one_at_a_time_writes_to_a_file(tmp_path, watched, taken, most):
    """Threads, and others that have opened the file themselves, as processes do."""
    out = fragment(tmp_path / "out")
    with Files(turns=Turns(taken)) as one, Files(turns=Turns(taken)) as other, ThreadPoolExecutor(4) as pool:
        for writing in [pool.submit(opened.write, out, 0, PIECE) for opened in (one, one, other, other)]:
            writing.result()
    assert (watched.calls, watched.most) == (4, most)


def test_two_files_are_written_at_the_same_time(tmp_path, watched):
    with Files(turns=Turns(True)) as opened, ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            pool.submit(opened.write, fragment(tmp_path / name), 0, PIECE)
    assert (watched.calls, watched.most) == (2, 2)


def test_a_failed_write_ends_its_turn(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = fragment(tmp_path / "out")
    with Files(turns=Turns(True)) as one, Files(turns=Turns(True)) as other:
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "write_from", fails)
            with pytest.raises(OSError, match="No space"):
                one.write(out, 0, PIECE)
        one.write(out, 0, PIECE)
        other.write(out, 4, PIECE)
    assert out.path.read_bytes() == b"piecpiece"


def test_a_killed_writer_ends_its_turn(tmp_path, monkeypatch):
    out, begun = fragment(tmp_path / "out"), tmp_path / "begun"
    child = os.fork()
    if child == 0:
        with Files(turns=Turns(True)) as opened:
            blocks.write_from = lambda *_: (begun.touch(), time.sleep(60))
            opened.write(out, 0, PIECE)
        os._exit(1)
    while not begun.exists():
        time.sleep(0.001)
    with Files(turns=Turns(True)) as opened, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(opened.write, out, 0, PIECE)
        time.sleep(0.2)
        waited = not writing.done()
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        writing.result(timeout=10)
    assert waited
    assert out.path.read_bytes() == b"piece"


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        ("tmpfs", 1),
        ("ext4", 1),
        ("xfs", 1),
        ("overlay", 1),
        ("lustre", 0),
        ("gpfs", 0),
        ("nfs4", 0),
        ("fuse.x", 0),
        ("", 0),
    ],
)
def test_the_file_system_decides(model, tmp_path, monkeypatch, kind, taken):
    locked = []
    monkeypatch.setattr(turns, "mounted", lambda _: kind)
    monkeypatch.setattr(turns, "lock", lambda _, path, **__: locked.append(path))
    out = vitruvian.convert(model("llama", "bfloat16"), tmp_path / "out", to="megatron", tp=2, threads=1).out
    assert {path.name for path in locked} == ({"model_optim_rng.pt"} if taken else set())
    assert out.exists()


def test_a_worker_is_killed_in_its_turn(model, tmp_path):
    """The command says so, the others do not wait for ever, and the same command resumes."""
    source, expected = tmp_path / "source", model("llama", "bfloat16")
    vitruvian.convert(expected, source, to="megatron", tp=2)
    begun, out = tmp_path / "begun", tmp_path / "out"
    words = [sys.executable, SCRIPT, "copied", "megatron2hf", source, out, "-j", "2", "-q"]
    with subprocess.Popen(words, env=ENV | {"HANGS": str(begun)}, stderr=subprocess.PIPE) as process:
        limit = time.monotonic() + 60
        while not (begun.exists() and begun.read_text()) and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.5)
        alive = process.poll() is None
        os.kill(int(begun.read_text()), signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert alive, "nobody has waited for the turn"
    assert process.returncode == 75
    assert f"process {begun.read_text()}, one of those that convert, was ended by signal 9" in errors.decode()
    assert subprocess.run(words, env=ENV, capture_output=True, check=False).returncode == 0
    assert vitruvian.digest(out).digest == vitruvian.digest(expected).digest


def test_every_file_is_on_disk_before_it_is_published(model, tmp_path, monkeypatch):
    """The small ones too, though not at once: ext4 would first write all that is there of the large ones."""
    synced, publish = set(), convert.publish
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.add(Path(f"/proc/self/fd/{handle}").readlink()))
    monkeypatch.setattr(convert, "publish", lambda request: (seen.extend(synced), publish(request)))
    seen = list[Path]()
    out = vitruvian.convert(model("llama", "bfloat16"), tmp_path / "out", to="megatron", tp=2, threads=1).out
    written = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "out.partial/out") for path in seen} == written


def test_a_commit_that_takes_long_is_followed_at_once(tmp_path, monkeypatch):
    begun = list[float]()
    with open_journal(tmp_path / "o.partial", "mark", (), force=False, every=0.3) as journal, Files() as opened:
        monkeypatch.setattr(journal, "commit", lambda _: (begun.append(time.monotonic()), time.sleep(0.4)))
        with journal.kept(opened):
            assert journal.committing is not None
            journal.committing.start()
            time.sleep(2)
    paces = [after - before for before, after in pairwise(begun)][:-1]  # the last commit waits for none
    assert min(paces) < 0.65, "0.7 where each waits once more"
