"""A few architectures of the list, each of another kind; `make architectures` goes through all of them."""

from __future__ import annotations

import pytest
import transformers

from tests.architectures.sweep import RIGHT, listed, outcome
from tests.fuzz.architectures import classes

SAMPLE = (
    "apertus", "kimi_k25", "mistral3", "modernbert-decoder", "nemotron_h", "qwen2_5_vl", "qwen3_vl_moe", "shieldgemma2",
    "whisper",
)  # fmt: skip
"""With a table; rows of another order; images; a name that OLMo-core has too; hybrid; renamed; experts of another
shape; no head; several copies."""
FEWEST = 261
"""Architectures that are right, at least."""


@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="the list is of transformers 5.23")
def test_the_list_has_every_architecture():
    assert [*listed()] == classes()
    assert sum(what == RIGHT for what, _ in listed().values()) >= FEWEST
    assert all(reason for what, reason in listed().values() if what != RIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_is_as_listed(kind):
    assert outcome(kind)[1] == listed()[kind][0]
