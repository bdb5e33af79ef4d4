"""Checkpoints that real DeepSpeed wrote: each world is made once a session, whichever worker needs it first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.golden.worlds import once
from tests.models import build

HERE = Path(__file__).parent
SCRIPT = HERE / "zero_world.py"
Zero = Callable[..., tuple[int, str]]
"""What starts real DeepSpeed: the fixture `zero`."""
PLAIN = ("zero0", "zero1", "bf16-optimizer", "zero2", "zero3")
EVERY = (
    *PLAIN, "zero0-fp32", "zero1-fp32", "zero2-fp32", "zero3-fp32", "zero1-round-robin", "zero2-round-robin",
    "zero1-frozen", "zero2-frozen", "zero3-frozen", "zero2-buffers", "zero3-buffers", "zero2-odd", "zero2-aligned",
    "zero3-odd", "zero3-persistent", "zero3-sub-groups", "trainer2", "trainer3", "trainer3-gathered", "accelerate2",
    "accelerate3",
)  # fmt: skip
ODD = {
    "hidden_size": 50, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 33, "vocab_size": 101,
    "num_hidden_layers": 2,
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """The ranks that trained a model, and the kinds of checkpoints that they wrote."""

    name: str
    model: str
    ranks: int
    kinds: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)


WORLDS = (
    World("alone", "llama", 1, PLAIN),
    World("two", "llama", 2, EVERY),
    World("tied", "llama-tied", 2, ("zero1", "zero2", "zero3", "trainer3")),
    World("odd", "llama", 3, (*PLAIN, "zero2-aligned", "zero3-sub-groups"), ODD),
    World("four", "llama", 4, ("zero1-round-robin", "zero2-round-robin", "zero2-odd", "zero2-aligned", "zero3-odd")),
)
LIONS = World("lions", "llama", 2, ("zero1-fp32-lion", "zero2-fused-lion", "zero3-fused-lion"))
BITS = World("bits", "llama", 2, ("zero1-fp32-bits", "zero2-bits", "zero3-bits"))
ADAFACTORS = World("adafactors", "llama", 2, ("zero1-adafactor", "zero3-adafactor", "zero2-hf-adafactor"))
MUON = (
    "zero1-fp32-muon",
    "zero2-muon",
    "zero2-round-robin-muon",
    "zero3-muon",
    "bf16-optimizer-muon",
)
MUONS = World("muons", "llama", 3, MUON, ODD)
MUON_EXPERTS = World("muon-experts", "qwen3_moe", 2, ("zero1-fp32-muon", "zero2-muon", "zero3-muon"))
"""The experts of a layer are two parameters, [expert, out, in]; its Muon orthogonalizes each expert's matrix."""
MUON_PAIR = World("muon-pair", "llama", 2, ("zero1-fp32-muon", "zero1-fp32-gram-muon"))
PARALLEL = World("parallel", "llama", 4, ("pp2-tp2", "tp2", "pp2-tied"))


def make(world: World, factory: pytest.TempPathFactory, zero: Zero) -> Path:
    """A folder with `hf`, and a checkpoint and its truth for each kind. All workers of a test run share it."""

    def begin(folder: Path) -> None:
        build(folder / "hf", world.model, "bfloat16", **world.changes)
        code, out = zero(folder / "hf", folder, world.ranks, *world.kinds)
        assert code == 0, out[-6000:]

    return once(f"zero-{world.name}", factory, begin)


def checkpoint(folder: Path, kind: str) -> Path:
    """What a user would name."""
    return next((folder / kind).glob("checkpoint-*"), folder / kind)


def swap(first: Path, second: Path, *, named: bool = True) -> None:
    """Give two files each other's names; unless `named`, both were written as DeepSpeed's fast writer does."""
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    if not named:
        nameless(first)
        nameless(second)


def nameless(path: Path) -> None:
    """Save a file again, to a stream, which leaves no name in it."""
    import torch

    state = torch.load(path, weights_only=False)
    with path.open("wb") as stream:
        torch.save(state, stream)
