"""Optimizers from Megatron through another framework's files and back: each state stays with its weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converters.move.engine import digest_of
from converters.plan.request import Limits
from converters.plan.state_jobs import state_jobs
from converters.plan.training_state import optimizer_of
from formats.checkpoint import Settings
from formats.errors import UnsupportedError
from formats.megatron.portable_optimizer import native
from formats.optimizer import Group, Optimizer
from formats.registry import open_checkpoint
from tests.optimizers import add_optimizer

NEOX = Path(__file__).parents[1] / "golden/neox"
CASES = {
    "fp32": ("llama", "float32", "plain", "--tp 2", "--pp 2"),
    "biases": ("starcoder2", "float32", "plain", "--pp 2", "--tp 2 --format torch_dist"),
    "masters": ("qwen3", "bfloat16", "plain", "--tp 2", "--pp 2 --vpp 2"),
    "experts": ("mixtral", "float32", "plain", "--ep 2", "--pp 2 --experts local"),
    "buffers": ("dots1", "bfloat16", "plain", "--pp 2", "--ep 2"),
    "tied": ("llama-tied", "bfloat16", "distributed", "--tp 2", "--format torch_dist"),
}


def states(run: Path) -> dict[str, str]:
    """The digest of each state of each tensor, and of what is rounded from the master weights."""
    source = open_checkpoint(run, Settings())
    return digest_of(state_jobs(source, optimizer_of(source).states), Limits())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_through_fsdp(model, convert, tmp_path, name):
    family, dtype, how, topology, target = CASES[name]
    source, run, moved, out = model(family, dtype), tmp_path / "run", tmp_path / "fsdp", tmp_path / "out"
    options = ["--norm", "local", "--iteration", 3, "--make-vocab-size-divisible-by", 16]
    assert convert("hf2megatron", source, run, *topology.split(), *options).code == 0
    add_optimizer(run, how)
    ran = convert("hf2fsdp", run, moved, "--ranks", 3, "--with-optimizer")
    assert ran.code == 0, ran.err
    assert "only weights" not in ran.err
    assert ("written from the FP32 master weights" in ran.err) == (dtype == "bfloat16")
    assert convert("verify", moved).code == 0
    options += ["--with-optimizer", "--dtype", {"float32": "fp32", "bfloat16": "bf16"}[dtype]]
    ran = convert("hf2megatron", moved, out, *target.split(), *options)
    assert ran.code == 0, ran.err
    assert "--override-opt_param-scheduler" in ran.err
    assert "is not carried" not in ran.err
    assert convert("verify", out).code == 0
    assert states(run) == states(out) != {}
    assert convert("diff", run, out).code == 0


def test_inspect_says_what_can_be_taken_along(model, convert, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "universal"
    assert convert("hf2megatron", model(), run, "--norm", "local", "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    assert convert("zero2universal", run, moved).code == 0
    optimizer = json.loads(convert("inspect", moved, "--json").out)["optimizer"]
    assert optimizer == {"states": ["exp_avg", "exp_avg_sq"], "step": 3}
    assert "step 3; `convert hf2fsdp --with-optimizer` converts it too" in convert("inspect", moved).out
    assert convert("hf2fsdp", moved, tmp_path / "fsdp", "--with-optimizer").code == 0
    summands = NEOX / "neox-parallel-tp2"
    assert "cannot be converted: 2.attention.dense.bias is a sum over" in convert("inspect", summands).out
    (path,) = (NEOX / "neox-serial-tp2").glob("global_step*")
    assert json.loads(convert("inspect", path, "--json").out)["optimizer"] is None


@pytest.mark.parametrize(
    ("name", "treated", "changes", "says"),
    [
        ("llama", "norm", {"lr": 0.5}, "norms and biases at the rate 0.5, and all else at 0.01"),
        ("llama", "gate", {"weight_decay": 0.5}, "trains its matrices with different settings"),
        ("starcoder2", "query_bias", {"betas": (0.8, 0.9)}, "trains its vectors and biases with different settings"),
        ("gpt_oss", "expert_up_bias", {"weight_decay": 0.5}, "trains its vectors and biases with different settings"),
    ],
)
def test_settings_that_megatron_has_no_place_for(model, name, treated, changes, says):
    """Of the biases of experts too, which are one matrix in Hugging Face."""
    source = open_checkpoint(model(name), Settings())
    group = Group(0.01, (0.9, 0.999), 1e-8, 0.0)
    groups = {key: group._replace(**changes) if treated in key[0] else group for key in source.dtypes()}
    with pytest.raises(UnsupportedError, match=says):
        native(source, Optimizer({}, 3, groups))


@pytest.mark.parametrize("family", ["dots1", "deepseek_v3"])
def test_a_bias_that_nothing_trains_is_no_parameter_of_deepspeed(model, convert, tmp_path, family):
    """What transformers trains is in a universal checkpoint, in one group of DeepSpeed; its buffers are told."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source, run, moved = model(family, "float32"), tmp_path / "run", tmp_path / "universal"
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    assert convert("hf2megatron", source, run, "--norm", "te", "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    ran = convert("zero2universal", run, moved)
    assert ran.code == 0, ran.err
    bias = "e_score_correction_bias: DeepSpeed restores none from a universal checkpoint"
    assert bias in ran.err
    (path,) = moved.glob("*/mp_rank_00_model_states.pt")
    state = torch.load(path, weights_only=False)
    assert {name: shape for group in state["param_shapes"] for name, shape in group.items()} == {
        name: tuple(parameter.shape) for name, parameter in expected.named_parameters()
    }
    assert {folder.name for folder in moved.glob("*/zero/*/")} == {name for name, _ in expected.named_parameters()}
    settings = torch.load(path.parent / "zero/optimizer_state.pt", weights_only=False)
    assert [group["lr"] for group in settings["param_groups"]] == [0.01] * 2
    assert settings["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.01  # all that stage 3 restores
    for options in ([], ["--verbatim"]):
        ran = convert("hf2fsdp", moved, tmp_path / "fsdp", "--with-optimizer", *options)
        assert ran.code == 3, ran.err
        assert "holds no parameters that were not trained: it lacks model.layers." in ran.err
