"""Lion, and moments in 8 bits, in DeepSpeed: what is moved is what the engine has in memory, and trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.common.manifest import remembered_states
from converters.convert import run
from converters.plan.request import Request
from converters.plan.targets import plan_huggingface
from converters.plan.training_state import optimizer_of
from formats.checkpoint import Checkpoint, Settings
from formats.optimizer import Lion, Optimizer
from formats.registry import open_checkpoint
from tests.golden.test_zero import differences
from tests.golden.test_zero_optim import DECAY, NONE, inner, optimizer
from tests.golden.zero_worlds import BITS, LIONS

pytestmark = pytest.mark.distributed


def read_trained(world: Path, kind: str) -> tuple[Checkpoint, Optimizer, Path, Path]:
    """A checkpoint of three steps and its optimizer; the config, and what the engine had in memory."""
    config, truth = world / "hf", world / f"{kind}.truth.safetensors"
    source = open_checkpoint(world / kind, Settings(config=config))
    trained = optimizer_of(source)
    assert (trained.step, trained.samples) == (3, 6)
    return source, trained, config, truth


def compare_states(source: Checkpoint, trained: Optimizer, truth: Path, folder: Path, states: tuple[str, ...]) -> None:
    """Each state, written as a model, is what the engine had, bit for bit."""
    for state in states:
        request = Request(folder / state, quiet=True)
        run(plan_huggingface(trained.states.get(state, source), request, 10**9), request)
        assert differences(folder / state, truth, state) == []


# --- Lion ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIONS.kinds)
def test_the_moment_of_lion_is_that_of_the_engine(made, convert, zero, tmp_path, kind):
    """Of DeepSpeed's, and of one that counts no steps. DeepSpeed loads it in another stage, on other ranks."""
    source, trained, config, truth = read_trained(made(LIONS), kind)
    assert [*trained.states] == [*([] if "zero3" in kind else ["fp32"]), "exp_avg"]  # which has no other weights
    compare_states(source, trained, truth, tmp_path, ("fp32", "exp_avg"))
    decay, none = (Lion(0.001, (0.9, 0.99), decay) for decay in (0.1, 0.0))
    assert trained.groups == {key: none if "norm" in key[0] else decay for key in source.dtypes()}
    states = f"{', '.join(trained.states)}, step 3;"
    assert states in convert("inspect", made(LIONS) / kind, "--config", config).out
    first, second, third = (tmp_path / number for number in ("first", "second", "third"))
    for run_folder, out in ((made(LIONS) / kind, first), (first, second), (second, third)):
        ran = convert("zero2universal", run_folder, out, *(["--config", config] if run_folder == first else []))
        assert ran.code == 0, ran.err
        assert "in 3 it asks for exp_avg_sq" in ran.err
        assert convert("verify", out).code == 0
    files = {path.relative_to(first): path.read_bytes() for path in first.rglob("zero/*/*.pt")}
    assert len(files) == 39 * 3
    for other in (second, third):
        assert {path.relative_to(other): path.read_bytes() for path in other.rglob("zero/*/*.pt")} == files
    assert optimizer(second, config=config).groups == trained.groups
    which = "lion" if kind == "zero1-fp32-lion" else "fused-lion"
    for out, ranks, stage in ((first, 3, 2), (second, 1, 1)):
        code, output = zero("load-universal", out, config, ranks, f'{stage},optimizer="{which}"', truth)
        assert code == 0, output[-4000:]


