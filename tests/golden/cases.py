"""The golden cases: which tiny model real megatron-core is given in which topology, and how.

`test_coverage.py` proves that together they exercise every line of the layout tables.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.models import IN_MEGATRON


class Case(NamedTuple):
    """One Megatron folder that real megatron-core must load strictly and run like transformers."""

    model: str
    dtype: str = "float32"
    norm: str = "local"


class Topology(NamedTuple):
    """The cases that one start of megatron-core judges."""

    tp: int
    pp: int
    vpp: int
    norm: str
    cases: tuple[Case, ...]
    uneven: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """For `convert hf2megatron`."""
        return ["--tp", str(self.tp), "--pp", str(self.pp), "--vpp", str(self.vpp), "--norm", self.norm, *self.uneven]


EVERY = tuple(Case(name, "bfloat16" if name in ("llama", "qwen2-tied") else "float32") for name in IN_MEGATRON)

TOPOLOGIES = {
    "tp1": Topology(1, 1, 1, "local", EVERY),
    "tp2": Topology(2, 1, 1, "local", EVERY),
    "tp2-te": Topology(2, 1, 1, "te", (Case("llama"), Case("qwen2"), Case("qwen3"), Case("starcoder2"), Case("gpt2"))),
    "pp2": Topology(1, 2, 1, "local", EVERY),
    "tp2-pp2": Topology(
        2,
        2,
        1,
        "local",
        (Case("llama"), Case("qwen2-tied"), Case("qwen3-tied"), Case("mistral"), Case("phi3"), Case("gpt2")),
    ),
    "pp2-vpp2": Topology(1, 2, 2, "local", (Case("llama-tied"), Case("qwen2"))),
    "pp2-first": Topology(1, 2, 1, "local", (Case("llama-tied"), Case("qwen3")), ("--first-stage-layers", "1")),
    "pp2-layout": Topology(1, 2, 1, "local", (Case("llama"), Case("qwen2-tied")), ("--pp-layout", "Et|tt||tL")),
    "tp8": Topology(8, 1, 1, "local", (Case("qwen2-tied"), Case("llama-mqa"))),
}
"""By name. tp8 is more ranks than key/value groups: Megatron then cuts inside a group."""
