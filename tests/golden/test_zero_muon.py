"""DeepSpeed's Muon: what is moved is what the engine has in memory, and torch's Muon trains on with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.plan.training_state import optimizer_of
from formats.checkpoint import Settings
from formats.optimizer import Group, Muon
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.golden.test_zero_lion import trained_on
from tests.golden.test_zero_optim import inner
from tests.golden.zero_worlds import MUON_EXPERTS, MUON_PAIR, MUONS

pytestmark = pytest.mark.distributed
ADAM = {decay: Group(0.01, (0.9, 0.95), 1e-8, decay) for decay in (0.1, 0.0)}
MATRICES = Muon(0.01, 0.1, 0.9, True, (3.4445, -4.775, 2.0315), 1e-7, 5, "original")
NEOX = Path(__file__).parent / "neox/llama-tp2-dp2"
NEAR = 1e-4
"""Both multiply in bfloat16, torch in another order."""


def states(folder: Path) -> dict[str, Any]:
    """The model and what there is of each parameter in a folder of ours, as torch reads it: `exp_avg.NAME`."""
    import torch
    import torch.distributed.checkpoint as dcp

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in entries.items()
        if isinstance(about, dcp.metadata.TensorStorageMetadata) and not key.endswith(".step")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    named = {}
    for key, tensor in tensors.items():
        name, _, state = key.removeprefix("optim.state.").rpartition(".")
        named[f"{state}.{name}" if key.startswith("optim.") else f"fp32.{key.removeprefix('model.')}"] = tensor
    return named


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MUONS.kinds)
def test_momentum_is_that_of_the_engine(made, convert, tmp_path, kind):
    """Bit for bit, on three ranks that share matrices; and how each parameter is treated."""
    import torch
    from safetensors.torch import load_file

    config, out = made(MUONS) / "hf", tmp_path / "out"
    trained = optimizer_of(open_checkpoint(made(MUONS) / kind, Settings(config=config)))
    assert (trained.step, trained.samples) == (3, 9)
    for (name, _), group in trained.groups.items():
        assert group == (ADAM[0.0] if "norm" in name else ADAM[0.1] if name in ("embedding", "head") else MATRICES)
    ran = convert("hf2fsdp", made(MUONS) / kind, out, "--ranks", 2, "--with-optimizer", "--config", config)
    assert ran.code == 0, ran.err
    assert convert("verify", out).code == 0
    assert optimizer_of(open_checkpoint(out, Settings())).groups == trained.groups
    truth = load_file(made(MUONS) / f"{kind}.truth.safetensors")
    truth = {key: tensor for key, tensor in truth.items() if not key.startswith("module.")}
    ours = states(out)
    assert ours.keys() == truth.keys()
    assert sum(key.startswith("momentum_buffer.") for key in ours) == 14
    for key, tensor in truth.items():
        assert (ours[key].dtype, torch.equal(ours[key], tensor)) == (tensor.dtype, True), key
    refused(convert("zero2universal", made(MUONS) / kind, tmp_path / "u"), 4, "has no place in a universal checkpoint")


def both(groups: list[dict[str, Any]]) -> Any:
    """torch's Muon for the matrices but the first and the last, and an AdamW of all else; they know nothing yet."""
    import torch

    from tests.golden.ranks import Both

    matrices, vectors = (group["params"] for group in groups)
    ends = [matrices[0], matrices[-1]]
    muon = torch.optim.Muon(matrices[1:-1], lr=0.5, weight_decay=0.5, momentum=0.5)
    return Both((muon, torch.optim.AdamW([{"params": ends}, {"params": vectors}], lr=0.5, weight_decay=0.5)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "method"), [*zip(MUON_PAIR.kinds, ("standard", "gram"), strict=True)])
def test_a_training_with_muon_goes_on_in_torch(made, zero, convert, tmp_path, name, method):
    """Out of FP32 on two ranks: every loss is that of the training that never stopped."""
    kind, config = made(MUON_PAIR) / name, made(MUON_PAIR) / "hf"
    code, out = zero("unbroken", config, 2, f'1,optimizer="{method}-muon",fp32=true')
    assert code == 0, out[-4000:]
    whole = json.loads(out.splitlines()[-1])
    assert len({loss for rank in whole for loss in rank}) == 6
    ran = convert("hf2fsdp", kind, tmp_path / "one", "--ranks", 3, "--with-optimizer", "--config", config)
    assert ran.code == 0, ran.err
    for ours, theirs in zip(trained_on(tmp_path / "one", config, both, 0.01), whole, strict=True):
        assert ours == pytest.approx(theirs, rel=NEAR)
    options = ["--with-optimizer", "--config", config, "--format", "torch_dist", "--lr", 0.01]
    ran = convert("hf2megatron", kind, tmp_path / "run", *options)
    assert (ran.code, "Muon trains on with --optimizer muon" in ran.err) == (0, True), ran.err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MUON_EXPERTS.kinds)
