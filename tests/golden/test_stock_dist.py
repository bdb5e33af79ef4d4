"""Stock Megatron-LM 0.19.2: what its `save_checkpoint` saves is read, what is written its `load_checkpoint` loads.

Written for it is what megatron-core 0.16.1 loads too (test_megatron_dist.py, test_megatron_optim.py): there is one way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from converters.common.manifest import remembered_states
from tests.golden.test_megatron_optim import states
from tests.models import SMALL, files

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("stock_dist.py")
STOCK = os.environ.get("VITRUVIAN_STOCK", "")
VOCAB = 60
MODEL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 96 --max-position-embeddings 64 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --vocab-size 60 --make-vocab-size-divisible-by 8 --norm-epsilon 1e-5
""")
ODD = [*MODEL, "--hidden-size", "24", "--ffn-hidden-size", "36", "--num-query-groups", "4"]
"""Norms of 24 elements, after which a distributed optimizer leaves a gap in its buckets."""
UNTIED, HALF, DISTRIBUTED = "--untie-embeddings-and-output-weights", "--bf16", "--use-distributed-optimizer"
LENIENT = ["--dist-ckpt-strictness", "log_all"]
"""What Megatron saved has the state of its random numbers, which --no-load-rng leaves out."""
TOLERANCE = 1e-6
"""Largest relative difference of a loss: that of test_megatron_optim.py for float32."""


class Run(NamedTuple):
    """A training, how Megatron saves it, and the topologies that each of these is resharded to and loaded at."""

    flags: list[str]
    tp: int
    pp: int
    saved: dict[str, list[tuple[int, int]]]
    bucket: int | None = None


RUNS = (
    Run(
        [*MODEL, UNTIED, HALF, DISTRIBUTED], 2, 1,
        {"torch": [(1, 1)], "dp_reshardable": [(1, 2)], "fully_reshardable": [(2, 2)]},
    ),
    Run([*ODD, UNTIED, DISTRIBUTED], 1, 2, {"dp_reshardable": [(2, 1)]}, 3000),
    Run([*MODEL, HALF, DISTRIBUTED], 2, 2, {"torch": [], "dp_reshardable": [(1, 1)], "fully_reshardable": []}),
    Run([*MODEL], 2, 2, {"torch": [], "plain": [(2, 1)]}),
)  # fmt: skip


def stock(jobs: list[dict[str, Any]], path: Path, seconds: int = 280, script: Path = SCRIPT) -> str:
    """Do the jobs in the environment of stock Megatron, where nothing of this one is seen."""
    assert STOCK, "VITRUVIAN_STOCK names no Python of stock Megatron: make test-stock"
    path.write_text(json.dumps(jobs))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    command, printed = [STOCK, "-W", "ignore", str(script), str(path)], path.with_suffix(".log")
    with printed.open("w") as log:  # a pipe would stay open for as long as any process that a rank forked
        started = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code: int | None = started.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    text = printed.read_text(errors="replace")
    assert code == 0, f"exit status {code} (None: not done within {seconds} s)\n{text[-6000:]}"
    return text


