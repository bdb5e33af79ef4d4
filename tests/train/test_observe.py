"""What a training tells: speed, trackers that continue, profiles, and where it hangs."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.train.test_model import flat_of, loaded
from train.data.rows import open_rows
from train.run.evaluate import evaluate
from train.run.throughput import flops_of, multiplied
from train.settings.config import Data

distributed = pytest.mark.distributed


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt_neox"])
def test_flops_are_those_that_torch_counts(model, family):
    """Against torch's own counter, for one document: it counts whole squares of attention, half of which is masked."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model(family, vocab_size=253), attn_implementation="eager")
    length = 96
    flat = flat_of([(np.arange(length + 1), np.ones(length + 1, bool))])
    with FlopCounterMode(display=False) as counted:
        network(input_ids=torch.from_numpy(flat.input_ids)[None], use_cache=False).logits.sum().backward()
    layers, width = network.config.num_hidden_layers, network.config.hidden_size
    masked = 6.0 * layers * width * length**2
    assert flops_of([flat], network.config, multiplied(network)) + masked == pytest.approx(
        counted.get_total_flops(), rel=0.02
    )


def test_attention_counts_documents_not_rows(model):
    config = SimpleNamespace(num_attention_heads=4, num_hidden_layers=2, hidden_size=64)
    single = flat_of([(np.arange(101), np.ones(101, bool))])
    double = flat_of([(np.arange(51), np.ones(51, bool))] * 2)
    assert flops_of([single], config, 0) == 2 * flops_of([double], config, 0) == 12 * 2 * 64 * 100**2 / 2


@distributed
def test_trackers_continue_their_curves(settings, run, monkeypatch, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    options = ["--log.trackers", "[tensorboard, wandb]"]
    config = settings(steps={"train_iters": 6}, save={"every": 2})
    assert run(config, *options, "--steps.exit_interval", 4).code == 75
    (tmp_path / "save/latest").write_text("global_step102")  # as if it had died behind step 2
    done = run(config, *options)
    assert done.code == 0, done.out
    curves = EventAccumulator(str(done.save / "runs"))
    curves.Reload()
    curve = curves.Scalars("loss")
    assert [point.step for point in curve] == [101, 102, 103, 104, 105, 106]
    assert [point.value for point in curve] == pytest.approx(done.series("loss"), abs=1e-6)
    runs = [path.name for path in (done.save / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    assert len({name.rpartition("-")[2] for name in runs}) == 1


@distributed
def test_profiles(settings, run):
    counted = run(settings(steps={"train_iters": 3}), "--profile.kind", "flops", "--profile.after", 1, ranks=2)
    assert counted.code == 0, counted.out
    flops = re.search(r"flops +(\S+) in 1 steps of all ranks", counted.out)
    assert flops, counted.out
    assert float(flops[1]) > 1e6
    traced = run(settings(steps={"train_iters": 3}), "--profile.kind", "trace", "--profile.after", 1, save="traced")
    assert traced.code == 0, traced.out
    assert json.loads(gzip.decompress((traced.save / "profiler/rank0.json.gz").read_bytes()))["traceEvents"]


def test_a_long_evaluation_is_no_hang(model, data, alone):
    """The watch hears of each row."""
    rows = open_rows(Data(train=[data], seq_length=64), [data], 1)
    calls = []
    scores = evaluate(loaded(model("llama", vocab_size=253)), {"one": rows}, alone, None, 3, lambda: calls.append(1))
    assert (len(calls), scores["one"].tokens > 0) == (3, True)


HANGS = """
import sys, time
from train.run import loop
loop.learning_rate = lambda *_: time.sleep(60)
sys.argv = ["train", "run", *sys.argv[1:]]
from train.cli import main
main()
"""


@distributed
def test_a_rank_that_hangs_tells_where_and_ends(settings, tmp_path):
    argv = [str(settings()), "--save.path", str(tmp_path / "save"), "--parallel.timeout_minutes", "0.05"]
    ran = subprocess.run([sys.executable, "-c", HANGS, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "Timeout (0:00:03)!" in ran.stderr
    assert 'loop.py", line' in ran.stderr