def test_momentum_of_experts_goes_to_megatron(made, convert, tmp_path, kind):
    """Bit for bit: an expert's gate and up are one matrix on both sides. torch's Muon trains no such parameter."""
    import torch
    from safetensors.torch import load_file

    source, config = made(MUON_EXPERTS) / kind, ("--with-optimizer", "--config", made(MUON_EXPERTS) / "hf")
    ran = convert("hf2fsdp", source, tmp_path / "no", *config)
    refused(ran, 4, "mlp.experts.gate_up_proj [4, 96, 64] is one parameter there, and not one matrix that Muon trained")
    argv = ("hf2megatron", source, tmp_path / "run", *config, "--format", "torch_dist", "--lr", 0.01)
    ran = convert(*argv)
    assert (ran.code, "Muon trains on with --optimizer muon" in ran.err) == (0, True), ran.err
    assert "are one matrix on one side" not in ran.err
    refused(convert(*argv[:2], tmp_path / "ep2", *argv[3:], "--ep", 2), 4, "Muon of experts", "--ep 1")
    truth, prefix = load_file(made(MUON_EXPERTS) / f"{kind}.truth.safetensors"), "optimizer.state.momentum_buffer."
    ours = {
        key.removeprefix(f"{prefix}decoder.layers."): tensor
        for key, tensor in states(next((tmp_path / "run").glob("*/.metadata")).parent).items()
        for key in [key.removeprefix("fp32.")]
        if key.startswith(prefix)
    }
    assert len(ours) == 5
    for name, key in (
        ("mlp.experts.gate_up_proj", "mlp.experts.experts.linear_fc1.weight"),
        ("mlp.experts.down_proj", "mlp.experts.experts.linear_fc2.weight"),
        ("mlp.gate.weight", "mlp.router.weight"),
        ("self_attn.o_proj.weight", "self_attention.linear_proj.weight"),
    ):
        layers = [truth[f"momentum_buffer.model.layers.{layer}.{name}"].float() for layer in range(4)]
        assert torch.equal(ours[key], torch.stack(layers)), key


def model_file(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change what the model file says."""

    def edit(run: Path) -> None:
        import torch

        path = next(run.glob("*/mp_rank_00_model_states.pt"))
        stored = torch.load(path, weights_only=False)
        change(stored)
        torch.save(stored, path)

    return edit


def partition(change: Callable[[dict[str, Any]], Any], ranks: str = "*") -> Callable[[Path], None]:
    """Change what some ranks hold."""

    def edit(run: Path) -> None:
        import torch

        for path in run.glob(f"*/*zero_pp_rank_{ranks}_mp_rank_*_optim_states.pt"):
            stored = torch.load(path, weights_only=False)
            change(inner(stored))
            torch.save(stored, path)

    return edit


def shorter(stored: dict[str, Any]) -> None:
    """Fewer elements of momentum."""
    stored["state"][0]["momentum_buffer"] = stored["state"][0]["momentum_buffer"][:-50].clone()


FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "head by head": (
        model_file(lambda s: s["ds_config"]["optimizer"]["params"].update(per_head_muon=True)),
        ("was trained with per_head_muon",),
    ),
    "another method": (
        partition(lambda s: s["param_groups"][0].update(ns_method="polar")),
        ("ns_method = 'polar', which is not known",),
    ),
    "no momentum": (partition(lambda s: s["state"].pop(0)), ("holds no momentum_buffer",)),
    "no moments": (partition(lambda s: s["state"].pop(1)), ("holds no exp_avg",)),
    "more of a matrix": (
        partition(lambda s: s["state"][0].update(second=s["state"][0]["momentum_buffer"])), ("Muon keeps second",),
    ),
    "fewer elements": (partition(shorter), ("elements of momentum_buffer, and the matrices of which it has a part",)),
    "ranks with other methods": (
        partition(lambda s: s["param_groups"][0].update(ns_method="gram"), "1"),
        ("rank_1_mp_rank_00", "has ns_method = 'gram' in group 0", "rank_0_mp_rank_00", "has 'standard'"),
    ),
    "ranks with another momentum": (
        partition(lambda s: s["param_groups"][0].update(momentum=0.8), "2"),
        ("rank_2_mp_rank_00", "has momentum = 0.8 in group 0", "has 0.9"),
    ),
    "a rank is missing": (
        lambda run: next(run.glob("*/*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink(),
        ("data parallel ranks 1 of 3",),
    ),
    "ranks that differ": (
        partition(lambda s: s["state"][0]["momentum_buffer"].neg_(), "1"), ("replica", "copies"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_whole_muon_is_refused(made, convert, tmp_path, fault):
    change, says = FAULTS[fault]
    run = shutil.copytree(made(MUONS) / "zero1-fp32-muon", tmp_path / "run")
    change(run)
    ran = convert("hf2fsdp", run, tmp_path / "out", "--with-optimizer", "--config", made(MUONS) / "hf")
    assert ran.code > 2
    refused(ran, ran.code, *says)
    assert not (tmp_path / "out").exists()
    assert convert("zero2hf", run, tmp_path / "hf", "--config", made(MUONS) / "hf").code == 0, "the weights alone"


@pytest.mark.parametrize("kind", ["zero1-fp32-muon", "zero3-muon", "bf16-optimizer-muon"])
def test_moments_of_a_muon(made, convert, tmp_path, kind):
    """Nothing is frozen: of matrices there are others."""
    argv = ("zero2hf", made(MUONS) / kind, tmp_path / "out", "--config", made(MUONS) / "hf")
    refused(convert(*argv, "--weights", "exp_avg"), 4, "has no exp_avg of the matrices that Muon trains")
    assert convert(*argv, "--weights", "fp32-master").code == 0


def test_muon_of_neox_is_refused(convert, tmp_path):
    """Of GPT-NeoX none was seen."""
    run = shutil.copytree(NEOX, tmp_path / "run")

    def muon(stored: dict[str, Any]) -> None:
        group = stored["param_groups"][0]
        stored["param_groups"][0] = {"use_muon": True, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, **group}
        stored["param_groups"][0].pop("betas"), stored["param_groups"][0].pop("eps")
        stored["state"][0] = {"momentum_buffer": stored["state"][0]["exp_avg"]}

    partition(muon)(run)
    ran = convert("hf2fsdp", run, tmp_path / "out", "--with-optimizer", "--gqa-layout", "blocked", "--vocab-size", 101)
    refused(ran, 4, "was trained with Muon, which is read of models with Hugging Face names alone")
