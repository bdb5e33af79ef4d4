"""`train fetch` while something goes wrong: memory, killed processes, full disks, two at a time."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.fetching import ROOT, environment, lines_of, parquet, recipe, start, write_lines

PEAK = """
import atexit
from pathlib import Path
from train.cli import main
def said():
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    print("PEAK", line.split()[1])
atexit.register(said)
main()
"""
PAIR = "source: {}\nuser: q\nassistant: a\n"


@pytest.fixture
def env(tmp_path):
    return environment(tmp_path / "home")


def records(count: int):
    for number in range(count):
        yield {"q": f"question {number} " + "x" * 150, "a": f"answer {number} " + "y" * 300}


def peak(env, *argv) -> float:
    """The most memory that a run has ever held, in MB."""
    command = [sys.executable, "-c", PEAK, "fetch", *map(str, argv)]
    done = subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, text=True, timeout=200)
    return int(done.stdout.split("PEAK")[1]) / 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "sample", "folder"])
def test_memory_does_not_grow_with_the_data(env, tmp_path, kind):
    """Up to 60,000 records, 33 MB: 2 MB more for a stream, 16 MB for Arrow's pool and two row groups."""
    peaks = {}
    small = 30_000 if kind == "sample" else 1000
    for count in (small, 60_000):
        suffix = {"sample": "jsonl", "folder": "parquet"}.get(kind, kind)
        path = tmp_path / f"{count}" / f"train-0.{suffix}"
        path.parent.mkdir()
        if suffix == "jsonl":
            write_lines(path, records(count))
        elif suffix == "csv":
            path.write_text("q,a\n" + "".join(f"{record['q']},{record['a']}\n" for record in records(count)))
        else:
            path.write_bytes(parquet(list(records(count)), 1000))
        recipe_file = recipe(tmp_path / "r.yml", PAIR.format(path.parent if kind == "folder" else path))
        extra = ["--sample", "10000"] if kind == "sample" else []
        peaks[count] = peak(env, recipe_file, tmp_path / f"{count}.jsonl", *extra)
        written = sum(1 for _ in (tmp_path / f"{count}.jsonl").open("rb"))
        assert written == (min(count, 10000) if kind == "sample" else count)
    print(kind, peaks)
    assert peaks[60_000] - peaks[small] < (16 if kind in ("parquet", "folder") else 2), peaks


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--sample", "20000"]])
def test_a_killed_run_leaves_no_file_that_looks_whole(env, tmp_path, extra):
    write_lines(tmp_path / "in.jsonl", records(150_000))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    out = tmp_path / "out.jsonl"
    for wait in (0.05, 0.3, 0.8):
        process = start(env, recipe_file, out, *extra)
        began = time.monotonic()
        while time.monotonic() - began < 60 and not (tmp_path / "out.jsonl.tmp").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        process.kill()
        process.communicate()
        assert not out.exists() or len(lines_of(out)) == (20_000 if extra else 150_000)
        out.unlink(missing_ok=True)
    process = start(env, recipe_file, out, *extra)  # in the way of the next run is nothing
    stdout, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(lines_of(out)) == (20_000 if extra else 150_000)
    assert [file.name for file in tmp_path.glob("out*")] == ["out.jsonl"]
    assert f"Saved {20_000 if extra else 150_000} examples" in stdout


