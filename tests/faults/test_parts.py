"""A conversion in parts: processes beside each other, killed, stopped or refused, end in the same bytes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from converters.move import engine
from converters.move.journal import Share
from converters.move.sampled import SAMPLE, samples_of
from converters.plan.request import Request
from converters.plan.targets import SHARD_SIZE, plan_huggingface, plan_megatron
from converters.prove.archive_crc import amend
from formats.errors import Interrupted
from formats.megatron.args.options import Options
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import save, weights
from tests.models import files

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
CODE = """
import os, sys, time
from converters import cli
number, at, write = int(sys.argv.pop(1)), int(sys.argv.pop(1)), os.pwrite
def counted(*args):
    global at
    at -= 1
    if at == 0:
        os.kill(os.getpid(), number)
    time.sleep(0.002)
    return write(*args)
os.pwrite = counted
cli.main()
"""
KINDS = {"hf2megatron": ("--tp", "2", "--pp", "2"), "megatron2hf": ("--shard-size", "300KB")}


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`started(number, at, word, …)`: the command as a process that sends itself a signal at its at-th write."""
    processes: list[subprocess.Popen[str]] = []

    def start(number: int, at: int, *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CODE, str(int(number)), str(at), *map(str, args)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV))
        if number == signal.SIGSTOP:
            assert os.WIFSTOPPED(os.waitpid(processes[-1].pid, os.WUNTRACED)[1])
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def sources(model, tmp_path_factory) -> dict[str, tuple[Path, dict[str, bytes]]]:
    """By command: the source, and the files of the unsplit conversion."""
    folder, outputs = tmp_path_factory.mktemp("whole"), {}
    source = model("llama", "bfloat16")
    for name, options in KINDS.items():
        command = [sys.executable, "-c", CODE, "0", "0", name, str(source), str(folder / name), *options]
        subprocess.run(command, env=ENV, timeout=120, check=True)
        outputs[name] = source, files(folder / name)
        source = folder / name
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_parts_at_once_one_of_them_killed_make_the_same_bytes(sources, started, convert, tmp_path, name):
    source, expected = sources[name]
    command = [name, source, tmp_path / "out", *KINDS[name]]
    parts = [
        started(signal.SIGKILL, 7 if number == 2 else 0, *command, "--part", f"{number}/3") for number in (1, 2, 3)
    ]
    outputs = [part.communicate(timeout=120) for part in parts]
    assert [part.returncode for part in parts] == [0, -signal.SIGKILL, 0], outputs
    assert "the same command without --part finishes" in outputs[0][0]
    last = started(signal.SIGTERM, 5, *command)
    assert "run the same command again to resume" in last.communicate(timeout=120)[1]
    assert last.returncode == 75
    assert not (tmp_path / "out").exists()
    assert convert(*command).code == 0
    assert files(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert convert("verify", tmp_path / "out", source).code == 0


@pytest.fixture
def argv(sources, tmp_path) -> list[object]:
    return ["hf2megatron", sources["hf2megatron"][0], tmp_path / "out", *KINDS["hf2megatron"]]


def test_what_is_done_is_not_done_again(sources, convert, argv, tmp_path, monkeypatch):
    assert [convert(*argv, "--part", part).code for part in ("1/2", "2/2")] == [0, 0]
    journals = files(tmp_path / "out.partial")
    monkeypatch.setattr("converters.move.engine.run_job", None)
    assert convert(*argv, "--part", "1/2").code == 0
    assert convert(*argv, "--part", "2/3").code == 0, "another number of parts"
    contents = files(tmp_path / "out.partial")
    assert {name: contents[name] for name in journals} == journals
    assert convert(*argv, "--no-verify").code == 0
    assert files(tmp_path / "out") == sources["hf2megatron"][1]


def test_a_killed_part_goes_on_where_it_was(started, convert, argv, tmp_path):
    killed = started(signal.SIGKILL, 250, *argv, "--part", "1/1")
    killed.communicate(timeout=120)
    lines = (tmp_path / "out.partial/journal-1-of-1.jsonl").read_text().splitlines()
    assert len(lines) > 5
    ran = started(signal.SIGKILL, 0, *argv, "--part", "1/1", "--json")
    assert json.loads(ran.communicate(timeout=120)[0])["part"] == "1/1"
    names = [
        json.loads(line.rpartition(" ")[0])[0]
        for line in (tmp_path / "out.partial/journal-1-of-1.jsonl").read_text().splitlines()[1:]
    ]
    assert len(names) == len(set(names)), "a job was done twice"


def refused(ran, message: str) -> None:
    assert (ran.code, message in ran.err) == (7, True), ran


def test_who_works_on_a_part_and_who_finishes_keep_apart(sources, started, convert, argv, tmp_path):
    part = started(signal.SIGSTOP, 20, *argv, "--part", "1/2")
    refused(convert(*argv), "other processes are writing parts of")
    refused(convert(*argv, "--force"), "other processes are writing parts of")
    refused(convert(*argv, "--part", "1/2"), "another process is writing part 1/2 of")
    assert convert(*argv, "--part", "2/2").code == 0
    part.send_signal(signal.SIGCONT)
    assert part.wait(timeout=60) == 0
    last = started(signal.SIGSTOP, 1, *argv)
    refused(convert(*argv, "--part", "1/2"), "another process is writing all of")
    refused(convert(*argv), f"another process is writing {tmp_path / 'out.partial'}")
    last.send_signal(signal.SIGCONT)
    assert last.wait(timeout=60) == 0
    assert files(tmp_path / "out") == sources["hf2megatron"][1]


@pytest.mark.parametrize("part", ["0/4", "5/4", "x", "1/0", "1", "-1/4", "1/4/4"])
def test_no_part(convert, argv, part):
    ran = convert(*argv, f"--part={part}")
    assert (ran.code, "is not a part such as" in ran.err) == (2, True)


def test_another_source_between(sources, convert, argv, tmp_path):
    source = next(argv[1].glob("*.safetensors"))
    assert convert(*argv, "--part", "1/2").code == 0
    before = source.stat()
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        for options in (["--part", "2/2"], ["--part", "1/2"], ["--part", "2/2", "--force"], []):
            refused(convert(*argv, *options), "another conversion (or its source has changed since)")
    finally:
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert convert(*argv, "--part", "2/2").code == 0
    assert convert(*argv[:3], "--tp", 4).code == 7
    assert convert(*argv[:3], "--tp", 4, "--force").code == 0
    assert dict(open_checkpoint(tmp_path / "out").topology) == {"tp": 4, "pp": 1}


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("killed", [False, True], ids=["part", "resumed"])
def test_another_source_of_the_same_sizes_and_times(model, convert, monkeypatch, tmp_path, kind, killed):
    """What `cp -p` makes of a model that was trained further; the same bytes anew are the same source."""
    src, config = tmp_path / "src", model("llama")
    state = weights(config)

    def write(folder: Path, number: int) -> None:
        changed = {key: value + number for key, value in state.items()}
        if kind == "torch":
            save(folder, {"model": changed})
        else:
            shutil.copytree(config, folder)
            save_file(changed, folder / "model.safetensors", {"format": "pt"})
        for path in folder.iterdir():
            os.utime(path, (10**9, 10**9))

    write(src, 0)
    command = ["fsdp2hf" if kind == "torch" else "hf2fsdp", src, tmp_path / "out"]
    command += ["--config", config] if kind == "torch" else []
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "run_job", _stopping(engine.run_job, 3))
            assert convert(*command, "-j", 1).code == 75
    else:
        assert convert(*command, "--part", "1/2").code == 0
    src.rename(tmp_path / "before")
    write(src, 1)
    sizes = [[(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(place.iterdir())]
             for place in (src, tmp_path / "before")]  # fmt: skip
    assert sizes[0] == sizes[1]
    refused(convert(*command), "another conversion (or its source has changed since)")
    shutil.rmtree(src)
    shutil.copytree(tmp_path / "before", src)  # copied again, with its times
    ran = convert(*command)
    assert ran.code == 0, ran.err


def _stopping(run_job: Callable[..., object], jobs: int) -> Callable[..., object]:
    """`run_job`, which a signal interrupts after so many jobs."""
    done = []

    def stopped(*args: object) -> object:
        if len(done) == jobs:
            raise Interrupted("stopped by a test")
        done.append(1)
        return run_job(*args)

    return stopped


@pytest.fixture
def begun(model, convert, monkeypatch, tmp_path) -> Callable[..., list[object]]:
    """`begun(*part)`: a command of which a part is done, or most of its tensors; no byte of the source is sampled."""

    def begin(*part: str) -> list[object]:
        monkeypatch.setattr("converters.move.journal.samples_of", lambda paths: ["unchanged"] * len(paths))
        shutil.copytree(model("llama"), tmp_path / "src")
        command = ["hf2megatron", tmp_path / "src", tmp_path / "out", "-j", 1]
        with monkeypatch.context() as patch:
            if not part:
                patch.setattr(engine, "run_job", _stopping(engine.run_job, 30))
            assert convert(*command, *part).code == (0 if part else 75)
        return command

    return begin


def _change(path: Path) -> None:
    """Change all weights of a file in place, and keep its size and time."""
    before = path.stat()
    state = {key: value + 1 for key, value in weights(path.parent).items()}
    save_file(state, path.with_suffix(".new"), {"format": "pt"})
    path.write_bytes(path.with_suffix(".new").read_bytes())
    path.with_suffix(".new").unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("part", [(), ("--part", "1/2")], ids=["resumed", "part"])
def test_a_source_that_was_changed_where_no_sample_is(begun, convert, tmp_path, part):
    """What was done of it is done again, and nothing of what was done before is mixed with it."""
    command = begun(*part)
    _change(tmp_path / "src/model.safetensors")
    ran = convert(*command)
    assert ran.code == 0, ran.err
    assert "done again: a file of the source, or an attribute of it, was changed since" in ran.err
    assert convert(*command[:2], tmp_path / "fresh").code == 0
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


@pytest.mark.parametrize("part", [(), ("--part", "1/2")], ids=["resumed", "part"])
def test_zeros_of_a_source_that_was_changed_are_written(begun, convert, tmp_path, part):
    """Over what was written of the source before. In new files zeros are not written, as these read as zeros."""
    command = begun(*part)
    path = tmp_path / "src/model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(len(content) - start)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for shares in [("--part", "1/2"), ("--part", "2/2"), ()] if part else [()]:
        ran = convert(*command, "--no-verify", *shares)
        assert ran.code == 0, ran.err
    assert convert("verify", tmp_path / "out", tmp_path / "src").code == 0


def test_a_part_of_a_source_that_was_changed_is_done_again(begun, convert, tmp_path):
    command = begun("--part", "1/2")
    _change(tmp_path / "src/model.safetensors")
    for part in ("2/2", "1/2"):
        assert convert(*command, "--part", part).code == 0
    ran = convert(*command)
    assert (ran.code, "done again" in ran.err) == (0, False), ran.err
    assert convert(*command[:2], tmp_path / "fresh").code == 0
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


@pytest.mark.parametrize("part", [(), ("--part", "1/2")], ids=["resumed", "part"])
def test_a_source_whose_attributes_were_changed_is_not_refused(begun, convert, tmp_path, part):
    command = begun(*part)
    (tmp_path / "src/model.safetensors").chmod(0o400)
    ran = convert(*command)
    assert (ran.code, "done again" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize(("count", "size"), [(1, 40 << 20), (3, 9 << 20), (3000, 20 << 10), (2, 4096), (2, 10), (1, 0)])
def test_samples_are_of_the_whole_length_of_a_file(tmp_path, count, size):
    """Of many files and of long ones the beginning, the middle and the end; of short ones every byte."""
    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths:
        path.touch()
        os.truncate(path, size)
    first = samples_of(paths)
    assert samples_of(paths) == first
    last = max(0, size - SAMPLE)
    for at in {0, last // 2, max(0, size - 1)} if size else ():
        with paths[-1].open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        assert samples_of(paths)[-1] != first[-1], at
        with paths[-1].open("r+b") as file:
            file.seek(at)
            file.write(b"\0")
    assert samples_of(paths) == first


def test_another_model_of_the_same_countis_another_conversion(model, convert, tmp_path):
    state = weights(model("llama"))
    folder = save(tmp_path / "c", {"model": state, "ema": {key: value + 1 for key, value in state.items()}})
    command = ["fsdp2hf", folder, tmp_path / "out", "--config", model("llama")]
    assert convert(*command, "--container", "model", "--part", "1/2").code == 0
    for options in (["--part", "2/2"], []):
        refused(convert(*command, "--container", "ema", *options), "another conversion")
    assert convert(*command, "--container", "model").code == 0
    assert {key: value.tolist() for key, value in weights(tmp_path / "out").items()} == {
        key: value.tolist() for key, value in state.items()
    }


def test_the_same_folder_may_be_spelled_otherwise(convert, argv, monkeypatch):
    assert convert(*argv, "--part", "1/2").code == 0
    monkeypatch.chdir(argv[1].parent)
    ran = convert(argv[0], argv[1].name, *argv[2:])
    assert ran.code == 0, ran.err


def test_what_was_damaged_on_the_way_is_written_anew(sources, convert, argv, tmp_path):
    assert convert(*argv, "--part", "1/2").code == 0
    for path in (tmp_path / "out.partial/out").rglob("*.pt"):
        content = bytearray(path.read_bytes())
        middle = next(at for at in range(len(content) // 2, len(content)) if content[at])
        content[middle] ^= 1
        path.write_bytes(content)
    ran = convert(*argv)
    assert ran.code == 6, ran
    assert "do not read back as written" in ran.err
    assert "the same command starts over" in ran.err
    assert convert(*argv).code == 0
    assert files(tmp_path / "out") == sources["hf2megatron"][1]


def test_countthat_are_gone(sources, convert, argv, tmp_path):
    assert convert(*argv, "--part", "1/2").code == 0
    next((tmp_path / "out.partial/out").rglob("*.pt")).unlink()
    refused(convert(*argv, "--part", "2/2"), "lacks files that its journals speak of")
    assert convert(*argv).code == 0
    assert files(tmp_path / "out") == sources["hf2megatron"][1]


def test_an_output_that_exists_is_replaced_by_the_last_one(convert, argv, tmp_path):
    assert convert(*argv[:3], "--tp", 4).code == 0
    refused(convert(*argv, "--part", "1/2"), "exists")
    assert convert(*argv, "--part", "1/2", "--force").code == 0
    assert dict(open_checkpoint(tmp_path / "out").topology) == {"tp": 4, "pp": 1}
    refused(convert(*argv), "exists")
    assert convert(*argv, "--force").code == 0
    assert dict(open_checkpoint(tmp_path / "out").topology) == {"tp": 2, "pp": 2}


def test_a_part_that_fails_leaves_the_others_work(sources, convert, tmp_path):
    assert convert("hf2megatron", sources["hf2megatron"][0], tmp_path / "m", "--tp", 2).code == 0
    norm = next(
        fragment
        for fragment in open_checkpoint(tmp_path / "m").fragments()
        if "input_layernorm" in fragment.key or "layer_norm_weight" in fragment.key
    ).fragment
    with norm.path.open("r+b") as file:
        file.seek(norm.offset)
        file.write(np.float16(7).tobytes())
    amend(norm.path, [(norm.offset, 2)])  # saved so, and not damaged since
    command = ["megatron2hf", tmp_path / "m", tmp_path / "out"]
    codes = [convert(*command, "--part", f"{number}/3").code for number in (1, 2, 3)]
    assert sorted(codes) == [0, 0, 6]
    assert (tmp_path / "out.partial/out").is_dir()
    assert convert(*command).code == 6
    assert not (tmp_path / "out.partial").exists()


def test_without_locks_there_are_no_parts(convert, argv, tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    refused(convert(*argv, "--part", "1/2"), "file system without locks")
    assert convert(*argv).code == 0


@pytest.mark.parametrize("of", [1, 2, 3, 7, 1000])
def test_shares_are_all_jobs_once_and_of_a_size(model, tmp_path, of):
    plan = plan_megatron(open_checkpoint(model("llama", "bfloat16")), Request(tmp_path / "o"), Options(2, 2), None)
    shares = [Share(number, of).jobs(plan.jobs) for number in range(1, of + 1)]
    assert Counter(job.name for share in shares for job in share) == Counter(job.name for job in plan.jobs)
    largest = max(job.nbytes for job in plan.jobs)
    assert max(sum(job.nbytes for job in share) for share in shares) <= plan.nbytes / of + largest
    layers = [job.layer for share in shares for job in share if job.layer is not None]
    assert layers == sorted(layers), "each share has layers that follow each other"


@pytest.mark.parametrize("of", [2, 5, 40, 1000])
def test_elements_that_alternate_in_a_file_have_one_writer(model, tmp_path, of):
    """Gate and up of GPT-OSS: whoever writes the one writes what lies between its elements, too."""
    plan = plan_huggingface(open_checkpoint(model("gpt_oss", "bfloat16")), Request(tmp_path / "o"), SHARD_SIZE)
    shares = [Share(number, of).jobs(plan.jobs) for number in range(1, of + 1)]
    assert Counter(job.name for share in shares for job in share) == Counter(job.name for job in plan.jobs)
    writer = {job.name: number for number, share in enumerate(shares) for job in share}
    for layer in range(4):
        for kind in ("", "_bias"):
            assert writer[f"expert_gate{kind}.{layer}"] == writer[f"expert_up{kind}.{layer}"]
    assert len(set(writer.values())) > min(of, 8) // 2
