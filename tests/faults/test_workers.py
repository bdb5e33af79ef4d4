"""Jobs in processes of their own give the same bytes as threads do, whatever becomes of these processes."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitruvian
from converters.move import engine, workers
from converters.move.blocks import Files
from converters.move.crc32 import Checksums
from converters.move.job import buffers_of
from converters.move.journal import open_journal
from converters.move.source_checks import SourceChecks
from converters.move.workers import Pass, Workers
from converters.plan.parts import Part
from converters.plan.plan import Job, make_plan
from converters.plan.request import Limits
from converters.remote.path import RemotePath
from formats.checkpoint import Settings
from formats.disk.safetensors import Fragment, Member, row_major
from formats.disk.zstd_stream import Stream
from formats.errors import DamagedError, Interrupted, OutputError, SourceError, UsageError
from formats.layout.leaves import Leaf
from formats.layout.slots import ORIGINAL
from formats.registry import open_checkpoint
from tests.faults.test_source_checksums import flip
from tests.models import files

SCRIPT = Path(__file__).with_name("in_workers.py")
LIMITS = Limits(1, 192 << 10)
ENV = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """The process ids of workers; everything is large enough for them."""
    pids: list[int] = []

    class Counted(workers._Worker):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            pids.append(self.process.pid)

    monkeypatch.setattr(engine, "STARTED", (4, 1))
    monkeypatch.setattr(engine, "has_one_thread", lambda: False)
    monkeypatch.setattr(workers, "_Worker", Counted)
    return pids


@pytest.fixture(scope="module")
def sources(model, tmp_path_factory) -> dict[str, tuple[Path, dict[str, object]]]:
    """Sources, and the options that they are read with."""
    made, hf = tmp_path_factory.mktemp("sources"), model("llama", "bfloat16")
    vitruvian.convert(hf, made / "megatron", to="megatron", tp=2, pp=2)
    vitruvian.convert(hf, made / "fsdp", to="fsdp", ranks=4)
    return {"hf": (hf, {}), "megatron": (made / "megatron", {}), "fsdp": (made / "fsdp", {"config": hf})}


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("hf", {"to": "megatron", "tp": 2, "pp": 2}),
        ("megatron", {"to": "huggingface", "dtype": "fp32"}),
        ("megatron", {"to": "megatron", "tp": 4}),
        ("fsdp", {"to": "huggingface"}),
    ],
)
def test_what_is_written_is_the_same(sources, started, tmp_path, monkeypatch, source, options):
    folder, reading = sources[source]
    by_workers = vitruvian.convert(folder, tmp_path / "a", threads=4, **options, **reading)
    assert len(started) == 4, "those that convert read back"
    monkeypatch.setattr(engine, "STARTED", (4, 1 << 40))
    by_threads = vitruvian.convert(folder, tmp_path / "b", threads=4, **options, **reading)
    assert len(started) == 4
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert by_workers.source_checksums == by_threads.source_checksums
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.parametrize("shape", [(128, 64), (64, 64)], ids=["embedding", "query, key and value"])
def test_a_damaged_source_is_seen(sources, started, tmp_path, shape):
    """In a tensor that one job reads, and in one that several read."""
    run = shutil.copytree(sources["megatron"][0], tmp_path / "run")
    fragments = [piece.fragment for piece in open_checkpoint(run, Settings()).fragments()]
    place = next(fragment for fragment in fragments if fragment.shape == shape)
    flip(place.path, place.offset)
    with pytest.raises(DamagedError, match=f"the {place.nbytes} bytes at byte {place.offset} .* have the CRC-32"):
        vitruvian.convert(run, tmp_path / "out", to="huggingface", threads=4)
    assert started


@given(st.binary(min_size=1, max_size=300), st.data())
def test_what_processes_count_adds_up(content, data):
    """Of a source, whose bytes are read by any of them and any number of times; of an output, whose bytes are not."""
    size = len(content)
    member, sizes = Member(0, size, zlib.crc32(content)), {(Path("f"), 0): size}
    fragment = Fragment(Path("f"), 0, "U8", (size,), (1,), member=member)
    job = Job("x", None, (size,), "U8", "U8", (Part(Leaf("x", (), 0), fragment),), {}, ())
    reads = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size), st.integers(0, 2)), max_size=9))
    cuts = sorted(data.draw(st.sets(st.integers(0, size))) | {0, size})
    processes = [(SourceChecks([job]), Checksums(sizes)) for _ in range(3)]
    for first, last, number in reads:
        low, high = min(first, last), max(first, last)
        processes[number][0]._count(fragment, member, low, memoryview(content)[low:high])
    for number, (low, high) in enumerate(itertools.pairwise(cuts)):
        processes[number % 3][1].add(fragment, low, memoryview(content)[low:high])
    checks, sums = SourceChecks([job]), Checksums(sizes)
    for read, written in processes:
        checks.merge(job, read.entries)
        sums.merge(written.taken())
        sums.merge(written.taken())

    def rest(_: Fragment, at: int, buffer: memoryview) -> None:
        buffer[:] = content[at : at + len(buffer)]

    assert str(checks.complete(rest, 1)) == "verified"
    assert len(checks.noted()) == 1
    assert sums.get(Path("f"), 0) == zlib.crc32(content)


def test_parts_that_differ_from_the_checksum_are_seen_when_they_are_put_together():
    member = Member(0, 4, zlib.crc32(b"abcd"))
    fragment = Fragment(Path("f"), 0, "U8", (4,), (1,), member=member)
    job = Job("x", None, (4,), "U8", "U8", (Part(Leaf("x", (), 0), fragment),), {}, ())
    checks, halves = SourceChecks([job]), [SourceChecks([job]) for _ in range(2)]
    halves[0]._count(fragment, member, 0, memoryview(b"ab"))
    halves[1]._count(fragment, member, 2, memoryview(b"cX"))
    checks.merge(job, halves[0].entries)
    with pytest.raises(DamagedError, match="x"):
        checks.merge(job, halves[1].entries)


@pytest.fixture
def jobs(sources) -> list[Job]:
    return [*make_plan(open_checkpoint(sources["hf"][0], Settings())).jobs]


def test_a_worker_that_is_killed(started, jobs):
    with Files() as files, Workers(1, False, ()) as crew:
        pool = Pass(crew, files, buffers_of(LIMITS), LIMITS)
        expected = pool.run(jobs[0], lambda _: None, lambda: False)
        os.kill(started[0], signal.SIGKILL)
        with pytest.raises(Interrupted, match=f"process {started[0]}, .* was ended by signal 9") as error:
            pool.run(jobs[1], lambda _: None, lambda: False)
    assert "lower -j" in error.value.hint
    assert expected.digest


def test_a_copy_that_gets_no_memory(sources, started, tmp_path, monkeypatch, capfd):
    """Before its first job: the command says so, in place of a traceback of the copy."""
    monkeypatch.setattr(engine, "COPIED", (2, 1))
    monkeypatch.setattr(engine, "has_one_thread", lambda: True)
    monkeypatch.setattr(workers, "KEPT", 1 << 60)
    with pytest.raises(
        UsageError, match=r"memory is short: process \d+, one of those that convert, got no more"
    ) as error:
        vitruvian.convert(sources["hf"][0], tmp_path / "out", to="megatron", threads=2)
    assert "--memory" in error.value.hint
    assert "ulimit -v" in error.value.hint
    assert "Traceback" not in capfd.readouterr().err
    assert len(started) == 2


def test_a_new_worker_that_gets_no_memory(started, jobs, capfd):
    """For its buffers: nothing can have so many bytes."""
    with Files() as files, Workers(1, False, ()) as crew:
        pool = Pass(crew, files, buffers_of(LIMITS), replace(LIMITS, memory=1 << 60))
        with pytest.raises(UsageError, match=f"memory is short: process {started[0]}, "):
            pool.run(jobs[0], lambda _: None, lambda: False)
    assert "Traceback" not in capfd.readouterr().err


def test_errors_of_a_worker_are_those_of_the_job(started, jobs, tmp_path):
    """A file that is gone, a disk that refuses, a bug."""
    read = jobs[0].sources[0]
    gone = replace(jobs[0], sources=(replace(read, fragment=read.fragment._replace(path=tmp_path / "gone")),))
    out = Part(read.leaf, Fragment(Path("/dev/full"), 0, jobs[0].dtype, jobs[0].shape, row_major(jobs[0].shape)))
    cases = [
        (gone, SourceError, "gone: No such file or directory"),
        (replace(jobs[0], targets=(out,)), OSError, "No space left on device"),
        (replace(jobs[0], dtype="F7"), KeyError, "F7"),
    ]
    with Files() as files, Workers(1, False, ()) as crew:
        pool = Pass(crew, files, buffers_of(LIMITS), LIMITS)
        for job, kind, message in cases:
            with pytest.raises(kind, match=message) as error:
                pool.run(job, lambda _: None, lambda: False)
        assert "Traceback" in str(error.value.__cause__)
        assert pool.run(jobs[0], lambda _: None, lambda: False).digest
    assert len(started) == 1


def test_a_job_that_is_to_stop(started, jobs):
    moved: list[int] = []
    with Files() as files, Workers(1, False, ()) as crew:
        pool = Pass(crew, files, buffers_of(LIMITS), LIMITS)
        with pytest.raises(Interrupted, match="signal"):
            pool.run(replace(jobs[0], sources=[*jobs[0].sources]), moved.append, lambda: True)
        assert pool.run(jobs[0], moved.append, lambda: False).digest


def test_a_worker_that_hangs_is_killed_when_it_is_to_stop(started, jobs, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    with Files() as files, Workers(1, False, ()) as crew:
        pool = Pass(crew, files, buffers_of(LIMITS), LIMITS)
        pool.run(jobs[0], lambda _: None, lambda: False)
        os.kill(started[0], signal.SIGSTOP)
        with pytest.raises(Interrupted, match=f"process {started[0]}, .* did not stop within 0.5 seconds"):
            pool.run(jobs[1], lambda _: None, lambda: True)
    assert not Path(f"/proc/{started[0]}").exists()


def test_what_one_process_must_do_is_done_by_it(started, jobs):
    """A stream, an interleaved tensor, a store."""
    (part,) = jobs[0].sources
    place = part.fragment
    others = [
        replace(jobs[0], sources=(replace(part, fragment=place._replace(stream=Stream(0, 1))),)),
        replace(jobs[0], targets=(replace(part, interleaved=True),)),
        replace(jobs[0], twins={ORIGINAL: (replace(part, fragment=place._replace(path=RemotePath("s3://a/b"))),)}),
    ]
    assert workers._is_portable(jobs[0])
    assert not any(workers._is_portable(job) for job in others)


def words_of(how: str, source: Path, out: Path) -> list[str | Path]:
    """A command that writes Megatron by four processes."""
    words = ("hf2megatron", source, out, "--tp", "2", "-j", "4", "--memory", "768KiB", "-q")
    return [sys.executable, SCRIPT, how, *words]


def children(process: subprocess.Popen[bytes], number: int) -> list[int]:
    """The processes that one has started, as soon as it has so many."""
    pids: list[int] = []
    limit = time.monotonic() + 60
    while len(pids) < number and process.poll() is None and time.monotonic() < limit:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
            pids = sorted({int(pid) for task in tasks for pid in task.read_text().split()})
    return pids


@pytest.mark.parametrize("how", ["copied", "new"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_ended_and_run_again(sources, tmp_path, how, number):
    """No process is left, and nobody else can begin while one is."""
    source, out = sources["hf"][0], tmp_path / "out"
    expected = vitruvian.convert(source, tmp_path / "expected", to="megatron", tp=2).out
    words = words_of(how, source, out)
    with subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pids = children(process, 4)
        os.kill(process.pid, number)
        process.communicate(timeout=60)
    assert len(pids) >= 4
    assert process.returncode == (-number if number == signal.SIGKILL else 75)
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < limit, "workers outlive the process that asked"
        time.sleep(0.01)
    assert not out.exists()
    assert subprocess.run(words, env=ENV, capture_output=True, check=False).returncode == 0
    assert files(out) == files(expected)


@pytest.mark.parametrize("how", ["copied", "new"])
def test_one_is_killed(sources, tmp_path, how):
    """In a job or before its first: the command says so, and no signal of a closed pipe ends it."""
    out = tmp_path / "out"
    words = words_of(how, sources["hf"][0], out)
    with subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pids = children(process, 4)
        os.kill(pids[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"process {pids[0]}, one of those that convert, was ended by signal 9" in errors.decode()
    assert subprocess.run(words, env=ENV, capture_output=True, check=False).returncode == 0
    assert out.exists()


def test_the_system_reaps_a_copy(sources, tmp_path):
    """Where a supervisor has the signal of ended children ignored."""
    words = words_of("copied", sources["hf"][0], tmp_path / "out")
    ignored = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # noqa: E731
    ended = subprocess.run(words, env=ENV, capture_output=True, check=False, preexec_fn=ignored)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("number", "way"), [(errno.EAGAIN, "raise the limit of processes"), (errno.ENOMEM, "memory")])
def test_a_copy_that_cannot_be_started(sources, started, tmp_path, monkeypatch, number, way):
    def refused():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(engine, "COPIED", (2, 1))
    monkeypatch.setattr(engine, "has_one_thread", lambda: True)
    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(UsageError, match=f"no further process can be started: {os.strerror(number)}") as error:
        vitruvian.convert(sources["hf"][0], tmp_path / "out", to="megatron", threads=2)
    assert "lower -j" in error.value.hint
    assert way in error.value.hint
    assert not started


@pytest.mark.parametrize("source", ["hf", "fsdp"])
def test_a_thread_that_cannot_be_started(sources, tmp_path, monkeypatch, source):
    """Whichever it is: of those that sample, read metadata, convert, commit, finish files or read what is left."""
    start = threading.Thread.start

    def ended(limit: int) -> UsageError | None:
        started = itertools.count()

        def limited(thread: threading.Thread) -> None:
            if next(started) >= limit:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited)
            try:
                vitruvian.convert(sources[source][0], tmp_path / "out", to="megatron", threads=2)
            except UsageError as error:
                return error
        return None

    limit = 0
    while error := ended(limit):
        assert "no further thread can be started" in str(error)
        assert "lower -j" in error.hint
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
        limit += 1
    assert limit > 5


def test_a_file_system_that_is_busy_is_no_limit_of_processes(sources, tmp_path, monkeypatch):
    def busy(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "x.safetensors")

    monkeypatch.setattr("converters.convert.make_files", busy)
    with pytest.raises(OutputError, match=r"x\.safetensors: Resource temporarily unavailable") as error:
        vitruvian.convert(sources["hf"][0], tmp_path / "out", to="megatron", threads=2)
    assert "-j" not in error.value.hint


def test_a_damaged_source_is_seen_by_copies(sources, tmp_path):
    run = shutil.copytree(sources["megatron"][0], tmp_path / "run")
    place = next(piece.fragment for piece in open_checkpoint(run, Settings()).fragments())
    flip(place.path, place.offset)
    words = [sys.executable, SCRIPT, "copied", "megatron2hf", run, tmp_path / "out", "-j", "2", "-q"]
    ended = subprocess.run(words, env=ENV, capture_output=True, check=False, text=True)
    assert ended.returncode == 3
    assert f"the {place.nbytes} bytes at byte {place.offset}" in ended.stderr


@pytest.mark.parametrize(("threads", "number"), [(1, 0), (2, 2), (8, 3)])
def test_how_many_copies_there_are(jobs, threads, number):
    """As many as are asked for, as have enough to do, and as have a job."""
    large = [replace(job, shape=(engine.COPIED[1], *job.shape)) for job in jobs[:3]]
    assert engine.processes_for(large, Limits(threads), copied=True) == number
    assert engine.processes_for(jobs, Limits(threads), copied=True) == 0


def test_a_process_of_many_threads_is_not_copied():
    code = (
        "import threading; from converters.move.engine import has_one_thread as alone; print(alone()); "
        "wait = threading.Event(); threading.Thread(target=wait.wait).start(); print(alone()); wait.set()"
    )
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, env=ENV | {"OPENBLAS_NUM_THREADS": "1"}, capture_output=True, check=True, text=True)
    assert ended.stdout.split() == ["True", "False"]


def test_a_worker_that_is_left_keeps_others_out(started, jobs, tmp_path):
    with open_journal(tmp_path / "o.partial", "mark", (), force=False, every=1) as journal:
        crew = Workers(1, False, journal.locks)
        Pass(crew, Files(), buffers_of(LIMITS), LIMITS).run(jobs[0], lambda _: None, lambda: False)
    again = open_journal(tmp_path / "o.partial", "mark", (), force=True, every=1)
    with pytest.raises(OutputError, match=r"another process is writing|other processes are writing"), again:
        pass
    crew.__exit__()
    with open_journal(tmp_path / "o.partial", "mark", (), force=False, every=1):
        pass