def test_signals(env, tmp_path):
    write_lines(tmp_path / "in.jsonl", records(100_000))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for _ in range(5):
            process = start(env, recipe_file, tmp_path / "out.jsonl")
            while not (tmp_path / "out.jsonl.tmp").exists() and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
            if process.returncode:
                break
            (tmp_path / "out.jsonl").unlink()  # a busy machine: the work was done before the signal came
        assert (process.returncode, out, err.strip()) == (75, "", "error: interrupted")
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("extra", [[], ["--sample", "3000"]])
def test_a_full_disk(env, tmp_path, extra):
    write_lines(tmp_path / "in.jsonl", records(20_000))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    (tmp_path / "out.jsonl").write_text("old")
    command = [
        sys.executable,
        "-c",
        "from train.cli import main; main()",
        "fetch",
        recipe_file,
        tmp_path / "out.jsonl",
        "--force",
    ]
    done = subprocess.run(
        [*map(str, command), *extra],
        env=env, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stderr == f"error: there is no room for {tmp_path / 'out.jsonl'}: File too large; nothing was written\n"
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert [file.name for file in tmp_path.glob("*.tmp")] == []


def test_a_folder_that_cannot_be_written(tmp_path, env):
    write_lines(tmp_path / "in.jsonl", records(2))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    process = start(env, recipe_file, "/proc/none/out.jsonl")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "Traceback" not in err


def test_one_process_at_a_time(tmp_path, env):
    import fcntl

    write_lines(tmp_path / "in.jsonl", records(20))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    with (tmp_path / "out.jsonl.tmp").open("w") as file:
        file.write("of another process")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        process = start(env, recipe_file, tmp_path / "out.jsonl")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 7
        assert "another process is writing" in err
        assert (tmp_path / "out.jsonl.tmp").read_text() == "of another process"


def test_many_at_once_publish_one_whole_file(tmp_path, env):
    write_lines(tmp_path / "in.jsonl", records(3000))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    running = [start(env, recipe_file, tmp_path / "out.jsonl") for _ in range(6)]
    codes = sorted(process.wait(60) for process in running)
    for process in running:
        process.communicate()
    assert codes[0] == 0
    assert set(codes) <= {0, 7}
    assert codes.count(0) == 1
    assert len(lines_of(tmp_path / "out.jsonl")) == 3000
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_was_just_published_is_not_emptied(tmp_path, monkeypatch):
    """Between opening OUT.tmp and locking it, another process may have made OUT of it."""
    from formats.errors import OutputError
    from train.data.fetch import fetch

    (tmp_path / "out.jsonl.tmp").write_text("whole")
    monkeypatch.setattr(fetch, "lock", lambda *_: (tmp_path / "out.jsonl.tmp").rename(tmp_path / "out.jsonl"))
    with (
        pytest.raises(OutputError, match="another process has just written"),
        fetch.published(tmp_path / "out.jsonl", True) as file,
    ):
        file.write(b"mine")
    assert (tmp_path / "out.jsonl").read_text() == "whole"


def test_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
    from train.data.fetch import fetch

    done, fsync, rename = [], fetch.os.fsync, Path.rename
    monkeypatch.setattr(fetch.os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append("rename"), rename(path, to)))
    with fetch.published(tmp_path / "out.jsonl", False) as file:
        file.write(b"mine")
    assert done == ["fsync", "rename", "fsync"]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path, env):
    write_lines(tmp_path / "in.jsonl", records(3))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    victim: Path = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out.jsonl.tmp").symlink_to(victim)
    process = start(env, recipe_file, tmp_path / "out.jsonl")
    process.communicate(timeout=60)
    assert process.returncode == 7
    assert victim.read_text() == "mine"


def test_nothing_heavy_is_loaded_before_it_is_needed(tmp_path, env):
    write_lines(tmp_path / "in.jsonl", records(3))
    recipe_file = recipe(tmp_path / "r.yml", PAIR.format(tmp_path / "in.jsonl"))
    for argv in (
        ["--help"],
        ["fetch", "--help"],
        ["fetch", "--list"],
        ["fetch", str(recipe_file), str(tmp_path / "o.jsonl")],
    ):
        code = (
            "import json, sys\nfrom train.cli import main\nsys.argv[1:] = json.loads(sys.argv[1])\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "found = {'datasets', 'pyarrow', 'pandas', 'torch', 'huggingface_hub', 'fsspec'} & sys.modules.keys()\n"
            "assert not found, found"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(argv)],
            env=env,
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_without_the_library_one_sentence_says_what_to_install(tmp_path, env):
    for missing, source in (("datasets", "CohereForAI/aya_dataset"), ("pyarrow", "in.parquet")):
        (tmp_path / "in.parquet").write_bytes(b"")
        recipe_file = recipe(tmp_path / "r.yml", PAIR.format(source if "/" in source else tmp_path / source))
        code = f"import sys; sys.modules[{missing!r}] = None\nfrom train.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "fetch", str(recipe_file), str(tmp_path / "o.jsonl")],
            env=env, cwd=ROOT, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 4
        assert done.stderr.endswith("hint: pip install 'vitruvian[data]'\n")
        assert "Traceback" not in done.stderr
