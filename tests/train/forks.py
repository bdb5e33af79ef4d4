"""Trainings as forks of one process that has imported torch and transformers already: seconds less for each.

    python forks.py [MODULE …]          what it imports; without any, what a training needs

Reads a line of JSON for each training, {words, ranks, env, out, script, seconds}, and answers with the exit code of the
first rank that failed, or 0. A rank is a process of its own, with the variables that torchrun sets; `script`, if it is
there, is what it runs instead of `train`. Without `seconds` it starts one rank and answers with its process id; {pid}
asks whether that has ended, and the answer is null or its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

TRAINING = (
    "torch", "transformers.models.gpt_neox.modeling_gpt_neox", "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral", "transformers.models.qwen3.modeling_qwen3", "train.run.loop",
    "train.cli", "train.engines.fsdp", "train.model.optimizer", "formats.registry",
    "sentencepiece.sentencepiece_model_pb2", "torch.utils.serialization",
)  # fmt: skip


def rank_main(argv: list[str], settings: dict[str, str], out: str, script: str | None) -> None:
    """Be a rank: the command line, as `python -m train` runs it, or a script."""
    handle = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(settings)
    os.chdir(settings["PWD"])
    sys.argv = ["train", *argv]
    code: Any = 1
    try:
        runpy.run_path(script or str(Path(__file__).parents[2] / "train/__main__.py"), run_name="__main__")
        code = 0
    except SystemExit as done:
        code = done.code
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()  # which Python does later, when this process is no more
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def start(argv: list[str], env: dict[str, str], out: str, script: str | None) -> int:
    """Start a rank: its process id."""
    pid = os.fork()
    if not pid:
        rank_main(argv, env, out, script)
    return pid


def ended(pid: int) -> int | None:
    """The exit code of a rank, None if it still runs; the number of the signal that ended it, below zero."""
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def run(argv: list[str], ranks: int, env: dict[str, str], out: str, script: str | None, seconds: float) -> int:
    """Run a training; when a rank fails, the others are ended, as torchrun does."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    running = set()
    for rank in range(ranks):
        rank_env = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 or script else {}
        running.add(start(argv, env | rank_env, out, script))
    limit, failed = time.monotonic() + seconds, 0
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            failed = failed or code
            if (code > 0 and code != 75) or code < 0:
                end(running, signal.SIGTERM)
                limit = min(limit, time.monotonic() + 5)
            continue
        if time.monotonic() > limit:
            failed = failed or -9
            end(running, signal.SIGKILL)
        time.sleep(0.01)
    return failed


def end(running: set[int], number: int) -> None:
    """Signal the ranks that are left."""
    for pid in running:
        os.kill(pid, number)


def main() -> None:
    """Import, then fork on demand until the input ends."""
    for name in sys.argv[1:] or TRAINING:
        import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.fsync = os.fdatasync = lambda fd: None  # a test's files need not outlive a power cut
    gc.freeze()  # what is imported stays: no fork looks through it, or copies it
    for line in sys.stdin:
        request = json.loads(line)
        if "out" in request:
            Path(request["out"]).write_text("")
        reply = ended(**request) if "pid" in request else run(**request) if "seconds" in request else start(**request)
        print(json.dumps(reply), flush=True)
    os._exit(0)  # nothing is left to be tidied up, which takes seconds


if __name__ == "__main__":
    main()
