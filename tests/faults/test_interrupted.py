"""kill -9 and signals: the output is complete or absent, and the same command goes on to the same bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import vitruvian
from converters import convert as convert_module
from converters.common.atomic import put_in_place
from converters.move.journal import fingerprint, sealed
from converters.plan.plan import make_plan
from formats import registry
from formats.checkpoint import Settings
from formats.model.spec import Verbatim
from formats.registry import open_checkpoint
from tests.conftest import Killed
from tests.models import files

HERE = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": str(HERE.parents[1])}


@pytest.fixture(scope="session")
def run_killed(killed) -> Callable[[int, Path, Path], Killed]:
    """`run_killed(N, SRC, OUT)`: `killed_at.py`."""
    return lambda limit, source, out: killed(limit, source, out, 2, 2, script=HERE / "killed_at.py")


@pytest.fixture(scope="module")
def undisturbed(run_killed, model, tmp_path_factory) -> tuple[Path, dict[str, bytes], int, int]:
    """The source, the files of an undisturbed conversion, how many calls it made, how many of them wrote weights."""
    source, out = model("llama", "bfloat16"), tmp_path_factory.mktemp("whole") / "out"
    ran = run_killed(0, source, out)
    assert ran.returncode == 0, ran.out
    return source, files(out), ran.calls, ran.writes


@pytest.mark.parametrize("part", range(12))
def test_killed_anywhere_it_goes_on_to_the_same_bytes(undisturbed, run_killed, tmp_path, part):
    """Each part kills at two random points of its twelfth of the run, the second time while it goes on."""
    source, expected, calls, _ = undisturbed
    out, dice = tmp_path / "out", random.Random(part)
    low, high = 1 + calls * part // 12, calls * (part + 1) // 12
    for _ in range(2):
        ran = run_killed(dice.randint(low, high), source, out)
        assert ran.returncode in (-signal.SIGKILL, 0, 1), ran.out
        if out.exists():
            assert files(out) == expected, "published, but not complete"
    if not out.exists():
        assert run_killed(0, source, out).returncode == 0
    assert files(out) == expected


def test_finished_work_is_not_done_again(undisturbed, run_killed, tmp_path):
    source, expected, _, writes = undisturbed
    out = tmp_path / "out"
    run_killed(-(writes * 2 // 3), source, out)
    done = (tmp_path / "out.partial/journal.jsonl").read_text().count("\n") - 1
    assert done > 5
    ran = run_killed(0, source, out)
    assert ran.writes < writes * 0.9
    assert ran.writes <= writes - done  # each has at least one
    assert files(out) == expected


def test_a_journal_whose_files_are_gone_counts_for_nothing(undisturbed, run_killed, tmp_path):
    source, expected, _, writes = undisturbed
    run_killed(-(writes * 2 // 3), source, tmp_path / "out")
    next((tmp_path / "out.partial/out").rglob("*.pt")).unlink()
    assert run_killed(0, source, tmp_path / "out").returncode == 0
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize("line", [1, 3])
@pytest.mark.parametrize("damage", ["name", "digest"])
def test_a_damaged_line_of_a_journal_and_what_follows_count_for_nothing(
    undisturbed, run_killed, tmp_path, line, damage
):
    """Nor is the source blamed for a digest that nobody computed."""
    source, expected, _, writes = undisturbed
    run_killed(-(writes * 2 // 3), source, tmp_path / "out")
    path = tmp_path / "out.partial/journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    name, digest = json.loads(lines[line].rpartition(b" ")[0])
    lines[line] = {
        "name": lines[line].replace(name.encode(), name.encode()[:-1] + b"~"),
        "digest": lines[line].replace(digest.encode(), digest.encode()[::-1]),
    }[damage]
    path.write_bytes(b"".join(lines))
    ran = run_killed(0, source, tmp_path / "out")
    assert ran.returncode == 0, ran.out
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize("part", [(), ("--part", "1/2")], ids=["whole", "part"])
def test_a_journal_whose_beginning_is_damaged(undisturbed, run_killed, convert, tmp_path, part):
    source, expected, _, writes = undisturbed
    run_killed(-(writes // 2), source, tmp_path / "out")
    path, argv = tmp_path / "out.partial/journal.jsonl", ["hf2megatron", source, tmp_path / "out", "--tp", 2, "--pp", 2]
    content = path.read_bytes()
    path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    ran = convert(*argv, *part)
    assert (ran.code, "whose journal is damaged" in ran.err) == (7, True), ran.err
    assert f"remove {path.parent}" in ran.err
    assert "source has changed" not in ran.err
    assert convert(*argv, "--force").code == 0
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize("kind", ["without checksums", "other facts"])
def test_a_journal_of_an_older_version(undisturbed, run_killed, convert, tmp_path, kind):
    """Its lines have no checksums: it is not damaged, and nothing of it can be trusted. Or its fingerprint is made of
    other facts, sentences among them, and tells nothing of the conversion."""
    source, expected, _, writes = undisturbed
    run_killed(-(writes // 2), source, tmp_path / "out")
    path, argv = tmp_path / "out.partial/journal.jsonl", ["hf2megatron", source, tmp_path / "out", "--tp", 2, "--pp", 2]
    first, *lines = (line.rpartition(b" ")[0] for line in path.read_bytes().splitlines())
    facts = first.partition(b" at ")[0]
    older = [
        facts.replace(b"vitruvian 3 ", b"vitruvian 1 " if kind == "without checksums" else b"vitruvian 2 "),
        *lines,
    ]
    path.write_bytes(b"".join(line + b"\n" if kind == "without checksums" else sealed(line.decode()) for line in older))
    ran = convert(*argv)
    assert (ran.code, "of a conversion by an older version" in ran.err) == (7, True), ran.err
    assert f"remove {path.parent}, or start over with --force" in ran.err
    assert convert(*argv, "--force").code == 0
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize("verbatim", [False, True])
def test_unfinished_work_is_not_recognized_by_sentences(model, verbatim):
    """Another version may word them otherwise. What decides bytes is another conversion."""
    plan = make_plan(open_checkpoint(model(), Settings(verbatim=verbatim)))
    spec, mark = plan.spec, fingerprint(plan, "mean")
    said = {"why": "so", "remarks": ("so",), "under": "it"} if isinstance(spec, Verbatim) else {"notes": ("so",)}
    assert replace(spec, **said) == spec
    assert fingerprint(replace(plan, spec=replace(spec, **said)), "mean") == mark
    worded = [replace(job, edge="in other words") for job in plan.jobs]
    assert fingerprint(replace(plan, jobs=worded), "mean") == mark
    assert fingerprint(plan, "first") != mark
    assert fingerprint(replace(plan, spec=replace(spec, tied=not spec.tied)), "mean") != mark
    for change in ({"last": True}, {"rows": 7}, {"dtype": "F16"}):
        assert fingerprint(replace(plan, jobs=[replace(job, **change) for job in plan.jobs]), "mean") != mark


@pytest.mark.parametrize("what", ["", "out", "out/model.safetensors"])
@pytest.mark.parametrize("step", ["execute", "finish_files", "finish_small", "verify_output"])
def test_what_is_written_is_deleted_meanwhile(model, convert, monkeypatch, tmp_path, step, what):
    """Before each step, or in it: that is neither a damaged source nor an output, whether it is read back or not."""
    done = getattr(convert_module, step)
    gone = tmp_path / "out.partial" / what

    def disturbed(*given: Any, **options: Any) -> Any:
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        return done(*given, **options)

    monkeypatch.setattr(convert_module, step, disturbed)
    verify = [] if step == "verify_output" else ["--no-verify"]
    ran = convert("hf2hf", model("llama", "float32"), tmp_path / "out", "--dtype", "bf16", "-q", *verify)
    assert ran.code == 7, ran.err
    named = (
        gone / "model.safetensors" if (step, what) == ("finish_small", "out") else gone
    )  # which makes the folder anew
    assert f"error: {named} was deleted while this conversion wrote into it" in ran.err
    assert f"hint: remove what is left of {tmp_path / 'out.partial'}, and run the same command again" in ran.err
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    if what == "":
        shutil.rmtree(gone, ignore_errors=True)
    assert convert("hf2hf", model("llama", "float32"), tmp_path / "out", "--dtype", "bf16", "-q").code == 0


def test_another_conversion_does_not_go_on(undisturbed, run_killed, convert, tmp_path):
    source, _, _, writes = undisturbed
    run_killed(-(writes // 2), source, tmp_path / "out")
    ran = convert("hf2megatron", source, tmp_path / "out", "--tp", 4)
    assert ran.code == 7
    assert "another conversion" in ran.err
    assert convert("hf2megatron", source, tmp_path / "out", "--tp", 2, "--pp", 2, "--dtype", "fp32").code == 7
    assert convert("hf2megatron", source, tmp_path / "out", "--tp", 4, "--force").code == 0
    assert dict(open_checkpoint(tmp_path / "out").topology) == {"tp": 4, "pp": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_with_75_and_the_same_command_goes_on(undisturbed, model, convert, tmp_path, number):
    source, out = model("llama", "float32", num_hidden_layers=24, vocab_size=20000), tmp_path / "out"
    code = (
        "import os, time; from converters import cli; write = os.pwrite\n"
        "def slow(*args):\n    time.sleep(0.004)\n    return write(*args)\n"
        "os.pwrite = slow\ncli.main()"
    )
    argv = ["hf2megatron", str(source), str(out), "--tp", "2"]
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True, env=ENV)
    journal = tmp_path / "out.partial/journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_text().count("\n") > 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "run the same command again to resume" in err
    assert not out.exists()
    assert journal.read_text().count("\n") > 1
    assert convert(*argv).code == 0
    assert convert("verify", out, source).code == 0


@pytest.mark.parametrize("late_lock", [False, True], ids=["finished", "begun anew"])
def test_a_folder_that_another_process_has_taken_away_is_not_written(
    undisturbed, convert, tmp_path, monkeypatch, late_lock
):
    """It was locked too late: the lock is that of a file that is no longer there."""
    from converters.move import journal

    source, staging, lock = undisturbed[0], tmp_path / "out.partial", journal.lock

    def late(handle, *args, **options):
        shutil.rmtree(staging)
        if late_lock:
            staging.mkdir()
            (staging / "journal.jsonl").write_text("of another conversion\n")
        return lock(handle, *args, **options)

    monkeypatch.setattr(journal, "lock", late)
    ran = convert("hf2megatron", source, tmp_path / "out")
    assert ran.code == 7
    assert str(staging) in ran.err
    assert [path.name for path in tmp_path.rglob("*")] == (["out.partial", "journal.jsonl"] if late_lock else [])


def test_a_disk_that_loses_data_once_has_lost_it(undisturbed, convert, tmp_path, monkeypatch):
    """Linux tells of a failed write-back a single time: fdatasync succeeds after that, and the data is gone."""
    failed, finish, write = threading.Event(), convert_module.finish_files, os.pwrite

    def slow(*args: Any) -> int:
        time.sleep(0.01)  # some of the work is done before, some behind
        return write(*args)

    def lost(_: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def late(*args: Any) -> None:
        assert failed.wait(60)
        finish(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(os, "fdatasync", lost)
    monkeypatch.setattr(convert_module, "finish_files", late)
    ran = convert("hf2megatron", undisturbed[0], tmp_path / "out")
    assert (ran.code, os.strerror(errno.EIO) in ran.err) == (7, True)
    assert not (tmp_path / "out").exists()
    assert len((tmp_path / "out.partial/journal.jsonl").read_text().splitlines()) == 1, "nothing counts as done"


def test_an_interruption_before_anything_listens(convert, monkeypatch):
    import click

    monkeypatch.setattr(click.Group, "main", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    ran = convert("formats")
    assert (ran.code, ran.err) == (75, "error: interrupted\n")


def test_two_processes_do_not_write_the_same_output(undisturbed, run_killed, convert, tmp_path):
    import fcntl

    source, _, _, writes = undisturbed
    run_killed(-(writes // 2), source, tmp_path / "out")
    with (tmp_path / "out.partial/journal.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = convert("hf2megatron", source, tmp_path / "out", "--tp", 2, "--pp", 2)
    assert ran.code == 7
    assert "another process" in ran.err


@pytest.fixture
def replaced_when_killed(model, convert, tmp_path, monkeypatch) -> tuple[Path, Path, dict[str, bytes]]:
    """A source, an OUT that was to be replaced by it when the process was killed, and what was in OUT."""
    source, out = model("llama", "bfloat16"), tmp_path / "out"
    assert convert("hf2hf", model("qwen2"), out).code == 0
    old, real = files(out), Path.rename

    def killed(path: Path, target: Path) -> Path:
        if Path(target) == out:
            raise SystemExit(137)
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        assert convert("hf2hf", source, out, "--force").code == 137
    assert (out.exists(), (tmp_path / "out.partial/replaced").is_dir()) == (False, True)
    return source, out, old


def test_a_model_whose_replacement_was_killed_is_put_back(replaced_when_killed, convert):
    source, out, old = replaced_when_killed
    ran = convert("hf2hf", source, out, "--dtype", "fp16")  # of another conversion: the beginnings are refused
    assert (ran.code, files(out)) == (7, old), ran.err
    assert convert("hf2hf", source, out).code == 7
    assert convert("hf2hf", source, out, "--force").code == 0
    assert files(out) != old
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_without_force_a_model_that_is_put_back_is_not_replaced(replaced_when_killed, convert):
    source, out, old = replaced_when_killed
    ran = convert("hf2hf", source, out)
    assert (ran.code, "out exists" in ran.err, files(out)) == (7, True, old), ran.err


def test_a_model_is_put_back_into_an_empty_folder_that_was_made_meanwhile(replaced_when_killed, convert):
    source, out, old = replaced_when_killed
    out.mkdir()
    assert convert("hf2hf", source, out).code == 7
    assert files(out) == old


def test_a_damaged_replacement_takes_no_model_with_it(replaced_when_killed, convert):
    """What was written is deleted, and the old model stays: both were gone."""
    source, out, old = replaced_when_killed
    with (out.parent / "out.partial/out/model.safetensors").open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert convert("hf2hf", source, out, "--force").code == 6
    assert files(out) == old
    assert convert("hf2hf", source, out, "--force").code == 0


def test_what_cannot_be_put_in_its_place_replaces_nothing(model, convert, monkeypatch, tmp_path):
    out, real = tmp_path / "out", Path.rename
    assert convert("hf2hf", model("qwen2"), out).code == 0
    old = files(out)

    def refused(path: Path, target: Path) -> Path:
        if path.name == "out" and Path(target) == out:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        ran = convert("hf2hf", model(), out, "--force")
    assert (ran.code, "cannot be put in its place" in ran.err, files(out)) == (7, True, old), ran.err
    assert convert("hf2hf", model(), out, "--force").code == 0


def test_a_file_that_was_made_at_out_meanwhile_stays(tmp_path):
    new, place, staging = tmp_path / "out.partial/out", tmp_path / "out", tmp_path / "out.partial"
    new.mkdir(parents=True)
    place.write_text("precious")
    with pytest.raises(OSError, match="Not a directory"):
        put_in_place(new, place, staging)
    assert (place.read_text(), new.is_dir()) == ("precious", True)


@pytest.mark.parametrize("mtime", [False, True])
def test_a_source_that_is_written_while_it_is_read(model, tmp_path, mtime):
    """Its mtime may be set back, as by a copy with its times; nothing sets the ctime back."""
    source = tmp_path / "hf"
    shutil.copytree(model("llama"), source)
    file, changed = source / "model.safetensors", []

    def change(*_: object) -> None:
        if not changed:
            changed.append(file.stat())
            with file.open("r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(b"\0\0\0\0")
            if not mtime:
                os.utime(file, ns=(changed[0].st_atime_ns, changed[0].st_mtime_ns))

    how = "written anew while" if mtime else "changed, or an attribute of it, while"
    with pytest.raises(vitruvian.SourceError, match=f"{file} was {how} it was read"):
        vitruvian.convert(source, tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_written_after_its_headers_were_read(model, tmp_path, monkeypatch):
    """The offsets are those of the file before, and what comes later finds the new one unchanged."""
    source, state = tmp_path / "hf", registry._check_family
    shutil.copytree(model("llama"), source)
    file = source / "model.safetensors"
    tensors = load_file(file)

    def change(checkpoint: Any) -> None:
        state(checkpoint)
        save_file(tensors, file, {"format": "pt", "step": "2" * 64})

    monkeypatch.setattr(registry, "_check_family", change)
    with pytest.raises(vitruvian.SourceError, match=f"{file} was written anew while it was read"):
        vitruvian.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(vitruvian.SourceError, match="have changed since it was opened"):
        next(vitruvian.open(source).tensors())
