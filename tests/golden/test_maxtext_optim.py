"""MaxText's optimizer: a training that goes on in torch has the losses that MaxText's own had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_maxtext import with_its_head

HERE = Path(__file__).with_name("maxtext")
DECAY, CLIP = 0.1, 1.0
"""MaxText's defaults: `adam_weight_decay`, and `gradient_clipping_threshold`, a bound for the norm of all gradients."""
BETAS, EPS = (0.9, 0.95), 1e-8
MADE = 4
"""The steps that were made before the save."""


class Resumed(NamedTuple):
    """A training of a DCP folder, as torch loads it."""

    model: Any
    states: dict[Any, dict[str, Any]]


def resumed(folder: Path) -> Resumed:
    """The model of a DCP folder, and Adam's states of each parameter, as torch itself loads them."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    )  # which caps the scores of a Gemma 2
    states = {
        f"optim.state.{name}.{state}": torch.zeros_like(parameter) if state != "step" else torch.zeros(())
        for name, parameter in model.named_parameters()
        for state in ("exp_avg", "exp_avg_sq", "step")
    }
    weights = {"model": get_model_state_dict(model)}
    dcp.load(weights, checkpoint_id=folder)
    dcp.load(states, checkpoint_id=folder)
    model.load_state_dict(weights["model"])
    return Resumed(
        model,
        {
            parameter: {state: states[f"optim.state.{name}.{state}"] for state in ("exp_avg", "exp_avg_sq", "step")}
            for name, parameter in model.named_parameters()
        },
    )


def losses(training: Resumed, told: dict[str, Any], factors: dict[str, float], raised: str) -> list[float]:
    """The losses of the steps after the save.

    Args:
        training: what was loaded.
        told: the batch, and the learning rate of each step, as MaxText had them.
        factors: part of a name: what a parameter of MaxText is multiplied by; its steps and its gradient are, too.
        raised: part of the names of norms that MaxText stores plus 1, and whose weight decay is of that.
    """
    import torch

    groups = []
    for name, parameter in training.model.named_parameters():
        factor = next((value for part, value in factors.items() if part in name), 1.0)
        shift = float(bool(raised) and raised in name)
        groups.append(
            {"params": [parameter], "factor": factor, "shift": shift, "weight_decay": 0.0, "eps": EPS / factor}
        )
    adam = torch.optim.AdamW(groups, betas=BETAS)
    adam.state.update({parameter: states for parameter, states in training.states.items() if states})
    with_its_head(training.model)
    ids, targets = torch.tensor(told["inputs"]), torch.tensor(told["targets"])
    made = []
    for step in told["steps"][MADE:]:
        loss = torch.nn.functional.cross_entropy(training.model(ids).logits[0], targets[0])
        made.append(loss.item())
        adam.zero_grad()
        loss.backward()
        squares = [(p.grad * group["factor"]).square().sum() for group in adam.param_groups for p in group["params"]]
        norm = float(sum(squares)) ** 0.5
        for group in adam.param_groups:
            group["lr"] = step["lr"] * group["factor"]
            for parameter in group["params"]:
                parameter.grad *= min(1.0, CLIP / norm)
                parameter.data -= step["lr"] * DECAY * (parameter.data + group["shift"])
        adam.step()
    return made


ROOTS = {"q_proj": 24**0.5, "embed_tokens": 32**-0.5}


@pytest.mark.parametrize(
    ("name", "factors", "raised", "options"),
    [("qwen3_state", {}, "", ()), ("gemma2", ROOTS, "norm", ("--accept", "scaled_steps"))],
)
def test_a_training_goes_on_with_its_losses(convert, tmp_path, name, factors, raised, options):
    source, out = HERE / name / "checkpoint", tmp_path / "out"
    ran = convert("hf2fsdp", source, out, "--config", HERE / name, "--ranks", 2, "--with-optimizer", *options)
    assert ran.code == 0, ran.err
    told = json.loads((HERE / name / "steps.json").read_text())
    training = resumed(out)
    assert {float(states["step"]) for states in training.states.values()} == {MADE}
    theirs = [step["loss"] for step in told["steps"][MADE:]]
    assert losses(training, told, factors, raised) == pytest.approx(theirs, rel=2e-5)
    assert losses(resumed(out)._replace(states=training.states), told, factors, raised) != pytest.approx(
        theirs, rel=1e-2
    )


def test_parameters_that_take_other_steps(convert, tmp_path):
    ran = convert("hf2fsdp", HERE / "llama_state/checkpoint", tmp_path / "out", "--config", HERE / "llama_state",
                  "--with-optimizer")  # fmt: skip
    refused(ran, 5, "at the same rate times: query 4", "--accept scaled_steps")


def test_into_megatron(convert, tmp_path):
    """Megatron's schedule begins at a rate that is in the checkpoint, and MaxText saves none: refused, not guessed."""
    source, config = HERE / "qwen3_state/checkpoint", HERE / "qwen3_state"
    ran = convert("hf2megatron", source, tmp_path / "run", "--config", config, "--format", "torch_dist",
                  "--with-optimizer")  # fmt: skip
    refused(ran, 4, "does not say with which rate, betas, eps and weight decay Adam trains")