def hugging_face_logits(folder: Path, ids: Any) -> Any:
    """What transformers computes in float32 with a model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(ids)).logits.numpy()


def test_what_it_saves_is_read_and_what_we_write_is_loaded(convert, tmp_path):
    import numpy as np

    trainings: list[dict[str, Any]] = []
    for number, run in enumerate(RUNS):
        saves = {str(tmp_path / f"{how}{number}"): how for how in run.saved}
        trainings.append({"tp": run.tp, "pp": run.pp, "flags": run.flags, "steps": 3, "save": saves})
        trainings[-1] |= {"losses": str(tmp_path / f"losses{number}")} | ({"bucket": run.bucket} if run.bucket else {})
    trainings[1]["save"][str(tmp_path / "shifted")] = "fully_reshardable"
    logits = tmp_path / "logits.npz"
    flags = [*RUNS[0].flags, "--ckpt-format", "torch_dist", "--no-load-rng", *LENIENT]
    load = {"tp": 2, "pp": 1, "flags": flags, "load": str(tmp_path / "fully_reshardable0"), "logits": str(logits)}
    stock([*trainings, load], tmp_path / "begun.json")
    assert not (tmp_path / "dp_reshardable0/iter_0000003/common.pt").exists(), "0.19 keeps it in the DCP"

    resumed, references, seen = list[dict[str, Any]](), list[dict[str, Any]](), [dict[str, str]()] * len(RUNS)
    for number, run in enumerate(RUNS):
        digests = set()
        for how, topologies in run.saved.items():
            source = tmp_path / f"{how}{number}"
            digests.add(convert("digest", source, "--vocab-size", VOCAB).out.split()[0])
            state = states(source, VOCAB)
            assert state == (seen[number] or state) != {}, f"{how} of {run} has other states than it has otherwise"
            seen[number] = state
            for tp, pp in topologies:
                out = tmp_path / f"{number}-{how}-{tp}-{pp}"
                options = ["--tp", tp, "--pp", pp, "--format", "torch_dist", "--norm", "local", "--with-optimizer"]
                options += ["--archive"] if tp > 1 else []
                ran = convert("reshard", source, out, *options, "--vocab-size", VOCAB)
                assert ran.code == 0, ran.err
                job = {"tp": tp, "pp": pp, "flags": [*run.flags, "--ckpt-format", "torch_dist", "--no-load-rng"]}
                resumed.append({**job, "load": str(out), "losses": f"{out}-losses", "like": f"losses{number}"})
                resumed[-1]["save"] = {f"{out}-again": "fully_reshardable"}
                if HALF in run.flags:  # each topology rounds otherwise: what Megatron reshards itself
                    own = {"load": str(tmp_path / f"fully_reshardable{number}"), "flags": [*job["flags"], *LENIENT]}
                    resumed[-1]["like"] = f"losses{number}-{tp}-{pp}"
                    references.append({**job, **own, "losses": str(tmp_path / resumed[-1]["like"])})
        assert len(digests) == 1, f"{run} has one model, whatever it was saved as"

    ran = convert("reshard", tmp_path / "shifted", tmp_path / "x", "--with-optimizer", "--vocab-size", VOCAB)
    assert ran.code == 6, "0.19.2, as 0.16.1, shifts what is after the first bucket of a fully_reshardable save"

    back = tmp_path / "back"
    assert convert("megatron2hf", tmp_path / "dp_reshardable0", back, "--vocab-size", VOCAB).code == 0
    golden = np.load(logits)
    apart = np.abs(hugging_face_logits(back, golden["ids"]) - golden["logits"][..., :VOCAB]).max()
    assert apart < 1e-5 < np.abs(golden["logits"]).max()

    stock([*references, *resumed], tmp_path / "resumed.json")
    for job in resumed:
        expected = json.loads((tmp_path / job["like"]).read_text())
        pairs = zip(json.loads(Path(job["losses"]).read_text()), expected, strict=True)
        assert max(abs(loss - other) / other for loss, other in pairs) < TOLERANCE, job
        given = remembered_states(Path(job["load"]) / "iter_0000003")
        assert states(Path(f"{job['load']}-again"), VOCAB) == given != {}, job["load"]


def test_it_loads_weights_of_a_conversion(model, convert, tmp_path):
    """Strictly, and with the flags that we write beside them."""
    import numpy as np

    source, out = model("llama"), tmp_path / "run"
    assert (
        convert("hf2megatron", source, out, "--format", "torch_dist", "--tp", 2, "--pp", 2, "--norm", "local").code == 0
    )
    lines = (line for line in (out / "megatron_flags.txt").read_text().splitlines() if not line.startswith("#"))
    flags = [*shlex.split(" ".join(lines)), "--no-load-rng", "--no-load-optim", "--ckpt-format", "torch_dist"]
    jobs = []
    for tp, pp in ((1, 1), (2, 1), (2, 2), (1, 2)):
        job = {"tp": tp, "pp": pp, "flags": [*flags, "--vocab-size", str(SMALL["vocab_size"])], "load": str(out)}
        more = {"logits": f"{out}-{tp}.npz"} if pp == 1 else {"save": {f"{out}-{tp}": "plain"}}
        jobs.append(job | more)
    stock(jobs, tmp_path / "jobs.json")
    for tp in (1, 2):
        golden = np.load(f"{out}-{tp}.npz")
        logits = hugging_face_logits(source, golden["ids"])
        assert np.abs(logits - golden["logits"][..., : logits.shape[-1]]).max() < 1e-5 < np.abs(logits).max()
        assert convert("megatron2hf", f"{out}-{tp}", tmp_path / f"back{tp}", "--config", source).code == 0
        assert files(tmp_path / f"back{tp}") == files(source)
