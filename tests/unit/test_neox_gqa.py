"""The two orders of grouped queries, told by how long the rows are."""

from __future__ import annotations

import numpy as np
import pytest

from formats.deepspeed.neox.gqa_order import QKV, choose
from formats.disk.safetensors import Fragment
from formats.errors import OptionNeededError
from formats.registry import open_checkpoint

DIM, HEADS, GROUPS, HIDDEN = 8, 8, 4, 64
BLOCKED = np.repeat([0, 1, 2], [DIM * HEADS, DIM * GROUPS, DIM * GROUPS])
GROUPED = np.tile(np.repeat([0, 1, 2], [DIM, DIM * GROUPS // HEADS, DIM * GROUPS // HEADS]), HEADS)


@pytest.mark.parametrize(
    ("blocked", "grouped", "seen"),
    [
        (0.5, 0.0, "gqa"),
        (0.0, 0.5, "grouped"),
        (0.5, 0.1, "gqa"),
        (0.5, 0.2, None),
        (0.2, 0.5, None),
        (0.5, 0.45, None),
        (0.08, 0.0, None),
        (0.0, 0.08, None),
        (0, 0, None),
    ],
)
def test_only_rows_that_are_clearly_one_order_decide(model, tmp_path, blocked, grouped, seen):
    """Lengths that differ by their place in the one order, in the other, or in both."""
    spec = open_checkpoint(model("llama")).spec
    dice = np.random.default_rng(0)
    rows = dice.normal(size=(len(BLOCKED), HIDDEN)) * np.exp(blocked * BLOCKED + grouped * GROUPED)[:, None]
    rows.astype(np.float32).tofile(tmp_path / "rows")
    fragment = Fragment(tmp_path / "rows", 0, "F32", rows.shape, (HIDDEN, 1))
    fragments = {"file": {f"0.{QKV}": fragment}}
    if seen is None:
        with pytest.raises(
            OptionNeededError, match=r"the rows do not tell \(of the variance of their lengths blocked explains"
        ):
            choose(spec, fragments, 1, "auto", old=False)
    else:
        assert choose(spec, fragments, 1, "auto", old=False)[0] == seen


def test_layers_that_differ_in_what_is_long_decide_nothing(model, tmp_path):
    """In one layer values have the longest rows, in another queries: a pattern of the heads, and none of their kind."""
    spec = open_checkpoint(model("llama")).spec
    dice, fragments = np.random.default_rng(0), {}
    for layer, sign in enumerate((0.5, -0.5)):
        rows = dice.normal(size=(len(BLOCKED), HIDDEN)) * np.exp(sign * BLOCKED)[:, None]
        rows.astype(np.float32).tofile(tmp_path / str(layer))
        fragments[f"{layer}.{QKV}"] = Fragment(tmp_path / str(layer), 0, "F32", rows.shape, (HIDDEN, 1))
    with pytest.raises(OptionNeededError, match="the rows do not tell"):
        choose(spec, {"file": fragments}, 1, "auto", old=False)
    with pytest.raises(OptionNeededError, match="the rows do not tell"):
        choose(spec, {"file": {}}, 1, "auto", old=False)
