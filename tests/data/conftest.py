"""The command `train` in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from tests.conftest import Ran


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """`train("packs", "iters", path)`: run a command, get (exit code, stdout, stderr); a bug is raised."""
    from train import cli

    def run(*words: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["train", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        captured = capsys.readouterr()
        assert "bug:" not in captured.err, captured.err
        return Ran(code, captured.out, captured.err)

    return run
