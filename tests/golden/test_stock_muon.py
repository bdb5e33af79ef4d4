"""Stock Megatron-LM 0.19.2 trains on with Muon from what we write of its torch_dist, whichever Adam is beside Muon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from converters.common.manifest import remembered_states
from tests.golden.test_megatron_optim import states
from tests.golden.test_stock_dist import HALF, LENIENT, MODEL, TOLERANCE, UNTIED, VOCAB, stock

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("stock_muon.py")
LAYERED, LEGACY = "--use-distributed-optimizer", "--no-use-layer-wise-param-layout"


class Run(NamedTuple):
    """A training at TP 2: its flags, how Megatron saves it, and the other topology that it is resharded to."""

    flags: list[str]
    saved: tuple[str, ...]
    other: tuple[int, int] | None = None


RUNS = {
    "plain": Run([*MODEL, UNTIED, HALF], ("plain",), (1, 2)),
    "float32": Run([*MODEL], ("plain",)),
    "legacy": Run([*MODEL, UNTIED, HALF, LAYERED, LEGACY], ("plain",)),
    "layered": Run([*MODEL, UNTIED, HALF, LAYERED], ("dp_reshardable", "fully_reshardable"), (1, 1)),
}


def test_it_trains_on(convert, tmp_path):
    """Where it was, with the losses of the training that no one moved; elsewhere with those of what stock reshards."""
    begun: list[dict[str, Any]] = []
    for name, run in RUNS.items():
        saves = {str(tmp_path / f"{name}-{how}"): how for how in run.saved}
        flags = [*run.flags, "--optimizer", "muon"]
        begun.append({"tp": 2, "pp": 1, "flags": flags, "steps": 3, "save": saves})
        begun[-1]["losses"] = str(tmp_path / f"{name}-losses")
    stock(begun, tmp_path / "begun.json", script=SCRIPT)

    resumed, references = list[dict[str, Any]](), list[dict[str, Any]]()
    for (name, run), job in zip(RUNS.items(), begun, strict=True):
        source, *others = job["save"]
        kept = states(Path(source), VOCAB)
        assert {key.split(".")[0] for key in kept} >= {"momentum_buffer", "exp_avg", "exp_avg_sq"}
        assert all(states(Path(other), VOCAB) == kept for other in others), "whatever it was saved as"
        flags = [*job["flags"], "--ckpt-format", "torch_dist", "--no-load-rng"]
        for tp, pp in ((2, 1), *([run.other] if run.other else [])):
            out = tmp_path / f"{name}-{tp}-{pp}"
            words = ["--tp", tp, "--pp", pp, "--format", "torch_dist", "--norm", "local", "--with-optimizer"]
            ran = convert("reshard", source, out, *words, "--vocab-size", VOCAB)
            assert (ran.code, "--muon-tp-mode blockwise" in ran.err) == (0, tp == 1), ran.err
            like = job["losses"]
            if (tp, pp) == run.other:
                like = f"{out}-like"
                own = {"flags": [*flags, *LENIENT], "load": others[0] if others else source, "losses": like}
                references.append({"tp": tp, "pp": pp, **own})
            resumed.append({"tp": tp, "pp": pp, "flags": flags, "load": str(out), "losses": f"{out}-losses"})
            resumed[-1] |= {"like": like, "save": {f"{out}-again": "fully_reshardable"}}
    stock([*references, *resumed], tmp_path / "resumed.json", script=SCRIPT)
    for job in resumed:
        expected = json.loads(Path(job["like"]).read_text())
        pairs = zip(json.loads(Path(job["losses"]).read_text()), expected, strict=True)
        assert max(abs(loss - other) / other for loss, other in pairs) < TOLERANCE, job
        given = remembered_states(Path(job["load"]) / "iter_0000003")
        assert states(Path(f"{job['load']}-again"), VOCAB) == given != {}, job["load"]
