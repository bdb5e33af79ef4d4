"""ZeRO on gloo: what FSDP computes, whatever the stage; the same after any interruption."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from formats.errors import UnsupportedError, UsageError
from tests.train.conftest import ROOT, Trained
from train.engines.deepspeed import DeepSpeedEngine, _deepspeed, _part, _require_known
from train.engines.deepspeed import settings as settings_of
from train.settings.config_file import load_config

NEAR = 2e-6
"""Of losses around 5 and norms around 3: sums in another order."""
STEPS, MICRO = 6, {1: 2, 2: 1, 3: 4}
BUCKETS = "{reduce_bucket_size: 1000000, stage3_prefetch_bucket_size: 20000, stage3_param_persistence_threshold: 0}"
"""Nothing of a tiny model stays whole in stage 3."""


def zero(stage, *options):
    return [
        "--engine", "deepspeed", "--parallel.zero_stage", str(stage),
        "--parallel.deepspeed.zero_optimization", BUCKETS, *map(str, options),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model, data, forks):
    """Trainings on two ranks by name: `fsdp`; `zero1` to `zero3`; `chain1` to `chain3`, which are stopped, go on with
    their stage, are stopped again and go on with the next; and two with noise.
    """
    folder = tmp_path_factory.mktemp("zero")
    tree = {
        "model": {"path": str(model("llama", vocab_size=253)), "dtype": "fp32"},
        "data": {"train": [str(data)], "seq_length": 64},
        "batch": {"size": 8, "micro": 2},
        "optim": {"lr": 1e-3, "weight_decay": 0.1},
        "steps": {"train_iters": STEPS, "iteration_offset": 100},
        "save": {"path": str(folder), "every": 100},
    }
    (folder / "config.yml").write_text(json.dumps(tree))
    noise = ["--neftune_alpha", "5", "--steps.train_iters", "2"]
    runs = [("fsdp", []), ("noisy-fsdp", noise), ("noisy-zero3", zero(3, *noise))]
    experts = ["--model.path", str(model("mixtral", vocab_size=253)), "--steps.train_iters", "2"]
    runs += [("experts-fsdp", experts), ("experts-zero3", zero(3, *experts))]
    for stage, micro in MICRO.items():
        options = zero(stage, "--batch.micro", micro)
        stopped = [*options, "--steps.exit_interval", "2"]
        runs += [(f"zero{stage}", options), (f"chain{stage}", stopped), (f"chain{stage}", stopped)]
        runs += [(f"chain{stage}", zero(stage % 3 + 1, "--batch.micro", micro, "--optim.clip", "0.5"))]
    argvs = json.dumps([["--save.path", str(folder / name), *options] for name, options in runs])
    code, out = forks([str(folder / "config.yml"), argvs], 2, ROOT / "tests/train/several.py")
    assert code == 0, out
    return {name: Trained(0, out, folder / name) for name, _ in runs}


def require_same(ran, reference, near=NEAR, steps=STEPS):
    assert ran.series("trained_tokens") == reference.series("trained_tokens")
    assert ran.series("global_step") == list(range(101, 101 + steps))
    for name in ("loss", "grad_norm"):
        assert ran.series(name) == pytest.approx(reference.series(name), abs=near), name


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", MICRO)
def test_every_stage_computes_what_fsdp_does(trained, stage):
    require_same(trained[f"zero{stage}"], trained["fsdp"])


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_experts_that_the_hub_has_one_by_one(trained):
    require_same(trained["experts-zero3"], trained["experts-fsdp"], steps=2)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_noise_on_embeddings(trained):
    require_same(trained["noisy-zero3"], trained["noisy-fsdp"], steps=2)
    assert trained["noisy-fsdp"].series("loss")[0] != trained["fsdp"].series("loss")[0]


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", MICRO)
def test_it_goes_on_bit_for_bit_and_with_another_stage(trained, stage, convert):
    reference, chain = trained[f"zero{stage}"], trained[f"chain{stage}"]
    for name in ("loss", "grad_norm"):
        assert chain.series(name)[:4] == reference.series(name)[:4], name
    # the settings win over those in the checkpoint: the last step sees the clip of the one before it
    assert chain.series("loss")[4] == pytest.approx(reference.series("loss")[4], abs=NEAR)
    assert chain.series("grad_norm")[4] == pytest.approx(reference.series("grad_norm")[4], abs=NEAR)
    assert chain.series("loss")[5] != pytest.approx(reference.series("loss")[5], abs=NEAR)
    assert not (chain.save.parent / f"chain{stage}.universal").exists()
    digest = convert("digest", chain.save / "global_step106")
    assert digest.code == 0, digest.err


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_console_is_ours(trained):
    out = trained["fsdp"].out
    for text in ("DeepSpeed", "[INFO]", "Warning"):
        assert text not in out, out


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_bf16_other_ranks_validation_and_export(settings, run, data, convert, model, tmp_path):
    """Tied embeddings; the optimizer of stage 1 in bf16 is another class of DeepSpeed."""
    config = settings(
        "llama-tied", model={"dtype": "bf16"}, data={"validation": {"one": str(data)}}, steps={"train_iters": 4},
        optim={"weight_decay": 0.1},
    )  # fmt: skip
    reference = run(config, "--export", tmp_path / "theirs", save="whole")
    assert reference.code == 0, reference.out
    stopped = run(config, *zero(1, "--steps.exit_interval", 2), ranks=2)
    assert "saved as global_step102" in stopped.out, stopped.out
    other = run(config)
    assert other.code == 5
    assert "global_step102 was written by the engine deepspeed" in other.out
    ran = run(config, *zero(3, "--export", tmp_path / "ours"))
    assert ran.code == 0, ran.out
    require_same(ran, reference, near=2e-3, steps=4)
    scores = [
        json.loads((result.save / "evaluations.jsonl").read_text().splitlines()[-1]) for result in (ran, reference)
    ]
    assert scores[0]["one_loss"] == pytest.approx(scores[1]["one_loss"], abs=2e-3)
    assert convert("verify", tmp_path / "ours").code == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    began = load_file(model("llama-tied", vocab_size=253) / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        moved = (theirs[name].float() - began[name]).norm()
        assert (tensor.float() - theirs[name].float()).norm() < 0.02 * moved, name


# --- without processes -----------------------------------------------------------------------------------------------

WORDS = [
    "--model.path", "m", "--data.train", "[d]", "--data.seq_length", "8", "--batch.micro", "1", "--batch.size", "2",
    "--save.path", "s", "--optim.lr", "1",
]  # fmt: skip


@pytest.fixture
def load(tmp_path):
    """`load(words)`: settings, and notes."""
    (tmp_path / "c.yml").write_text("{}")
    return lambda *options: load_config(tmp_path / "c.yml", [*WORDS, *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "deepspeed", "--parallel.replicas", "2"], "deepspeed does not know parallel.replicas"),
        (["--engine", "deepspeed", "--model.compile", "true"], "deepspeed does not know model.compile"),
        (["--parallel.deepspeed.zero_optimization.stage", "3"], "fsdp does not know parallel.deepspeed"),
        (["--engine", "deepspeed", "--parallel.zero_stage", "4"], "parallel.zero_stage is 4"),
    ],
)
def test_settings_of_another_engine(load, options, message):
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        load(*options)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("zero_optimization.stage", "2", "parallel.zero_stage"),
        ("gradient_clipping", "1.0", "optim.clip"),
        ("train_batch_size", "auto", "batch.size"),
        ("optimizer.type", "Adam", "optim"),
        ("bf16.enabled", "true", "model.dtype"),
    ],
)
def test_what_has_a_name_here_is_not_taken_twice(load, name, value, ours):
    config, _ = load("--engine", "deepspeed", f"--parallel.deepspeed.{name}", value)
    with pytest.raises(UsageError, match=f"which is {ours} here".replace(".", r"\.")):
        settings_of(config, 2)


def test_all_that_has_a_name_here_is_told_at_once(load):
    config, _ = load("--engine", "deepspeed", "--parallel.deepspeed", "{train_batch_size: 8, bf16: {enabled: auto}}")
    with pytest.raises(UsageError, match=r"sets train_batch_size, bf16, which are batch\.size, model\.dtype here"):
        settings_of(config, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimization": {"nonsense": 3}}, r"zero_optimization\.nonsense is 3: Extra inputs"),
        ({"zero_optimization": {"offload_param": {"device": "x"}}}, r"offload_param\.device is 'x': Input should be"),
        ({"zero_optimization": {}, "overlap_comm": True, "stage3_max_live_parameters": 1}, "sets overlap_comm, stage3"),
    ],
)
def test_settings_that_deepspeed_would_not_take_or_not_see(settings, message):
    with pytest.raises(UsageError, match=message):
        _require_known(settings)
    _require_known({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9}})


def test_settings_of_zero_plus_plus_go_to_deepspeed(load):
    config, notes = load(
        "--engine", "deepspeed",
        "--parallel.deepspeed.zero_optimization", "{zero_hpz_partition_size: 8, zero_quantized_gradients: true}",
    )  # fmt: skip
    settings = settings_of(config, 2)["zero_optimization"]
    assert settings == {"zero_hpz_partition_size": 8, "zero_quantized_gradients": True, "stage": 3}
    assert any("1, 2, 3, 5, 8, 16, 32, 40, 64 and 80 nodes" in note for note in notes)


def test_quantized_traffic_needs_a_gpu(load):
    config, _ = load("--engine", "deepspeed", "--parallel.deepspeed.zero_optimization.zero_quantized_weights", "true")
    with pytest.raises(UnsupportedError, match="DeepSpeed has no zero_quantized_weights on CPUs"):
        DeepSpeedEngine(config, None, SimpleNamespace(ranks=2, device=torch.device("cpu")), "sdpa")


def test_without_the_library(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config, _ = load("--engine", "deepspeed")
    with pytest.raises(UnsupportedError, match="the engine deepspeed lacks a library"):
        DeepSpeedEngine(config, None, SimpleNamespace(ranks=2, device=torch.device("cpu")), "sdpa")


@pytest.mark.parametrize(("shape", "ranks"), [((5, 3), 2), ((5, 3), 4), ((7,), 3), ((2, 2, 2), 16), ((1, 9), 4)])
def test_the_parts_of_a_tensor_are_all_of_it(tmp_path, shape, ranks):
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    count = -(-tensor.numel() // ranks)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        parts = [_part(file.get_slice("a"), shape, count, rank) for rank in range(ranks)]
    assert all(part.shape == (count,) for part in parts)
    assert torch.equal(torch.cat(parts)[: tensor.numel()], tensor.flatten())
    assert not torch.cat(parts)[tensor.numel() :].any()


def test_a_task_that_sees_one_gpu_takes_that(monkeypatch):
    """DeepSpeed takes the number of the rank on its node, and there is no fourth device then."""
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(init_distributed=lambda **_: None))
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    _deepspeed(SimpleNamespace(device=torch.device("cuda", 0)))
    assert os.environ["LOCAL_RANK"] == "0"
