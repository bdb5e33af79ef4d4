"""Master weights become the weights of an FSDP training; and an optimizer through every family and a kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from formats.optimizer import Group
from tests.faults.dcp_tools import save, weights
from tests.models import files
from tests.optimizers import add_optimizer, of

GROUP = Group(0.01, (0.9, 0.95), 1e-8, 0.1)


@pytest.mark.parametrize("name", ["llama-tied", "starcoder2"])
def test_masters_become_the_weights(model, convert, tmp_path, name):
    """The bits of each state are those of its weight, wherever Megatron had it; and the config says float32."""
    import torch
    import torch.distributed.checkpoint as dcp

    source, run, out = model(name, "bfloat16"), tmp_path / "run", tmp_path / "out"
    assert convert("hf2megatron", source, run, "--tp", 2, "--pp", 2, "--norm", "local", "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    ran = convert("hf2fsdp", run, out, "--ranks", 3, "--with-optimizer")
    assert ran.code == 0, ran.err
    assert "they are written from the FP32 master weights" in ran.err
    assert "only weights" not in ran.err
    assert convert("verify", out).code == 0
    metadata = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, checkpoint_id=out, no_dist=True)
    for key, weight in weights(source).items():
        assert torch.equal(tensors[f"model.{key}"], of(weight, "master")), key
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensors[f"optim.state.{key}.{state}"], of(weight, state)), key
        assert tensors[f"optim.state.{key}.step"] == 3
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_what_deepspeed_gets_is_not_said_to_stay(model, convert, tmp_path):
    """Of FSDP: its states are written, though its reader of weights has no place for them."""
    run, fsdp = tmp_path / "run", tmp_path / "fsdp"
    assert convert("hf2megatron", model("llama", "float32"), run, "--norm", "local", "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    assert convert("hf2fsdp", run, fsdp, "--with-optimizer").code == 0
    for options in (("-n",), ()):
        ran = convert("zero2universal", fsdp, tmp_path / "universal", *options)
        assert ran.code == 0, ran.err
        for message in ("no weight of the model is not carried", "only the weights are converted"):
            assert message not in ran.out + ran.err
    assert list((tmp_path / "universal").rglob("exp_avg.pt"))


def test_a_master_that_does_not_round_to_its_weight_is_noticed(model, convert, tmp_path):
    import torch

    run = tmp_path / "run"
    assert convert("hf2megatron", model("llama", "bfloat16"), run, "--norm", "local", "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    path = run / "iter_0000003/mp_rank_00/model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    stored["optimizer"]["fp32_from_fp16_params"][0][2].mul_(1.5)
    torch.save(stored, path)
    ran = convert("hf2fsdp", run, tmp_path / "out", "--with-optimizer")
    assert (ran.code, "rounded FP32 master weights" in ran.err) == (6, True), ran.err


def trained(source: Path, folder: Path) -> Path:
    """What a training of FSDP2 in float32 saves of a model whose weights are in a DCP folder."""
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(source).read_metadata()
    tensors = {key: torch.empty(entry.size) for key, entry in metadata.state_dict_metadata.items()}
    dcp.load(tensors, checkpoint_id=source, no_dist=True)
    model = {metadata.planner_data[key][1]: tensor for key, tensor in tensors.items()}
    state = {
        key: {"step": torch.tensor(3.0), **{name: of(tensor, name) for name in ("exp_avg", "exp_avg_sq")}}
        for key, tensor in model.items()
        if "correction_bias" not in key  # a buffer, or a parameter without a gradient
        and (
            key != "lm_head.weight"
            or not any(torch.equal(tensor, other) for name, other in model.items() if name != key)
        )
    }
    groups = [{**GROUP._asdict(), "amsgrad": False, "params": [*state]}]
    return save(folder, {"model": model, "optim": {"state": state, "param_groups": groups}})


@pytest.mark.parametrize("name", ["mixtral-tied", "dots1", "gpt2", "phi3-tied", "llama4_text", "ernie4_5_moe"])
def test_states_stay_with_their_weights(model, convert, tmp_path, name):
    """Fused experts, matrices that lie the other way round, gate and up in one, two kinds of layers, a buffer."""
    import torch
    import torch.distributed.checkpoint as dcp

    source = model(name)
    assert convert("hf2fsdp", source, tmp_path / "weights").code == 0
    start, out = trained(tmp_path / "weights", tmp_path / "begun"), tmp_path / "out"
    ran = convert("hf2fsdp", start, out, "--ranks", 3, "--with-optimizer", "--config", source)
    assert ran.code == 0, ran.err
    assert convert("verify", out).code == 0
    metadata = dcp.FileSystemReader(start).read_metadata()
    tensors = {name for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    read = [{name: torch.zeros(metadata.state_dict_metadata[name].size) for name in tensors} for _ in (start, out)]
    for state, folder in zip(read, (start, out), strict=True):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(tensor, read[1][name]) for name, tensor in read[0].items())


@pytest.mark.parametrize("command", ["hf2fsdp", "zero2universal", "hf2megatron"])
def test_that_an_optimizer_is_not_compared_is_told(model, convert, tmp_path, command):
    """Two checkpoints with the same weights, and optimizers of other steps."""
    source = model("llama")
    assert convert("hf2fsdp", source, tmp_path / "weights").code == 0
    start = trained(tmp_path / "weights", tmp_path / "begun")
    flags = ["--with-optimizer"] * (command != "zero2universal")
    for name in ("one", "two"):
        assert convert(command, start, tmp_path / name, "--config", source, *flags).code == 0
    for proof in ("verify", "diff"):
        ran = convert(proof, tmp_path / "one", tmp_path / "two", *["--vocab-size", 211] * (command == "hf2megatron"))
        assert (ran.code, "note: the weights were compared, the optimizer was not" in ran.err) == (0, True), ran.err
    assert "the optimizer was not" not in convert("verify", tmp_path / "one").err
    assert "the optimizer was not" not in convert("diff", source, tmp_path / "weights").err
    ran = convert("verify", start, "--config", source)
    looked = "was not looked at: only the pieces of the optimizer were counted"
    assert (ran.code, looked in ran.err) == (0, True), ran.err


def test_killed_or_split_it_goes_on_to_the_same_bytes(killed, model, convert, tmp_path):
    source = model("llama")
    assert convert("hf2fsdp", source, tmp_path / "weights").code == 0
    start = trained(tmp_path / "weights", tmp_path / "begun")
    options = ["--ranks", "3", "--with-optimizer", "--config", str(source), "-q"]
    assert convert("hf2fsdp", start, tmp_path / "whole", *options).code == 0
    for part in ("2/2", "1/2"):
        assert convert("hf2fsdp", start, tmp_path / "split", *options, "--part", part).code == 0
    assert convert("hf2fsdp", start, tmp_path / "split", *options).code == 0
    assert files(tmp_path / "split") == files(tmp_path / "whole")
    for left in (40, 150):
        ran = killed(-left, "hf2fsdp", start, tmp_path / "killed", *options)
        assert ran.returncode == -signal.SIGKILL, ran.out
        assert not (tmp_path / "killed").exists()
    ran = convert("hf2fsdp", start, tmp_path / "killed", "--ranks", "3", "--config", source)
    assert (ran.code, "another conversion" in ran.err) == (7, True), ran.err
    assert convert("hf2fsdp", start, tmp_path / "killed", *options).code == 0
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
