"""Checks that need a GPU: `make test-gpu`. Anywhere else each is skipped, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, and skip it where there is no GPU."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    if not ours:
        return
    import torch

    missing = pytest.mark.skip(reason="needs a GPU: make test-gpu")
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)
