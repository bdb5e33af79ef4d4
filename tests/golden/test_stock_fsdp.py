"""Megatron-FSDP of stock Megatron-LM 0.19.2 loads strictly what we write as fsdp_dtensor, and trains on as before."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.golden.test_megatron_fsdp import tensors
from tests.golden.test_mtp import with_second
from tests.golden.test_stock_dist import MODEL, UNTIED, VOCAB, stock

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("stock_fsdp.py")
PLAIN = [*shlex.split(" ".join(MODEL).replace("--swiglu", "--no-bias-gelu-fusion")), UNTIED]
GATED = [*MODEL, UNTIED, "--bf16"]
RUNS: dict[str, list[str]] = {"float32": PLAIN, "bf16": GATED}
"""With a gate 0.19.2 itself cannot save what Megatron-FSDP trained in float32."""


def test_it_trains_on(convert, tmp_path):
    """Read from Megatron-FSDP, from torch_dist that we made of it, and written again; losses within 1e-6."""
    trainings = [
        {"tp": 1, "flags": flags, "steps": 3, "save": {str(tmp_path / name): ""}, "losses": f"{tmp_path / name}-losses"}
        for name, flags in RUNS.items()
    ]
    stock(trainings, tmp_path / "begun.json", script=SCRIPT)
    resumed: list[dict[str, Any]] = []
    for name, flags in RUNS.items():
        cast = ["--dtype", "bf16"] if name == "bf16" else []
        options = ["--norm", "local", "--with-optimizer", "--vocab-size", VOCAB]
        dist, again, direct = (tmp_path / f"{name}-{how}" for how in ("dist", "again", "direct"))
        for source, out, more in (
            (tmp_path / name, dist, ["--format", "torch_dist", *cast]),
            (dist, again, ["--format", "fsdp_dtensor"]),
            (tmp_path / name, direct, ["--tp", 2, "--archive", *cast]),
        ):
            ran = convert("reshard", source, out, *options, *more)
            assert ran.code == 0, ran.err
        for out in (again, direct):
            job = {"tp": 1, "flags": [*flags, "--no-load-rng"], "load": str(out), "number": name}
            resumed.append(job | {"losses": f"{out}-losses", "save": {f"{out}-saved": ""}})
    stock(resumed, tmp_path / "resumed.json", script=SCRIPT)
    for job in resumed:
        unbroken = json.loads((tmp_path / f"{job['number']}-losses").read_text())
        pairs = zip(json.loads(Path(job["losses"]).read_text()), unbroken, strict=True)
        assert max(abs(loss - other) / other for loss, other in pairs) < 1e-6, job
        given, saved = (tensors(Path(f"{job['load']}{end}") / "iter_0000003") for end in ("", "-saved"))
        assert given.keys() == {name for name in saved if not name.startswith("rng_state")}
        assert all(saved[name].equal(tensor) for name, tensor in given.items()), (
            "what it loaded it saves again, bit for bit"
        )


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_it_loads_weights_of_a_conversion(model, convert, tmp_path, name):
    """Strictly, with the flags beside them, into a training of its own precision; one predicts further tokens."""
    source, out = model(name), tmp_path / "run"
    source = source if name == "llama" else with_second(source, tmp_path / "mtp")
    options = ("--format", "fsdp_dtensor", "--norm", "local", "--dtype", "bf16")
    assert convert("hf2megatron", source, out, *options).code == 0
    lines = (line for line in (out / "megatron_flags.txt").read_text().splitlines() if not line.startswith("#"))
    flags = [*shlex.split(" ".join(lines)), "--no-load-rng", "--no-load-optim", "--vocab-size", "211"]
    job = {"tp": 1, "flags": flags, "load": str(out), "save": {f"{out}-saved": ""}}
    stock([job], tmp_path / "jobs.json", script=SCRIPT)
    given, (saved,) = tensors(out / "release"), [tensors(path) for path in Path(f"{out}-saved").glob("iter_*")]
    for name, tensor in given.items():
        assert saved[name].equal(tensor.float()), name
