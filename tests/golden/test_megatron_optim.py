"""A training of real megatron-core goes on at another topology, from a run whose optimizer we resharded.

Its losses are those of the training that went on unbroken, and what it saves at once is what it was given, to the bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from converters.common.manifest import remembered_states
from converters.move.engine import digest_of
from converters.plan.request import Limits
from converters.plan.state_jobs import state_jobs
from formats.checkpoint import Settings
from formats.megatron import optimizer_reader
from formats.registry import open_checkpoint
from tests.train.conftest import Forks

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]
HERE = Path(__file__).parent


class Topology(NamedTuple):
    """What a run is cut for; two ranks compute it, the others are data parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def flags(self) -> list[str]:
        options = ["--tp", str(self.tp), "--pp", str(self.pp), "--vpp", str(self.vpp)]
        options += ["--ep", str(self.ep)] if self.ep > 1 else []
        return options + (["--etp", str(self.etp)] if self.etp else [])


ONE, TP2, PP2, VPP2, EP2 = Topology(), Topology(2), Topology(pp=2), Topology(pp=2, vpp=2), Topology(ep=2)
SPREAD = Topology(2, ep=2, etp=1)
Target = tuple[str, Topology] | tuple[str, Topology, str]
"""Format, topology, and the optimizer, where it is not that of the source."""


class Run(NamedTuple):
    """A training, what it saves, and what is made of each of these."""

    model: str
    dtype: str
    distributed: bool
    topology: Topology
    resharded: dict[str, list[Target]]
    bucket: int | None = None
    experts: str = "local"

    @property
    def names(self) -> str:
        """What is written: two matrices of all experts are only read."""
        return "local" if self.experts == "grouped" else self.experts

    @property
    def job(self) -> dict[str, Any]:
        fields = {"dtype": self.dtype, "distributed": self.distributed, "experts": self.experts}
        return fields | ({"bucket": self.bucket} if self.bucket else {})


RUNS = (
    Run("llama", "float32", False, TP2, {"torch": [("torch", PP2)], "torch_dist": [("torch", ONE)]}),
    Run("starcoder2", "float32", False, PP2, {"torch": [("torch", TP2)]}),
    Run("qwen3", "float32", False, ONE, {"torch_dist": [("torch", VPP2)]}),
    Run(
        "llama-tied",
        "bfloat16",
        False,
        PP2,
        {"torch": [("torch_dist", ONE)], "torch_dist": [("torch", TP2), ("torch", ONE, "distributed")]},
    ),
    Run(
        "llama",
        "float32",
        True,
        ONE,
        {"torch": [("torch", VPP2), ("torch", ONE, "plain")], "dp_reshardable": [("torch_dist", TP2)]},
        20_000,
    ),
    Run("llama-tied", "bfloat16", True, PP2, {"dp_reshardable": [("torch_dist", ONE)]}, 20_000),
    Run("mistral", "bfloat16", True, TP2, {"torch_dist": [("torch", ONE), ("torch_dist", PP2)]}),
    Run("mixtral", "float32", False, EP2, {"torch": [("torch", ONE, "distributed")], "prefixed": [("torch", PP2)]}),
    Run(
        "qwen2_moe",
        "float32",
        True,
        SPREAD,
        {"torch": [("torch", ONE, "plain")], "torch_dist": [("torch", EP2)], "dp_reshardable": [("torch_dist", TP2)]},
    ),
    Run("dots1", "float32", False, ONE, {"torch": [("torch", SPREAD)], "torch_dist": [("torch_dist", EP2)]}),
    Run("mixtral", "float32", False, EP2, {"torch": [("torch", ONE)]}, experts="te"),
    Run("qwen2_moe", "bfloat16", True, ONE, {"torch": [("torch", EP2)]}, experts="te"),
    Run("mixtral", "bfloat16", False, ONE, {"torch": [("torch", EP2)]}, experts="grouped"),
    Run("qwen2_moe", "bfloat16", True, EP2, {"torch": [("torch", ONE)]}, experts="grouped"),
)


def train(megatron_core: Forks, jobs: list[dict[str, Any]], folder: Path) -> None:
    """Run the trainings, those of one topology together."""
    jobs = sorted(jobs, key=lambda job: [job[name] or 1 for name in Topology._fields])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    code, out = megatron_core([str(folder / "jobs.json")], 1, HERE / "megatron_train.py")
    assert code == 0, out[-4000:]
    assert out.count("largest relative loss difference") == sum("resume" in job for job in jobs)


def at(topology: Topology) -> dict[str, int | None]:
    """The entries of a job; without virtual chunks megatron-core wants None."""
    return topology._asdict() | ({} if topology.vpp > 1 else {"vpp": None})


