"""Stock Megatron-LM 0.19.2 trains on with Muon from what we write of its torch_dist, whichever Adam is beside Muon.

So does FSDP2 with torch's Muon, and Megatron after it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from converters.common.manifest import remembered_states
from tests.faults.dcp_tools import refused
from tests.golden.test_megatron_optim import states
from tests.golden.test_optimizers import go_on
from tests.golden.test_stock_dist import HALF, LENIENT, MODEL, TOLERANCE, UNTIED, VOCAB, stock

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("stock_muon.py")
LAYERED, LEGACY = "--use-distributed-optimizer", "--no-use-layer-wise-param-layout"


SAME = shlex.split("""
    --optimizer muon --muon-momentum 0.9 --muon-nesterov --muon-coefficient-type simple --muon-num-ns-steps 5
    --muon-scale-mode spectral --muon-extra-scale-factor 0.2
""")
"""What torch's Muon computes by itself, with `match_rms_adamw`."""
NEAR = 5e-5
"""Largest relative difference of a loss: both Muons multiply in bfloat16, and round elsewhere."""


EXPERTS = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall
""")
"""Each matrix of an expert is one to Muon."""


class Run(NamedTuple):
    """A training: its flags, how Megatron saves it, the other topology that it is resharded to, and its TP."""

    flags: list[str]
    saved: tuple[str, ...]
    other: tuple[int, int] | None = None
    tp: int = 2


RUNS = {
    "plain": Run([*MODEL, UNTIED, HALF], ("plain",), (1, 2)),
    "float32": Run([*MODEL], ("plain",)),
    "legacy": Run([*MODEL, UNTIED, HALF, LAYERED, LEGACY], ("plain",)),
    "layered": Run([*MODEL, UNTIED, HALF, LAYERED], ("dp_reshardable", "fully_reshardable"), (1, 1)),
    "experts": Run([*MODEL, *EXPERTS, UNTIED, HALF, *SAME], ("plain",), (1, 2), 1),
    "layered experts": Run([*MODEL, *EXPERTS, UNTIED, HALF, LAYERED], ("fully_reshardable",), None, 1),
}


def test_it_trains_on(convert, tmp_path):
    """Where it was, with the losses of the training that no one moved; elsewhere with those of what stock reshards."""
    trainings: list[dict[str, Any]] = []
    for name, run in RUNS.items():
        saves = {str(tmp_path / f"{name}-{how}"): how for how in run.saved}
        flags = [*run.flags, "--optimizer", "muon"]
        trainings.append({"tp": run.tp, "pp": 1, "flags": flags, "steps": 3, "save": saves})
        trainings[-1]["losses"] = str(tmp_path / f"{name}-losses")
    stock(trainings, tmp_path / "begun.json", script=SCRIPT)

    resumed, references = list[dict[str, Any]](), list[dict[str, Any]]()
    for (name, run), job in zip(RUNS.items(), trainings, strict=True):
        source, *others = job["save"]
        state = states(Path(source), VOCAB)
        assert {key.split(".")[0] for key in state} >= {"momentum_buffer", "exp_avg", "exp_avg_sq"}
        assert all(states(Path(other), VOCAB) == state for other in others), "whatever it was saved as"
        flags = [*job["flags"], "--ckpt-format", "torch_dist", "--no-load-rng"]
        for tp, pp in ((run.tp, 1), *([run.other] if run.other else [])):
            out = tmp_path / f"{name}-{tp}-{pp}"
            options = ["--tp", tp, "--pp", pp, "--format", "torch_dist", "--norm", "local", "--with-optimizer"]
            ran = convert("reshard", source, out, *options, "--vocab-size", VOCAB)
            assert (ran.code, "--muon-tp-mode blockwise" in ran.err) == (0, tp != run.tp), ran.err
            like = job["losses"]
            if (tp, pp) == run.other:
                like = f"{out}-like"
                own = {"flags": [*flags, *LENIENT], "load": others[0] if others else source, "losses": like}
                references.append({"tp": tp, "pp": pp, **own})
            resumed.append({"tp": tp, "pp": pp, "flags": flags, "load": str(out), "losses": f"{out}-losses"})
            resumed[-1] |= {"like": like, "save": {f"{out}-again": "fully_reshardable"}}
    experts, options = tmp_path / "experts-plain", ["--with-optimizer", "--vocab-size", VOCAB]
    ran = convert("hf2fsdp", experts, tmp_path / "no", *options)
    refused(ran, 4, "is one parameter there, and not one matrix that Muon trained")
    refused(convert("reshard", experts, tmp_path / "no", *options, "--ep", 2, "--format", "torch_dist"), 4, "--ep 1")
    stock([*references, *resumed], tmp_path / "resumed.json", script=SCRIPT)
    for job in resumed:
        expected = json.loads(Path(job["like"]).read_text())
        pairs = zip(json.loads(Path(job["losses"]).read_text()), expected, strict=True)
        assert max(abs(loss - other) / other for loss, other in pairs) < TOLERANCE, job
        given = remembered_states(Path(job["load"]) / "iter_0000003")
        assert states(Path(f"{job['load']}-again"), VOCAB) == given != {}, job["load"]


def stored(folder: Path, name: str) -> Any:
    """A tensor of a DCP, as torch's own reader gives it."""
    import torch
    import torch.distributed.checkpoint as dcp

    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[name]
    state = {name: torch.empty(about.size, dtype=about.properties.dtype)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[name]


def require_momentum(run: Path, out: Path) -> None:
    """The momentum in OUT is that of the run, bit for bit: 8 heads of 8 in 4 groups, each of queries, key, value."""
    fused = {
        name: stored(run, f"optimizer.state.momentum_buffer.decoder.layers.{name}.weight")
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    for layer in range(4):
        qkv, *others = (whole[layer] for whole in fused.values())
        groups = qkv.reshape(4, 4, 8, 64)
        parts = [part.reshape(-1, 64) for part in (groups[:, :2], groups[:, 2], groups[:, 3])]
        names = [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.c_fc", "mlp.c_proj"]
        for name, expected in zip(names, (*parts, *others), strict=True):
            momentum = stored(out, f"optim.state.model.layers.{layer}.{name}.weight.momentum_buffer")
            assert momentum.equal(expected), name
            assert expected.any()


def test_it_trains_on_in_fsdp_and_back(model, convert, tmp_path):
    """With the settings that torch's Muon has too; without a gate each matrix is one in both. Adam alone does likewise:
    either is found by the rates of the training that resumes."""
    source, weights = model("starcoder2", sliding_window=None), tmp_path / "weights"
    options = ["--format", "torch_dist", "--norm", "local", "--make-vocab-size-divisible-by", 1]
    assert convert("hf2megatron", source, weights, *options).code == 0
    lines = (line for line in (weights / "megatron_flags.txt").read_text().splitlines() if not line.startswith("#"))
    model_flags = [*shlex.split(" ".join(lines)), "--vocab-size", "211", "--make-vocab-size-divisible-by", "1"]
    flags = {kind: [*model_flags, "--no-load-rng", "--ckpt-format", "torch_dist"] for kind in ("adam", "muon")}
    flags["muon"] += SAME
    start = {"tp": 1, "pp": 1, "load": str(weights), "steps": 3}
    runs, losses = ({kind: tmp_path / f"{kind}-{what}" for kind in flags} for what in ("run", "losses"))
    jobs = [{**start, "flags": [*flags[kind], "--no-load-optim"], "save": {str(runs[kind]): "plain"}} for kind in flags]
    jobs = [{**job, "losses": str(losses[kind])} for job, kind in zip(jobs, flags, strict=True)]
    stock(jobs, tmp_path / "begun.json", script=SCRIPT)

    moved, back = list[dict[str, Any]](), list[dict[str, Any]]()
    for kind, run in runs.items():
        out, saved = tmp_path / f"{kind}-fsdp", tmp_path / f"{kind}-saved"
        ran = convert("hf2fsdp", run, out, "--ranks", 3, "--with-optimizer", "--config", source)
        assert (ran.code, "one matrix" in ran.err) == (0, False), ran.err
        job = {"hf": str(source), "losses": str(losses[kind]), "resume": str(out), "step": 3, "least": 0.0}
        job["save"] = str(saved)
        moved.append({**job, **({"muon": True, "near": NEAR} if kind == "muon" else {})})
    require_momentum(tmp_path / "muon-run/iter_0000003", tmp_path / "muon-fsdp")
    go_on(moved, tmp_path)

    options += ["--with-optimizer", "--config", source, "--consumed-samples", 12]
    for kind, run in runs.items():
        saved, out = tmp_path / f"{kind}-saved", tmp_path / f"{kind}-back"
        ran = convert("hf2megatron", saved, tmp_path / f"{kind}-lost", *options)
        assert (ran.code, "--lr" in ran.err) == (2 if kind == "muon" else 0, True), "it would not be found"
        ran = convert("hf2megatron", saved, out, *options, "--lr", 0.01)
        assert (ran.code, " ".join(SAME) in ran.err) == (0, kind == "muon"), ran.err
        again = {"flags": [*flags[kind], "--override-opt_param-scheduler"], "load": str(out)}
        back.append({"tp": 1, "pp": 1, **again, "losses": f"{run}-back"})
    stock(back, tmp_path / "back.json", script=SCRIPT)
    for kind, run in runs.items():
        pairs = zip(json.loads(Path(f"{run}-back").read_text()), json.loads(losses[kind].read_text()), strict=True)
        assert max(abs(loss - other) / other for loss, other in pairs) < TOLERANCE, kind
