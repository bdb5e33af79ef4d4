"""Fixtures: tiny models, built once a session, and the command line in this process."""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

settings.register_profile("ours", deadline=None)  # a machine that does other things too is no defect
settings.load_profile("ours")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.fsync = os.fdatasync = lambda fd: None  # a test's files need not outlive a power cut


REQUIRED = os.environ.get("VITRUVIAN_REQUIRED", "").split()
"""Programs that `.ci/run` has installed: no test is skipped for want of one."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes 800,000 objects that all stay: to look for garbage among them is a third of its time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A test that lacks a program which is required has failed."""
    report: Any = yield
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if any(re.search(rf"\b{name}\b", reason) for name in REQUIRED):
        report.outcome, report.longrepr = "failed", f"VITRUVIAN_REQUIRED names what is not here: {reason}"
    return report


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model(name, dtype, ...)`: the folder of a tiny Hugging Face model, to be read only."""
    from tests.models import build

    built: dict[str, Path] = {}

    def get(name: str = "llama", dtype: str = "float32", **changes: Any) -> Path:
        key = f"{name} {dtype} {sorted(changes.items())}"
        if key not in built:
            built[key] = build(tmp_path_factory.mktemp(name) / "hf", name, dtype, **changes)
        return built[key]

    return get


CONVERSIONS = (
    "converters.cli", "converters.commands.combine", "converters.commands.convert", "converters.commands.inspect_text",
    "converters.library", "converters.plan.merging", "converters.plan.output", "converters.plan.targets",
    "formats.families.llama", "formats.huggingface.adapter", "formats.megatron.classic", "formats.megatron.torch_dist",
    "formats.torch_files.saves", "train.cli", "train.data.packs.merge", "train.data.packs.slices",
)  # fmt: skip
KILLED = Path(__file__).parent / "faults/killed_command.py"


class Killed(NamedTuple):
    """How a command ended that kills itself: exit code, or the negative number of a signal, and what it printed."""

    returncode: int
    out: str

    @property
    def calls(self) -> int:
        """How many calls changed the disk."""
        return int(self.out.split()[-2])

    @property
    def writes(self) -> int:
        """How many of them wrote weights."""
        return int(self.out.split()[-1])


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Killed]]:
    """`killed(N, WORD, ...)`: `killed_command.py` in a process of its own, forked from one that has its imports."""
    from tests.train.conftest import forking

    with forking(tmp_path_factory.mktemp("killed"), *CONVERSIONS) as forks:
        yield lambda *argv, script=KILLED: Killed(*forks([*map(str, argv)], 1, script))


Command = Callable[..., Ran]


def _command(module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    cli = importlib.import_module(f"{module}.cli")

    def run(*argv: object) -> Ran:
        monkeypatch.setattr(sys, "argv", [module, *map(str, argv)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # `main` lets a closed pipe end the process: this one serves
        captured = capsys.readouterr()
        assert "bug:" not in captured.err, captured.err
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`convert("digest", path)`: run a command and get (exit code, stdout, stderr). A bug is raised, not reported."""
    return _command("converters", capsys, monkeypatch)


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`train("count", prefix)`: likewise."""
    return _command("train", capsys, monkeypatch)


@lru_cache(maxsize=64)
def _answer_here(request: str) -> str:
    """The answer of transformers in this process to a request, which many tests repeat."""
    import json

    from converters.plan import meta_model

    return json.dumps(meta_model.report(json.loads(request)))


@pytest.fixture(autouse=True)
def _transformers_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are checked by transformers in this process, which has it loaded: each process of its own costs seconds."""
    if "own_process" in request.fixturenames:
        return
    from converters.plan import agreement

    monkeypatch.setattr(agreement, "_answer_of_program", _answer_here)


@pytest.fixture
def own_process() -> None:
    """Names are checked by transformers in a process of its own, as users have it."""
