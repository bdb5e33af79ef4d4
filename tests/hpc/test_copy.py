"""containers/copy, with real rsync; ssh is a pipe on this machine that breaks when it is told to."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COPY = Path(__file__).parents[2] / "containers" / "copy"
PIPE = """#!/bin/sh
shift
if [ -f {once} ]; then rm {once}; sh -c "$*" | dd bs=64k count=45 2>/dev/null; exit 255; fi
exec sh -c "$*"
"""


def copy(*argv, **variables):
    ran = [COPY, *map(str, argv)]
    env = os.environ | variables
    return subprocess.run(ran, capture_output=True, text=True, timeout=60, env=env, check=False)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model one"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.safetensors", "inner/b.safetensors"):
        (folder / name).write_bytes(os.urandom(4_000_000))
    return folder


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
@pytest.mark.parametrize("home", [True, False], ids=["home", "away"])
def test_a_broken_connection_is_taken_up_again(checkpoint, tmp_path, home):
    once, pipe, out = tmp_path / "break", tmp_path / "ssh", tmp_path / "out"
    once.touch()
    pipe.write_text(PIPE.format(once=once))
    pipe.chmod(0o755)
    places = (f"host:{checkpoint}", out) if home else (checkpoint, f"host:{out}")
    ran = copy(*places, RSYNC_RSH=str(pipe))
    assert ran.returncode == 0, ran.stderr
    assert "the connection broke" in ran.stderr
    for path in checkpoint.rglob("*.safetensors"):
        assert (out / path.relative_to(checkpoint)).read_bytes() == path.read_bytes()
    assert not list(out.rglob(".rsync-partial"))


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
@pytest.mark.parametrize("home", [True, False], ids=["home", "away"])
def test_a_key_that_is_refused_is_told_at_once(checkpoint, tmp_path, home):
    refusing = tmp_path / "ssh"
    refusing.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    refusing.chmod(0o755)
    places = (f"host:{checkpoint}", tmp_path / "out") if home else (checkpoint, f"host:{tmp_path}/out")
    ran = copy(*places, RSYNC_RSH=str(refusing))
    assert (ran.returncode, ran.stderr.count("Permission denied (publickey).")) == (255, 1), ran.stderr
    assert ran.stderr.endswith("error: ssh found no way there; why, it says above\n")


def test_what_it_would_do_is_printed(checkpoint):
    ran = copy("-n", checkpoint, "me@host:/scratch/x/", RSYNC_FLAGS="--bwlimit=50m  --exclude='a *' -e \"ssh -p 22\"")
    argv = shlex.split(ran.stdout)
    assert (argv[0], argv[-2:]) == ("rsync", [f"{checkpoint}/", "me@host:/scratch/x/"])
    assert argv[-6:-2] == ["--bwlimit=50m", "--exclude=a *", "-e", "ssh -p 22"]
    open_quote = copy("-n", checkpoint, "host:/x", RSYNC_FLAGS="--exclude 'a")
    assert (open_quote.returncode, "cannot be split into words: --exclude 'a" in open_quote.stderr) == (2, True)


@pytest.mark.parametrize(("argv", "reason"), [((), "two folders"), (("nowhere", "x"), "nowhere is no folder")])
def test_what_cannot_be_copied_is_said(argv, reason):
    ran = copy(*argv)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert reason in ran.stderr


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
@pytest.mark.parametrize("home", [True, False], ids=["home", "away"])
def test_a_copy_is_verified_where_it_is(model, convert, tmp_path, home):
    source, out, pipe = tmp_path / "run one", tmp_path / "out", tmp_path / "ssh"
    assert convert("hf2megatron", model(), source, "--tp", 2).code == 0
    pipe.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    pipe.chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = (f"host:{source}", out) if home else (source, f"host:{out}")
    ran = copy("--verify", *places, RSYNC_RSH=str(pipe), PATH=path)
    assert ran.returncode == 0, ran.stderr
    assert f"{out} equals vitruvian.json: " in ran.stdout
    shard = next(out.rglob("*.pt"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    times = shard.stat()
    shard.write_bytes(damaged)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that rsync sees no difference
    ran = copy("--verify", *places, RSYNC_RSH=str(pipe), PATH=path)
    assert (ran.returncode, "copy the checkpoint again" in ran.stderr) == (6, True), ran.stderr
