"""Fixtures of the tests that damage FSDP checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ran


@pytest.fixture
def merge(model, convert, tmp_path) -> Callable[..., Ran]:
    """`merge(folder)`: fsdp2hf with the right config; an output that it refuses is not there."""

    def run(folder: Path, *options: object) -> Ran:
        ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", model("llama"), "-q", *options)
        assert (tmp_path / "out").exists() == (ran.code == 0)
        return ran

    return run
