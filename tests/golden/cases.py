"""The golden cases: which tiny model real megatron-core is given in which topology, and how.

`test_coverage.py` proves that together they exercise every line of the layout tables.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.models import EXPERTS, FEW, IN_MEGATRON, INDEXED, LINEAR


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
    ep: int = 1
    etp: int = 0
    version: str = ""
    experts: str = ""

    @property
    def ranks(self) -> int:
        """How many there are."""
        return max(self.tp, self.ep * (self.etp or self.tp)) * self.pp

    @property
    def flags(self) -> list[str]:
        """For `convert hf2megatron`."""
        options = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "norm": self.norm}
        options |= {"ep": self.ep} if self.ep > 1 else {}
        options |= {"etp": self.etp} if self.etp else {}
        options |= {"experts": self.experts} if self.experts else {}
        options |= {"megatron-version": self.version} if self.version else {}
        return [*(word for name, value in options.items() for word in (f"--{name}", str(value))), *self.uneven]


EVERY = tuple(
    Case(name, "bfloat16" if name in ("llama", "qwen2-tied") else "float32")
    for name in IN_MEGATRON
    if name not in (*EXPERTS, *LINEAR, "youtu", "youtu-tied")
)
DENSE_LATENTS = (Case("youtu"), Case("youtu-tied"))
"""Local layers cut their down projections over TP, which Transformer Engine's do not."""

ONCE = tuple(case for case in EVERY if case.model in FEW)
"""Of these every line: each family is judged at TP2, where its lines are cut."""
TE = (
    "llama",
    "qwen2",
    "qwen3",
    "starcoder2",
    "gpt2",
    "nemotron",
    "arcee-tied",
    "llama-biased",
    "mixtral",
    "qwen2_moe-tied",
)

TOPOLOGIES = {
    "tp1": Topology(1, 1, 1, "local", (*ONCE, Case("mixtral"), Case("dots1-tied"))),
    "tp2": Topology(2, 1, 1, "local", (*EVERY, Case("mixtral"), Case("qwen3_moe"))),
    "tp2-te": Topology(2, 1, 1, "te", (*map(Case, TE), *DENSE_LATENTS)),
    "pp2": Topology(1, 2, 1, "local", (*ONCE, Case("qwen2_moe-tied", "bfloat16"))),
    "tp2-pp2": Topology(
        2,
        2,
        1,
        "local",
        tuple(map(Case, ("llama", "qwen2-tied", "qwen3-tied", "mistral", "phi3", "gpt2", "smollm3-tied", "ernie4_5"))),
    ),
    "pp2-vpp2": Topology(1, 2, 2, "local", (Case("llama-tied"), Case("qwen2"), Case("smollm3"))),
    "pp2-first": Topology(1, 2, 1, "local", (Case("llama-tied"), Case("qwen3")), ("--first-stage-layers", "1")),
    "pp2-layout": Topology(1, 2, 1, "local", (Case("llama"), Case("qwen2-tied")), ("--pp-layout", "Et|tt||tL")),
    "pp3-empty": Topology(1, 3, 1, "local", (Case("llama"),), ("--pp-layout", "Etttt||L")),
    "ep2": Topology(
        1,
        1,
        1,
        "local",
        tuple(Case(name) for name in EXPERTS if "-" not in name and name not in (*LINEAR, *INDEXED)),
        ep=2,
    ),
    "tp2-ep2": Topology(
        2,
        1,
        1,
        "te",
        (Case("qwen2_moe"), Case("qwen3_moe-tied"), Case("dots1-tied"), Case("glm4_moe"), Case("glm4_moe-plain")),
        ep=2,
    ),
    "tp2-ep2-etp1": Topology(
        2, 1, 1, "local", (Case("mixtral-tied"), Case("dots1", "bfloat16"), Case("hy_v3")), ep=2, etp=1
    ),
    "pp2-ep2": Topology(
        1,
        2,
        1,
        "te",
        (Case("qwen3_moe"), Case("dots1-tied"), Case("deepseek_v2-tied"), Case("glm4_moe_air", "bfloat16")),
        ep=2,
    ),
    "tp2-ep2-latents": Topology(
        2,
        1,
        1,
        "te",
        (
            Case("deepseek_v3"),
            Case("deepseek_v2", "bfloat16"),
            Case("deepseek_v3-tied"),
            Case("glm4_moe_lite-tied"),
            Case("deepseek_v2-grouped"),
        ),
        ep=2,
    ),
    "tp2-ep2-biases": Topology(2, 1, 1, "te", (Case("gpt_oss"), Case("gpt_oss-tied", "bfloat16")), ep=2, etp=1),
    "tp1-linear": Topology(1, 1, 1, "te", tuple(map(Case, LINEAR)), version="0.16"),
    "tp2-linear": Topology(
        2,
        1,
        1,
        "te",
        (
            *map(Case, ("qwen3_next", "nemotron_h_dense", "nemotron_h-latent")),
            Case("qwen3_5_text-tied", "bfloat16"),
        ),
        version="0.16",
    ),
    "pp2-linear": Topology(
        1,
        2,
        1,
        "te",
        (
            Case("qwen3_next-tied", "bfloat16"),
            Case("qwen3_5_text"),
            Case("nemotron_h"),
            Case("nemotron_h_dense"),
        ),
        version="0.16",
    ),
    "tp2-ep2-linear": Topology(
        2,
        1,
        1,
        "te",
        tuple(map(Case, ("qwen3_5_moe_text", "qwen3_next-tied", "nemotron_h", "nemotron_h-latent"))),
        ep=2,
        version="0.16",
        experts="local",
    ),
    "tp8": Topology(8, 1, 1, "local", (Case("qwen2-tied"), Case("llama-mqa"))),
}
"""By name. tp8 is more ranks than key/value groups: Megatron then cuts inside a group."""
AT_TP2 = {case.model for case in TOPOLOGIES["tp2"].cases}
JUDGED = {
    name: {case.model for case in topology.cases} - (AT_TP2 if name != "tp2" else set())
    for name, topology in TOPOLOGIES.items()
}
"""Topology: the models whose names find it (`pytest -k NAME`). Those at TP2 are found there alone."""