def test_what_inspect_says(convert):
    ran = convert("inspect", HERE / "qwen3_state/checkpoint", "--config", HERE / "qwen3_state", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["optimizer"] == {"states": ["exp_avg", "exp_avg_sq"], "step": MADE}


def test_into_deepspeed_and_out_of_it(convert, tmp_path):
    """Without a rate, as there is none: what is written says none, says so, and is read as an Adam."""
    import torch

    source, config = HERE / "qwen3_state/checkpoint", HERE / "qwen3_state"
    assert convert("hf2fsdp", source, tmp_path / "fsdp", "--config", config, "--with-optimizer").code == 0
    out = tmp_path / "universal"
    ran = convert("zero2universal", source, out, "--config", config)
    assert ran.code == 0, ran.err
    assert "the source has no rate, betas and weight decay: DeepSpeed trains on with those of the training" in ran.err
    path = next(out.glob("*/zero/optimizer_state.pt"))
    saved = torch.load(path, weights_only=True)
    names = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
    assert saved["param_groups"] == [{"params": [number]} for number in range(len(names))], "for any training's groups"
    ran = convert("hf2fsdp", out, tmp_path / "back", "--with-optimizer")
    assert ran.code == 0, ran.err
    assert "the source has no rate, betas and weight decay: set_optimizer_state_dict" in ran.err
    before, after = resumed(tmp_path / "fsdp"), resumed(tmp_path / "back")
    for one, other in zip(before.model.parameters(), after.model.parameters(), strict=True):
        assert one.equal(other)
        assert all(value.equal(after.states[other][state]) for state, value in before.states[one].items())
    ran = convert("hf2megatron", out, tmp_path / "run", "--with-optimizer", "--format", "torch_dist")
    refused(ran, 4, "does not say with which rate, betas, eps and weight decay Adam trains")
    of_radam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torch.save({**saved, "param_groups": [of_radam | group for group in saved["param_groups"]]}, path)
    (out / path.parent.parent.name / "vitruvian.json").unlink()
    refused(convert("hf2fsdp", out, tmp_path / "no", "--with-optimizer"), 4, "its optimizer is of an unknown kind")


def test_a_training_that_counts_other_steps(convert, tmp_path):
    import tensorstore

    at = shutil.copytree(HERE / "qwen3_state/checkpoint", tmp_path / "run/3")
    store = {"driver": "ocdbt", "base": f"file://{at / 'items'}/", "path": "step/"}
    tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, write=True).result().write(5).result()
    ran = convert("hf2fsdp", at, tmp_path / "out", "--config", HERE / "qwen3_state", "--with-optimizer")
    refused(ran, 4, "has made different numbers of steps: ", "opt_state.0.count = 4", "step = 5")


@pytest.mark.parametrize("name", ["9", "5", "4", "3", "2", "final"])
def test_a_folder_with_the_number_of_another_step_is_told(convert, tmp_path, name):
    """MaxText saved this state, which has made 4 steps, as 3; other trainers may count from 1."""
    at = shutil.copytree(HERE / "qwen3_state/checkpoint", tmp_path / name)
    for path in (at, at / "items"):
        for command, *options in (["maxtext2hf"], ["zero2universal"], ["hf2fsdp", "--with-optimizer"]):
            out = tmp_path / command / path.name
            ran = convert(command, path, out, *options, "--config", HERE / "qwen3_state")
            told = (ran.err + ran.out).count(f"{name} holds step 4, as its files say: {at / 'items'} says step = 4")
            assert (ran.code, told) == (0, int(name in "952")), ran.err


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    """What drops the arrays from a _METADATA whose names have all of these."""

    def drop(tree: dict[str, Any]) -> None:
        for entry in [key for key in tree if all(f"'{name}'" in key for name in names)]:
            del tree[entry]

    return drop


def of_adam_pax(tree: dict[str, Any]) -> None:
    """Its state is not in a tuple: opt_state.mu, and not opt_state.0.mu."""
    for entry in tree.values():
        entry["key_metadata"] = [key for key in entry["key_metadata"] if key["key"] not in ("0", "2")]


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        (without("opt_state", "mu", "wo"), 3, "holds no exp_avg of decoder.layers_0.mlp.wo.kernel"),
        (without("opt_state", "2", "count"), 3, "holds no number opt_state.2.count"),
        (without("step"), 3, "holds no number step"),
        (of_adam_pax, 4, "only MaxText's adamw is carried"),
        (without("opt_state"), 3, "holds no optimizer"),
    ],
)
def test_another_optimizer(convert, tmp_path, change, code, part):
    at = shutil.copytree(HERE / "qwen3_state/checkpoint", tmp_path / "run/3")
    metadata = at / "items/_METADATA"
    text = json.loads(metadata.read_text())
    change(text["tree_metadata"])
    metadata.write_text(json.dumps(text))
    ran = convert("hf2fsdp", at, tmp_path / "out", "--config", HERE / "qwen3_state", "--with-optimizer")
    refused(ran, code, part)
    assert not (tmp_path / "out").exists()
