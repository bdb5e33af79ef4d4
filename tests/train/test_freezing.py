"""Frozen parts: as a loop in plain transformers that freezes them, in every engine; they never change."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from formats.errors import UsageError
from tests.train.test_deepspeed import zero
from train.settings.freezing import frozen

FREEZE = ["model.embed_tokens.*", "model.layers.[01].*", "!*norm.weight"]
STEPS = {"train_iters": 4}
NEAR = 2e-6


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def is_frozen(name):
    return not name.endswith("norm.weight") and name.startswith(
        ("model.embed_tokens", "model.layers.0.", "model.layers.1.")
    )


def by_hand(model, data, steps, optimizer=None, loss="assistant"):
    """Losses and norms of a loop over what of a model is trained, each document alone."""
    from train.data.rows import open_rows
    from train.settings.batching import Order, Sizes
    from train.settings.config import Data

    rows = open_rows(Data(train=[data], seq_length=64, loss=loss), [data], 1234)
    order = Order(len(rows), 1234, steps * 8)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for step in range(steps):
        flat = rows.flat([row for batch in order.batch(step, Sizes(8, 1, 1), 0) for row in batch])
        total = torch.zeros(())
        for low, high in zip(flat.cu_seqlens[:-1], flat.cu_seqlens[1:], strict=True):
            logits = model(input_ids=torch.from_numpy(flat.input_ids[low:high])[None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(flat.labels[low:high]), reduction="sum"
            )
        rate = 1e-3 * 0.5 * (1 + torch.cos(torch.tensor(step / steps * torch.pi)).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        (total / flat.trained).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / flat.trained)
    return losses, norms


@pytest.fixture
def config(settings):
    return settings(model={"freeze": FREEZE}, steps=STEPS)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_it_is_a_loop_that_freezes_on_any_ranks_and_resumes(config, run, convert, model, data, tmp_path):
    from transformers import AutoModelForCausalLM

    start = model("llama", vocab_size=253)
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    for name, tensor in plain.named_parameters():
        tensor.requires_grad_(not is_frozen(name))
    losses, norms = by_hand(plain, data, 4)
    reference = run(config, "--export", tmp_path / "out", save="whole")
    assert reference.code == 0, reference.out
    total = sum(tensor.numel() for tensor in tensors(start).values())
    trained = sum(tensor.numel() for name, tensor in tensors(start).items() if not is_frozen(name))
    assert f"trained    {trained:,} of {total:,} parameters are trained" in reference.out
    assert reference.series("loss") == pytest.approx(losses, abs=NEAR)
    assert reference.series("grad_norm") == pytest.approx(norms, abs=NEAR)
    assert convert("fsdp2hf", reference.save / "global_step104", tmp_path / "fp32").code == 0
    for name, tensor in tensors(tmp_path / "fp32").items():
        assert torch.equal(tensor, tensors(start)[name]) == is_frozen(name), name
    stopped = run(config, "--steps.exit_interval", 2)
    assert stopped.code == 75, stopped.out
    resumed = run(config, ranks=2, save="save")
    assert resumed.code == 0, resumed.out
    assert resumed.series("loss") == pytest.approx(losses, abs=NEAR)
    assert resumed.series("grad_norm") == pytest.approx(norms, abs=NEAR)


@pytest.mark.distributed
def test_what_was_frozen_has_no_moments(config, run, convert):
    stopped = run(config, "--steps.exit_interval", 2)
    assert stopped.code == 75, stopped.out
    refused = run(config, "--model.freeze", "[model.embed_tokens.*]")
    assert refused.code == 5
    assert "has no moments of 14 tensors that are trained now: model.layers.0." in refused.out
    unfrozen = run(config, "--model.freeze", "[model.embed_tokens.*, 'model.layers.[012].*']")
    assert unfrozen.code == 0, unfrozen.out
    assert "changed settings: model.freeze" in unfrozen.out


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 3])
def test_zero_computes_the_same(config, run, convert, model, tmp_path, stage):
    start = tensors(model("llama", vocab_size=253))
    fsdp = run(config, save="fsdp")
    stopped = run(config, *zero(stage, "--steps.exit_interval", 2), ranks=2)
    assert stopped.code == 75, stopped.out
    ran = run(config, *zero(stage))
    assert ran.code == 0, ran.out
    for series in ("loss", "grad_norm"):
        assert ran.series(series) == pytest.approx(fsdp.series(series), abs=NEAR)
    assert convert("zero2hf", ran.save / "global_step104", tmp_path / "hf").code == 0
    for name, tensor in tensors(tmp_path / "hf").items():
        assert torch.equal(tensor, start[name]) == is_frozen(name), name


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_trainer_of_transformers_computes_the_same(config, run):
    fsdp = run(config, save="fsdp")
    stopped = run(config, "--steps.exit_interval", 2, save="hf")
    assert stopped.code == 75, stopped.out
    ran = run(config, "--engine", "transformers", ranks=2, save="hf")
    assert ran.code == 0, ran.out
    for series in ("loss", "grad_norm"):
        assert ran.series(series) == pytest.approx(fsdp.series(series), abs=NEAR)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt_neox", "mixtral"])
def test_the_plan_counts_what_a_run_would_train(settings, train, model, name):
    from train.model.trainee import freeze, make, open_config

    patterns = ["*.layers.0.*", "*embed*"]
    skeleton = make(open_config(model(name, vocab_size=253)), "eager")
    freeze(skeleton, patterns)
    ran = train("plan", settings(name, model={"freeze": patterns}), "--json")
    assert ran.code == 0, ran.err
    plan, counts = json.loads(ran.out), {True: 0, False: 0}
    for tensor in skeleton.parameters():
        counts[tensor.requires_grad] += tensor.numel()
    assert plan["trained"] == counts[True]
    assert plan["memory"]["weights, gradients, moments"] == 16 * counts[True]
    assert plan["memory"]["frozen weights"] == 4 * counts[False]


def test_patterns():
    names = ["a.0.weight", "a.1.weight", "b.weight"]
    assert frozen(names, []) == set()
    assert frozen(names, ["*", "!a.1.*"]) == {"a.0.weight", "b.weight"}
    assert frozen(names, ["!b.*", "*.0.*"]) == {"a.0.weight"}
    with pytest.raises(UsageError, match=r"c\.\* matches no tensor"):
        frozen(names, ["c.*"])
    with pytest.raises(UsageError, match="freezes all 3 tensors"):
        frozen(names, ["*"])


def test_beside_adapters_it_has_no_effect(settings, train):
    ran = train("plan", settings(lora={}, model={"freeze": ["*norm*"]}))
    assert ran.code == 2
    assert "model.freeze has no effect with lora" in ran.err
