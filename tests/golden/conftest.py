"""Real frameworks, each started once for all tests of a worker, and forked for what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.golden.cases import JUDGED
from tests.golden.zero_worlds import SCRIPT, World, Zero, make
from tests.train.conftest import Forks, forking

HERE = Path(__file__).parent
FSDP = ("fsdp_optim_world", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k NAME` finds the topology in which real megatron-core judges that model."""
    if getattr(item, "originalname", "") == "test_megatron_core_loads_and_agrees":
        item.extra_keyword_matches.update(JUDGED.get(item.callspec.params["name"], ()))  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """torch.distributed, accelerate and transformers: `fsdp(words, 1, script)`."""
    with forking(tmp_path_factory.mktemp("fsdp"), *FSDP, path=HERE) as forks:
        yield forks


@pytest.fixture(scope="session")
def megatron_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """megatron-core and transformers: `megatron_core(words, ranks, script)`."""
    with forking(tmp_path_factory.mktemp("megatron"), "megatron_dist_judge", path=HERE) as forks:
        yield forks


@pytest.fixture(scope="session")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zero]:
    """`zero(words)`: run zero_world.py, or another script, where DeepSpeed is imported: exit code and output."""
    with ExitStack() as ended:

        @cache
        def mother() -> Forks:
            return ended.enter_context(forking(tmp_path_factory.mktemp("zero"), SCRIPT.stem, path=HERE))

        yield lambda *argv, script=SCRIPT: mother()([*map(str, argv)], 1, script)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, zero: Zero) -> Callable[[World], Path]:
    """`made(world)`: its checkpoints of every kind."""
    return lambda world: make(world, tmp_path_factory, zero)
