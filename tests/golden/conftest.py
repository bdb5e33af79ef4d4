"""Real frameworks, each started once for all tests of a worker, and forked for what they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.conftest import Forks, forking

HERE = Path(__file__).parent
FSDP = ("fsdp_optim_world", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3")


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