def states(run: Path, vocab: int) -> dict[str, str]:
    """The digest of each state of each tensor."""
    source = open_checkpoint(run, Settings(vocab))
    return digest_of(state_jobs(source, optimizer_reader.read(source).states), Limits())


def swapped(run: Path) -> None:
    """Give the first moments of a layer to another one: no size tells, and nothing but a training sees it."""
    import torch

    path = run / "iter_0000003/mp_rank_00_000/model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    state = stored["optimizer"]["state"]
    assert state[1]["exp_avg"].shape == state[5]["exp_avg"].shape != state[2]["exp_avg"].shape
    state[1]["exp_avg"], state[5]["exp_avg"] = state[5]["exp_avg"], state[1]["exp_avg"]
    torch.save(stored, path)


def test_a_training_goes_on(model, convert, megatron_core, tmp_path):
    jobs: list[dict[str, Any]] = []
    for number, run in enumerate(RUNS):
        source, start = model(run.model, run.dtype), tmp_path / f"begun{number}"
        flags = [*run.topology.flags, "--norm", "local", "--make-vocab-size-divisible-by", 16]
        flags += ["--experts", run.names]
        assert convert("hf2megatron", source, start, *flags).code == 0
        saves = {str(tmp_path / f"{how}{number}"): how for how in run.resharded}
        rest = {"hf": str(source), "losses": str(tmp_path / f"losses{number}"), "save": saves, "weights": str(start)}
        jobs.append(run.job | at(run.topology) | rest)
    jobs[4]["save"][str(tmp_path / "shifted")] = "torch_dist"
    train(megatron_core, jobs, tmp_path)

    resumed: list[dict[str, Any]] = []
    for number, run in enumerate(RUNS):
        for how, targets in run.resharded.items():
            for kind, topology, *optimizer in targets:
                out = tmp_path / f"{number}-{how}-{kind}-{'-'.join(map(str, [*topology, *optimizer]))}"
                flags = [*topology.flags, "--format", kind, "--norm", "local", "--with-optimizer", "--vocab-size", 211]
                flags += ["--experts", run.names, *(["--optimizer", optimizer[0]] if optimizer else [])]
                flags += ["--archive"] if kind == "torch_dist" and number % 2 else []
                ran = convert("reshard", tmp_path / f"{how}{number}", out, *flags)
                assert ran.code == 0, ran.err
                assert convert("verify", out).code == 0
                job = {key: value for key, value in jobs[number].items() if key != "weights"}
                job |= {"experts": run.names} | ({"distributed": optimizer[0] == "distributed"} if optimizer else {})
                job |= at(topology) | {"resume": str(out), "save": {f"{out}-again": "torch"}}
                resumed.append(job)
    damaged = {**resumed[0], "resume": str(tmp_path / "damaged"), "save": {}, "damaged": True}
    source = tmp_path / "torch0"
    convert(
        "reshard", source, tmp_path / "damaged", "--pp", 2, "--with-optimizer", "--norm", "local", "--vocab-size", 211
    )
    swapped(tmp_path / "damaged")
    train(megatron_core, [*resumed, damaged], tmp_path)
    for job in resumed:
        given = remembered_states(Path(job["resume"]) / "iter_0000003")
        assert states(Path(f"{job['resume']}-again"), 211) == given != {}, job["resume"]

    ran = convert("reshard", tmp_path / "shifted", tmp_path / "x", "--with-optimizer", "--vocab-size", 211)
    assert ran.code == 6, "megatron-core 0.16.1 shifts what lies behind the first bucket of a fully_reshardable save"
    first, other = (tmp_path / f"dp_reshardable{number}/iter_0000003/.metadata" for number in (5, 8))
    for metadata, old, new, message in (
        (first, b"dp_group_idx_1.gbuf", b"dp_group_idx_7.gbuf", "buckets of the optimizer hold 0 elements"),
        (first, b"dp_group_idx_1.opt", b"dp_group_idx_7.opt", "different steps or settings"),
        (other, b"chained_1.optimizer.distributed.dp_group_idx_1.g",
         b"chained_1.optimizer.distributed.dp_group_idx_7.g", "buckets of the optimizer hold 0 elements"),
        (other, b"chained_1.optimizer.distributed.dp_group_idx_1.o",
         b"chained_1.optimizer.distributed.dp_group_idx_7.o", "different steps or settings"),
    ):  # fmt: skip
        content = metadata.read_bytes()
        assert old in content
        metadata.write_bytes(content.replace(old, new))
        ran = convert("reshard", metadata.parent, tmp_path / "x", "--with-optimizer", "--vocab-size", 211)
        assert (ran.code, message in ran.err) == (3, True), ran.err
        metadata.write_bytes(content)
