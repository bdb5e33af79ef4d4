"""Checkpoints that real torch.distributed wrote: each world is made once a session, whichever worker needs it first."""

from __future__ import annotations

import ast
import fcntl
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.models import build

HERE = Path(__file__).parent
SCRIPT = HERE / "fsdp_world.py"
Run = Callable[[list[list[str]]], tuple[int, str]]
"""Several calls of the script in one process: its exit code and output."""


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


def make(world: World, factory: pytest.TempPathFactory, run: Run) -> Made:
    """The checkpoints of a world, in a folder that all workers of a test run share."""
    place = once(f"world-{world}", factory, functools.partial(_begin, world, run))
    return Made(place / "hf", place / "kinds")


def _begin(world: World, run: Run, folder: Path) -> None:
    """Let the ranks of a world save a model."""
    build(folder / "hf", world.model, world.dtype)
    code, out = run([[str(folder / "hf"), str(folder / "kinds"), str(world.ranks), *KINDS]])
    assert code == 0, out


def once(name: str, factory: pytest.TempPathFactory, begin: Callable[[Path], None]) -> Path:
    """The folder that the first worker of a test run who needs it fills, by a name that it does not keep."""
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    place = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            folder = shared / f"begun-{name}"
            folder.mkdir(exist_ok=True)
            begin(folder)
            folder.rename(place)
    return place
