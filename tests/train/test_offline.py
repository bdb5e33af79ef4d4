"""A compute node has no network: data, training, export and chat ask for none, whatever HF_HUB_OFFLINE says.

They run in a network namespace of their own, in which there is only loopback. There a library that tries to reach the
Hub, and goes on quietly when it cannot, would pass too, so that each attempt of Python's is written down as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.demo import ROOT
from tests.train.conftest import GOLDEN

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]
UNSHARE = ["unshare", "--map-root-user", "--net"]
ALONE = """
import fcntl, os, socket, struct, sys

with socket.socket() as made:  # loopback is there, and down: set IFF_UP
    fcntl.ioctl(made, 0x8914, struct.pack("16sh14x", b"lo", 1))
os.execv(sys.argv[1], sys.argv[1:])
"""
WATCHED = """
import os, sys

def note(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        place = args[-1] if event in ("socket.connect", "socket.sendto") else args[0]
        host = place[0] if isinstance(place, tuple) else place
        if host not in (None, "localhost", "127.0.0.1", "::1"):
            with open(os.environ["ATTEMPTS"], "a") as file:
                file.write(f"{event} {host}\\n")

sys.addaudithook(note)
exec(sys.argv.pop(1))
"""
TRAIN = "from train.cli import main; main()"
ASK = "import urllib.request; urllib.request.urlopen('http://huggingface.co', timeout=20)"
CONNECT = "import socket; socket.create_connection(('1.1.1.1', 80), 20)"


@pytest.fixture(scope="module")
def kernel():
    """Skip where the kernel gives no namespaces to users."""
    if shutil.which(UNSHARE[0]) is None:
        pytest.skip("unshare is not installed")
    ran = subprocess.run([*UNSHARE, "true"], check=False, capture_output=True, text=True, timeout=20)
    if ran.returncode:
        pytest.skip(f"no network namespace: {ran.stderr.strip()}")


@pytest.fixture
def alone(kernel, tmp_path):
    """`alone(code, words)`: run Python where there is no network; what it wrote, and whom it tried to reach."""

    def run(code, *argv):
        attempts = tmp_path / "attempts"
        attempts.write_text("")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        env = variables | {"PYTHONPATH": str(ROOT), "ATTEMPTS": str(attempts), "HF_HOME": str(tmp_path / "home")}
        command = [*UNSHARE, sys.executable, "-c", ALONE, sys.executable, "-c", WATCHED, code, *map(str, argv)]
        ran = subprocess.run(command, check=False, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return ran, attempts.read_text().splitlines()

    return run


def test_there_is_no_network_and_attempts_are_seen(alone):
    ran, attempts = alone(ASK)
    assert ran.returncode
    assert attempts == ["socket.getaddrinfo huggingface.co"]
    ran, attempts = alone(CONNECT)
    assert "Network is unreachable" in ran.stderr
    assert attempts[-1] == "socket.connect 1.1.1.1"


def test_data_training_export_and_chat_need_no_network(alone, talker, settings, tmp_path):
    ran, attempts = alone(
        TRAIN, "tokenize", "--input", GOLDEN / "sft.jsonl", "--tokenizer", talker, "--append-eod",
        "--output-prefix", "P", "--workers", 2,
    )  # fmt: skip
    assert (ran.returncode, attempts) == (0, []), ran.stderr
    config = settings(
        model={"path": str(talker)}, data={"train": ["P_text_document"]}, steps={"train_iters": 2},
        export=str(tmp_path / "out"),
    )  # fmt: skip
    ran, attempts = alone(TRAIN, "run", config)
    assert (ran.returncode, attempts) == (0, []), ran.stderr
    assert "step 2/2" in ran.stdout
    ran, attempts = alone(TRAIN, "chat", tmp_path / "out", "--prompt", "saule", "--max-new-tokens", 3, "--ids")
    assert (ran.returncode, attempts) == (0, []), ran.stderr
    assert "answer, " in ran.stdout