def test_a_training_with_lion_goes_on_in_deepspeed_and_in_torch(made, zero, convert, tmp_path):
    """Out of FP32 on two ranks: every loss is that of the training that never stopped."""
    kind, config = made(LIONS) / "zero1-fp32-lion", made(LIONS) / "hf"
    assert convert("zero2universal", kind, tmp_path / "first").code == 0
    assert convert("zero2universal", tmp_path / "first", tmp_path / "universal", "--config", config).code == 0
    stages = [f'{stage},optimizer="lion",fp32=true' for stage in (1, 2)]
    code, out = zero("go-on", tmp_path / "universal", config, 2, *stages)
    assert code == 0, out[-4000:]
    whole, *parts = map(json.loads, out.splitlines())
    assert len({loss for rank in whole for loss in rank}) == 6
    assert parts == [whole] * 2
    for source, moved in ((kind, "one"), (tmp_path / "universal", "two")):
        ran = convert("hf2fsdp", source, tmp_path / moved, "--ranks", 3, "--with-optimizer", "--config", config)
        assert ran.code == 0, ran.err
        losses = trained_on(tmp_path / moved, config, lions, 0.001)
        for ours, theirs in zip(losses, whole, strict=True):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-6)
    again, back = tmp_path / "again", tmp_path / "back"
    assert convert("hf2fsdp", tmp_path / "one", again, "--ranks", 2, "--with-optimizer").code == 0
    assert convert("diff", again, tmp_path / "one").code == 0
    assert convert("zero2universal", again, back).code == 0, "the steps that DeepSpeed counted are in it"
    files = {path.relative_to(back): path.read_bytes() for path in back.rglob("zero/*/*.pt")}
    assert all((tmp_path / "universal" / path).read_bytes() == content for path, content in files.items())


def lions(groups: list[dict[str, Any]]) -> Any:
    """A Lion that knows nothing yet."""
    from tests.golden import lion

    return lion.Lion(groups, lr=0.5, betas=(0.5, 0.5))


