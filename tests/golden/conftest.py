"""Real DeepSpeed, started once in each worker and forked for all that is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.golden.zero_worlds import SCRIPT, World, Zero, make
from tests.train.conftest import Forks, forking


@pytest.fixture(scope="session")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zero]:
    """`zero(words)`: run zero_world.py, or another script, where its imports are done: exit code and output."""
    with ExitStack() as ended:

        @cache
        def mother() -> Forks:
            return ended.enter_context(forking(tmp_path_factory.mktemp("zero"), SCRIPT.stem, path=SCRIPT.parent))

        yield lambda *words, script=SCRIPT: mother()([*map(str, words)], 1, script)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, zero: Zero) -> Callable[[World], Path]:
    """`made(world)`: its checkpoints of every kind."""
    return lambda world: make(world, tmp_path_factory, zero)
