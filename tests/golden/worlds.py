"""Checkpoints that real torch.distributed wrote: each world is made once a session, whichever worker needs it first."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.models import build

HERE = Path(__file__).parent
SCRIPT = HERE / "fsdp_world.py"


def _kinds() -> list[str]:
    """The keys of the script's table KINDS, without importing what it imports."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.target) == "KINDS":
            return [str(ast.literal_eval(key)) for key in node.value.keys if key]
    raise AssertionError(f"{SCRIPT} has no table KINDS")


KINDS = _kinds()


class World(NamedTuple):
    """The ranks that saved a model."""

    model: str
    dtype: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.model}-{self.dtype}-w{self.ranks}"


WORLDS = [
    World("llama", "float32", 2),
    World("llama", "float32", 4),
    World("llama-tied", "bfloat16", 3),
    World("qwen3-tied", "float32", 2),
]


class Made(NamedTuple):
    """What a world made: the Hugging Face folder that it began with, and a folder for each kind."""

    source: Path
    folder: Path

    def checkpoint(self, kind: str) -> Path:
        """What a user would name."""
        return next(
            self.folder.glob(f"{kind}/checkpoint-7"), next(self.folder.glob(f"{kind}/step-7"), self.folder / kind)
        )


def make(world: World, factory: pytest.TempPathFactory) -> Made:
    """The checkpoints of a world, in a folder that all workers of a test run share."""
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    place = shared / f"world-{world}"
    with (shared / f"world-{world}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            begun = shared / f"begun-{world}"
            build(begun / "hf", world.model, world.dtype)
            words = [str(begun / "hf"), str(begun / "kinds"), str(world.ranks), *KINDS]
            ran = run([words])
            assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
            begun.rename(place)
    return Made(place / "hf", place / "kinds")


def run(calls: list[list[str]], *, keep_going: bool = False, seconds: int = 280) -> subprocess.CompletedProcess[str]:
    """Call the script's `main` several times in one process, because importing torch takes longest."""
    code = (
        "import json, sys\nimport fsdp_world\nfailed = [0]\nfor words in json.loads(sys.argv[1]):\n"
        "    failed.append(fsdp_world.main(words))\n"
        "    if failed[-1]:\n        print('failed:', *words, file=sys.stderr)\n"
        f"        if not {keep_going}: break\n"
        "sys.exit(max(failed))"
    )
    command = [sys.executable, "-c", code, json.dumps(calls)]
    env: dict[str, Any] = os.environ | {"PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, check=False)