def trained_on(folder: Path, config: Path, make_optimizer: Callable[..., Any], rate: float) -> list[list[float]]:
    """The losses of three steps more in one process, of the data of each of two ranks."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    parts = [[each for each in model.parameters() if (each.dim() > 1) == matrix] for matrix in (True, False)]
    optimizer = make_optimizer([{"params": part, "weight_decay": 0.5} for part in parts])
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    losses: list[list[float]] = [[], []]
    for step in range(3, 6):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 ** (step - 3)
        for rank in range(2):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            ids = torch.randint(model.config.vocab_size, (1, 24), generator=generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            losses[rank].append(loss.item())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# --- moments in 8 bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BITS.kinds)
def test_moments_in_8_bits_are_those_that_bitsandbytes_reads(made, convert, zero, tmp_path, kind):
    """Bit for bit, wherever a parameter begins in a block; and DeepSpeed loads them into an AdamW in float32."""
    source, trained, config, truth = read_trained(made(BITS), kind)
    compare_states(source, trained, truth, tmp_path, ("fp32", "exp_avg", "exp_avg_sq"))
    assert trained.groups == {key: NONE if "norm" in key[0] else DECAY for key in source.dtypes()}
    planned = convert("zero2universal", made(BITS) / kind, tmp_path / "universal", "-n")
    assert "dequantize bitsandbytes 8-bit to F32" in planned.out
    assert convert("zero2universal", made(BITS) / kind, tmp_path / "universal").code == 0
    assert convert("verify", tmp_path / "universal").code == 0
    for ranks, stage in ((3, 2), (1, 3)):
        code, output = zero("load-universal", tmp_path / "universal", config, ranks, stage, truth)
        assert code == 0, output[-4000:]
    options = ["--ranks", 3, "--with-optimizer", "--config", config]
    for run_folder, out in ((made(BITS) / kind, "one"), (tmp_path / "universal", "two")):
        ran = convert("hf2fsdp", run_folder, tmp_path / out, *options)
        assert ran.code == 0, ran.err
        assert convert("verify", tmp_path / out).code == 0
    assert convert("diff", tmp_path / "one", tmp_path / "two").code == 0


def test_a_training_in_8_bits_goes_on_with_adamw_in_float32(made, zero, convert, tmp_path):
    """The first two losses are those of the one in 8 bits: after each step that one rounds its moments again."""
    import torch

    kind, config = made(BITS) / "zero1-fp32-bits", made(BITS) / "hf"
    assert convert("zero2universal", kind, tmp_path / "first").code == 0
    assert convert("zero2universal", tmp_path / "first", tmp_path / "universal", "--config", config).code == 0
    code, out = zero("go-on", tmp_path / "universal", config, 2, '2,optimizer="adam",fp32=true')
    assert code == 0, out[-4000:]
    whole, moved = map(json.loads, out.splitlines())
    ran = convert("hf2fsdp", kind, tmp_path / "fsdp", "--ranks", 3, "--with-optimizer", "--config", config)
    assert ran.code == 0, ran.err
    for losses in (moved, trained_on(tmp_path / "fsdp", config, torch.optim.AdamW, 0.01)):
        for ours, theirs in zip(losses, whole, strict=True):
            assert ours[:2] == pytest.approx(theirs[:2], rel=0, abs=2e-6)
            assert ours[2] == pytest.approx(theirs[2], rel=0, abs=2e-3)


def test_moments_in_8_bits_as_bitsandbytes_saved_them_before(made, convert, tmp_path):
    """Up to 0.47 beside the step."""
    import shutil

    import torch

    options, run_ = ["--with-optimizer", "--config", made(BITS) / "hf"], tmp_path / "run"
    shutil.copytree(made(BITS) / "zero2-bits", run_)
    for path in run_.glob("*/*optim_states.pt"):
        stored = torch.load(path, weights_only=False)
        for state in inner(stored)["state"].values():
            state.update(state.pop(EIGHT_BITS))
        torch.save(stored, path)
    for run_folder, out in ((made(BITS) / "zero2-bits", "one"), (run_, "two")):
        assert convert("hf2fsdp", run_folder, tmp_path / out, *options).code == 0
    assert remembered_states(tmp_path / "one") == remembered_states(tmp_path / "two") != {}


EIGHT_BITS = "__bnb_optimizer_quant_state__"
BITS_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "of one moment": (lambda s: s[EIGHT_BITS].pop("state2"), "holds no exp_avg: its optimizer (an 8-bit optimizer of"),
    "LAMB": (lambda s: s[EIGHT_BITS].update(unorm_vec=s[EIGHT_BITS]["absmax1"][:1]), "keeps unorm_vec"),
    "no largest": (lambda s: s[EIGHT_BITS].pop("absmax1"), "exp_avg of group 0 in 8 bits in a form that is not known"),
    "a block too few": (
        lambda s: s[EIGHT_BITS].update(absmax2=s[EIGHT_BITS]["absmax2"][1:].clone()), "exp_avg_sq of group 0 in 8 bits",
    ),
    "floats": (lambda s: s[EIGHT_BITS].update(state1=s[EIGHT_BITS]["state1"].float()), "exp_avg of group 0 in 8 bits"),
    "NaN": (lambda s: s[EIGHT_BITS]["absmax1"].fill_(float("nan")), "NaN or infinity among the numbers"),
    "negative": (lambda s: s[EIGHT_BITS]["qmap2"].sub_(2), "Adam's second moments are finite and not negative"),
    "a negative largest": (lambda s: s[EIGHT_BITS]["absmax1"].neg_(), "holds a negative absmax"),
    "values backwards": (
        lambda s: s[EIGHT_BITS].update(qmap1=s[EIGHT_BITS]["qmap1"].flip(0)), "8-bit codes that do not ascend",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BITS_FAULTS)
def test_moments_in_8_bits_are_whole_or_refused(made, convert, tmp_path, fault):
    import shutil

    import torch

    change, says = BITS_FAULTS[fault]
    run_ = shutil.copytree(made(BITS) / "zero2-bits", tmp_path / "run")
    path = next(run_.glob("*/*zero_pp_rank_1_*optim_states.pt"))
    stored = torch.load(path, weights_only=False)
    change(inner(stored)["state"][0])
    torch.save(stored, path)
    words = ["--with-optimizer", "--config", made(BITS) / "hf"]
    ran = convert("hf2fsdp", run_, tmp_path / "out", *words)
    assert (ran.code > 2, says in ran.err) == (True, True), ran.err
    assert not (tmp_path / "out").exists()
