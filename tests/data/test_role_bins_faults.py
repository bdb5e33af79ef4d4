"""Publishing that is killed at each of its steps: nothing half done looks whole, and the next run writes every byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from formats.errors import SourceError
from train.data.packing import role_bins

GOLDEN = Path(__file__).parents[1] / "golden/data"
ROOT = Path(__file__).parents[2]
BINS = ("role-bins", "--do-packing", "--max-seq-length", 64, "--vocab-file", GOLDEN / "1_sft/bytes.model")
PLAIN = ("role-bins", "--vocab-file", GOLDEN / "1_sft/bytes.model")
TOKENS = ("tokenize", "--format", "mixed", "--max-drop-rate", 1, "--vocab-file", GOLDEN / "1_sft/bytes.model")
FILES = {
    "role-bins": ("P-text.bin", "P-text.idx", "P-role.bin", "P-role.idx", "P-text.json"),
    "tokenize": ("P_text_document.bin", "P_text_document.idx", "P_text_document.json"),
}
INDEX = {"role-bins": "P-text.idx", "tokenize": "P_text_document.idx"}
"""The file without which nothing looks whole."""

PROGRAM = """
import json, os, shutil, signal, sys
from concurrent.futures import Future
from pathlib import Path
import train.data.tokens.encode, train.data.tokens.input_ranges
import train.data.packing.role_bins, train.data.tokens.workers as w, train.data.tokens.tokenize as t
from train import cli

class Here:  # the workers, in this process: what is killed is the one that publishes
    def __init__(self, job, number): self.job, self.encode = job, w.encoder(job)
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def submit(self, part, out):
        future = Future()
        future.set_result(w.encode_range(self.job, self.encode, part, out))
        return future

t.Workers, t.EVERY, train.data.tokens.input_ranges.RANGE = Here, -1, 700
folder, index, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]

def contents():
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

def run(limit):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for place, name in ((os, "fsync"), (shutil, "rmtree"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir")):
        setattr(place, name, counted(getattr(place, name)))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["train", *words]
    try:
        cli.main()
    except SystemExit as done:
        os._exit(done.code or 0)
    os._exit(0)

assert run(0) == 0
expected, kills, seen = contents(), 0, 0
for name in expected:
    (folder / name).unlink()
for limit in range(1, 1000):
    killed = os.WIFSIGNALED(run(limit))
    left = contents()
    if index in left:
        assert left == expected, (limit, "looks whole")
        seen += 1
    assert run(0) == 0, limit
    assert contents() == expected, (limit, sorted(expected), sorted(contents()))
    assert not list(folder.glob("*.partial")), limit
    if limit % 2:  # every other run finds nothing there, the others an earlier output
        for name in expected:
            (folder / name).unlink()
    kills += killed
    if not killed:
        break
print(json.dumps([kills, seen, sorted(expected)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("argv", [BINS, PLAIN, TOKENS], ids=["packed", "bins", "tokenize"])
def test_killed_at_every_step(tmp_path, argv):
    source = tmp_path / "in.jsonl"
    source.write_text((GOLDEN / "7_megatron_llm/conv_a.jsonl").read_text())
    (tmp_path / "out").mkdir()
    command = [*argv, "--input", source, "--output-prefix", tmp_path / "out/P", "--force", "--quiet", "--workers", 1]
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "out"), INDEX[argv[0]], *map(str, command)],
        capture_output=True, text=True, timeout=240, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    kills, _, names = json.loads(ran.stdout.splitlines()[-1])
    assert kills >= 15
    assert set(names) == set(FILES[argv[0]])


def test_a_signal_stops_the_packing_and_the_same_command_goes_on(train, tmp_path, monkeypatch):
    real = role_bins.longest_first

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    argv = [
        *BINS, "--no-new-tokens", "--input", GOLDEN / "7_megatron_llm/conv_a.jsonl", "--output-prefix", tmp_path / "P"
    ]  # fmt: skip
    monkeypatch.setattr(role_bins, "longest_first", signalled)
    stopped = train(*argv)
    assert stopped.code == 75
    assert "run the same command again to resume" in stopped.err
    assert [path.name for path in tmp_path.iterdir()] == ["P.partial"]
    monkeypatch.setattr(role_bins, "longest_first", real)
    assert train(*argv).code == 0
    assert not (tmp_path / "P.partial").exists()
    assert train(*argv[:-1], tmp_path / "Q").code == 0
    for name in FILES["role-bins"][:4]:
        assert (tmp_path / name).read_bytes() == (tmp_path / name.replace("P", "Q")).read_bytes()


def test_what_is_there_is_never_replaced_unasked(train, tmp_path):
    argv = [*PLAIN, "--input", GOLDEN / "7_megatron_llm/conv_a.jsonl", "--output-prefix", tmp_path / "P"]
    (tmp_path / "P-role.idx").write_bytes(b"somebody's")
    refused = train(*argv)
    assert refused.code == 7
    assert "P-role.idx exists" in refused.err
    assert train(*argv, "--force").code == 0
    assert train(*argv).code == 7


def test_a_stream_that_became_shorter_is_an_error(tmp_path):
    rows = role_bins.longest_first(np.array([3, 2], "<i4"), 8)
    (tmp_path / "bin").write_bytes(bytes(8))
    with pytest.raises(SourceError, match="became shorter"):
        list(role_bins._rows(tmp_path / "bin", b"\1\0", np.array([3, 2], "<i4"), rows))
