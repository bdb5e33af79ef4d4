"""LoRA of experts between PEFT and Megatron-Bridge: checkpoints of Bridge 0.6.2 itself, and what is written for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from tests.faults.dcp_tools import edit, refused
from tests.golden.test_bridge_lora import REAL, contents

EXPORT = ("--adapter", "only")
QWEN = ("experts_lora_shared_ep2", "experts_lora_each_ep2", "experts_lora_outer", "experts_lora_0.5")
GLM = {"glm4_moe_lora_tp2": "fused", "glm4_moe_canonical_lora_tp2": "canonical"}
CHECKPOINTS = {**dict.fromkeys(QWEN, "fused"), **GLM}
"""Checkpoint of Bridge: how it is written again."""
WITHOUT_EXPERTS = {"experts_lora_outer": 2, "experts_lora_0.5": 4}
"""Checkpoint: how many of its tensors are factors of experts without an axis of experts."""
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture
def base_of(convert, tmp_path) -> Callable[[str], Path]:
    """The model that one of Bridge's adapters is of."""

    def base(name: str) -> Path:
        if name in GLM:
            return REAL / "glm4_moe"
        assert convert("megatron2hf", REAL / "qwen3_moe", tmp_path / "base").code == 0
        return tmp_path / "base"

    return base


def logits_of(base: Path, ids: Any, adapter: Path | None = None) -> Any:
    """What transformers computes of a model, with an adapter if there is one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        return (PeftModel.from_pretrained(model, adapter) if adapter else model)(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_there_and_back(convert, base_of, tmp_path, name):
    """PEFT computes what Bridge did, so does the merged model, and what is written has its tensors."""
    adapter, merged, run = tmp_path / "adapter", tmp_path / "merged", tmp_path / "run"
    base, golden = base_of(name), np.load(REAL / name / "golden.npz")
    assert convert("megatron2hf", REAL / name, adapter, *EXPORT).code == 0
    assert convert("merge", base, adapter, merged).code == 0
    largest = np.abs(golden["logits"]).max()
    assert np.abs(logits_of(base, golden["ids"]) - golden["logits"]).max() > 1
    assert np.abs(logits_of(base, golden["ids"], adapter) - golden["logits"]).max() < 4e-6 * largest
    assert np.abs(logits_of(merged, golden["ids"]) - golden["logits"]).max() < 4e-6 * largest

    tp = 2 if name.endswith("tp2") else 1
    options = ("--lora", CHECKPOINTS[name], "--tp", tp, "--iteration", 7)
    assert convert("peft2megatron", base, adapter, run, *options).code == 0
    ours, theirs = (
        {key: tensor for key, tensor in contents(place / "iter_0000007").items() if tensor is not None}
        for place in (run, REAL / name)
    )
    assert ours.keys() == theirs.keys()
    shared = [key for key in theirs if ".experts." in key and theirs[key].ndim < ours[key].ndim]
    assert len(shared) == WITHOUT_EXPERTS.get(name, 0)
    for key, tensor in theirs.items():
        axis = 1 if "layers.mlp" in key else 0
        each = np.broadcast_to(np.expand_dims(tensor, axis), ours[key].shape) if key in shared else tensor
        assert np.array_equal(ours[key], each), key
    said, wanted = (
        yaml.safe_load((place / "iter_0000007/run_config.yaml").read_text().replace("!!set", ""))
        for place in (run, REAL / name)
    )
    same = ("_target_", "dim", "alpha", "normalize_moe_lora")
    assert {key: said["peft"][key] for key in same} == {key: wanted["peft"][key] for key in same}
    assert said["peft"]["share_expert_adapters"] is False
    assert said["model"]["expert_tensor_parallel_size"] == 1

    assert convert("megatron2hf", run, tmp_path / "back", *EXPORT).code == 0
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (adapter / file).read_bytes()


def test_each_rank_of_experts_is_heeded(convert, tmp_path):
    """Where two expert parallel ranks had drifted apart, each expert has the factors of its rank."""
    assert convert("megatron2hf", REAL / QWEN[0], tmp_path / "adapter", *EXPORT).code == 0
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    lora_a = factors["base_model.model.model.layers.0.mlp.experts.lora_A.weight"].reshape(4, 4, -1)
    assert np.array_equal(lora_a[0], lora_a[1])
    assert np.array_equal(lora_a[2], lora_a[3])
    assert not np.array_equal(lora_a[1], lora_a[2])


def test_dense_layers_beside_experts(convert, tmp_path):
    """PEFT takes `gate_proj` in `target_modules` for experts, and leaves it out of dense layers and shared experts."""
    adapter, base = tmp_path / "adapter", REAL / "glm4_moe"
    assert convert("megatron2hf", REAL / "glm4_moe_lora_tp2", adapter, *EXPORT).code == 0
    file, path = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    save_file({key: factor for key, factor in load_file(file).items() if ".experts." not in key}, file)
    config, logits = json.loads(path.read_text()), {}
    names = [name for name in config["target_parameters"] if name.endswith(".weight")]
    modules = [name.removesuffix(".weight") for name in names]
    for kind, settings in {
        "parameters": {"target_parameters": names},
        "modules": {"target_parameters": None, "target_modules": [*config["target_modules"], *modules]},
        "attention alone": {"target_parameters": None},
    }.items():
        path.write_text(json.dumps({**config, **settings}))
        logits[kind] = logits_of(base, [[5, 9, 7, 11]], adapter)
    assert np.array_equal(logits["modules"], logits["attention alone"])
    assert np.abs(logits["modules"] - logits["parameters"]).max() > 1


def changed(name: str, tmp_path: Path, section: str, **fields: Any) -> Path:
    """A checkpoint of Bridge whose configuration says something else."""
    run = Path(shutil.copytree(REAL / name, tmp_path / f"{section}-{'-'.join(fields)}"))
    path = next(run.glob("iter_*/run_config.yaml"))
    config = yaml.safe_load(path.read_text().replace("!!set", ""))
    path.write_text(yaml.safe_dump({**config, section: {**config[section], **fields}}))
    return run


CHANGES: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "expert tensor parallel": (QWEN[1], "model", {"expert_tensor_parallel_size": 2}, 4, "#5634"),
    "as many as tensor parallel": (
        "glm4_moe_lora_tp2", "model", {"expert_tensor_parallel_size": None}, 4, "expert_tensor_parallel_size = 2",
    ),
    "shared experts that overlap": (
        "glm4_moe_lora_tp2", "model", {"moe_shared_expert_overlap": True}, 4, "moe_shared_expert_overlap",
    ),
    "gate and up by turns": (
        QWEN[1], "model", {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 8}, 4, "alternate",
    ),
    "a factor of the first rank": (QWEN[2], "model", {"expert_model_parallel_size": 2}, 4, "were not saved"),
    "an adapter of the first rank": (QWEN[3], "model", {"expert_model_parallel_size": 4}, 4, "were not saved"),
    "a size in quotes": (QWEN[1], "model", {"expert_tensor_parallel_size": "2"}, 3, "parallel_size = '2'"),
    "a field of no release": (QWEN[1], "peft", {"use_rslora": True}, 4, "use_rslora = True, which no Megatron-Bridge"),
    "no size": (QWEN[1], "model", {"tensor_model_parallel_size": [1]}, 3, "tensor_model_parallel_size = [1]"),
    "a rank of experts": (QWEN[0], "peft", {"normalize_moe_lora": True}, 3, "experts of rank 4"),
    "a rank for the experts of a token": (QWEN[1], "peft", {"normalize_moe_lora": False}, 3, "experts of rank 2"),
}  # fmt: skip
"""Checkpoint, section, fields, and what is said."""


@pytest.mark.parametrize("name", CHANGES)
def test_refused(convert, tmp_path, name):
    """What Bridge trained is no product of the factors, or cannot be told from them."""
    checkpoint, section, fields, code, message = CHANGES[name]
    refused(
        convert("megatron2hf", changed(checkpoint, tmp_path, section, **fields), tmp_path / "no", *EXPORT),
        code,
        message,
    )
    assert not (tmp_path / "no").exists()


def test_experts_that_are_not_grouped(convert, tmp_path):
    """CanonicalLoRA has a lora_A for the gate and one for up there."""
    run = shutil.copytree(REAL / QWEN[1], tmp_path / "run")

    def apart(stored: Any) -> None:
        def named(fqn: str) -> str:
            return fqn.replace("experts.linear_fc1.adapter.", "experts.linear_fc1.adapter.adapter_gate.")

        stored.state_dict_metadata = {named(fqn): about for fqn, about in stored.state_dict_metadata.items()}
        stored.storage_data = {replace(at, fqn=named(at.fqn)): info for at, info in stored.storage_data.items()}

    edit(run / "iter_0000007", apart)
    path = run / "iter_0000007/run_config.yaml"
    path.write_text(path.read_text().replace("lora.LoRA", "canonical_lora.CanonicalLoRA"))
    refused(convert("megatron2hf", run, tmp_path / "no", *EXPORT), 4, "CanonicalLoRA around experts", "gate_up_proj")


def adapter_of(base: Path, out: Path, ranks: tuple[int, int] = (4, 4), **fields: Any) -> Path:
    """An adapter that PEFT itself makes and saves, with random numbers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    pattern = dict.fromkeys(EXPERTS, ranks[1]) if ranks[0] != ranks[1] else {}
    settings = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": EXPERTS, **fields}
    wrapped = get_peft_model(model, LoraConfig(r=ranks[0], lora_alpha=6, rank_pattern=pattern, **settings))
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if "lora_" in name:
                tensor.normal_(0, 0.1, generator=dice)
    wrapped.save_pretrained(out)
    return out


MLPS = [f"{place}.{name}_proj.weight" for place in ("mlp", "shared_experts") for name in ("gate", "up", "down")]
FAMILIES = {
    "qwen3_moe": {}, "mixtral": {},
    "glm4_moe": {"target_parameters": [*EXPERTS, *MLPS]},
}  # fmt: skip
"""Model: the settings of its adapter."""


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_of_peft(model, convert, tmp_path, name):
    """What PEFT saved comes back bit for bit: experts, dense layers and shared experts are parameters to it."""
    folder, run, back = model(name), tmp_path / "run", tmp_path / "back"
    adapter = adapter_of(folder, tmp_path / "adapter", **FAMILIES[name])
    ran = convert("peft2megatron", folder, adapter, run)
    assert ran.code == 0, ran.err
    assert convert("megatron2hf", run, back, *EXPORT, "--config", folder).code == 0
    original, returned = (load_file(place / "adapter_model.safetensors") for place in (adapter, back))
    assert original.keys() == returned.keys()
    assert all(np.array_equal(original[key], returned[key]) for key in original)
    ids = [[5, 9, 7, 11, 3, 8]]
    assert np.array_equal(logits_of(folder, ids, adapter), logits_of(folder, ids, back))


def test_ranks_of_experts(model, convert, tmp_path):
    """Bridge has the rank of other matrices for experts too, or that divided by the experts of a token."""
    folder = model("qwen3_moe")
    half = adapter_of(folder, tmp_path / "half", (4, 2))
    config = json.loads((half / "adapter_config.json").read_text())
    for alpha, code in (6, 0), (3, 4):
        alphas = dict.fromkeys(EXPERTS, alpha)
        (half / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": alphas}))
        ran = convert("peft2megatron", folder, half, tmp_path / f"run{code}")
        assert ran.code == code, ran.err
    assert "Megatron-Bridge has one alpha" in ran.err
    other = adapter_of(folder, tmp_path / "other", (4, 3))
    refused(convert("peft2megatron", folder, other, tmp_path / "no"), 4, "for experts 3", "convert merge")
    alone = adapter_of(folder, tmp_path / "alone", target_modules=[])
    assert convert("peft2megatron", folder, alone, tmp_path / "alone_run", "--tp", 8).code == 0, "experts are not cut"
    assert convert("megatron2hf", tmp_path / "alone_run", tmp_path / "back", *EXPORT).code == 0
    assert json.loads((tmp_path / "back/adapter_config.json").read_text())["target_modules"] == []


@pytest.mark.parametrize("kind", ["fused", "canonical"])
def test_experts_without_shared_ones(convert, tmp_path, kind):
    """`linear_fc1` is in dense layers, experts and shared experts: what is of some of them is named by its place."""
    base, run = REAL / "glm4_moe", tmp_path / "run"
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["o_proj"])
    assert convert("peft2megatron", base, adapter, run, "--lora", kind).code == 0
    named = yaml.safe_load((run / "iter_0000000/run_config.yaml").read_text())["peft"]["target_modules"]
    gates = ["*.mlp.experts.*linear_fc1"] if kind == "fused" else [
        "*.mlp.experts.*linear_fc1_gate", "*.mlp.experts.*linear_fc1_up",
    ]  # fmt: skip
    assert named == ["linear_proj", *gates, "*.mlp.experts.*linear_fc2"]
    assert convert("megatron2hf", run, tmp_path / "back", *EXPORT).code == 0
    factors, returned = (load_file(place / "adapter_model.safetensors") for place in (adapter, tmp_path / "back"))
    assert factors.keys() == returned.keys()
    assert all(np.array_equal(factors[key], returned[key]) for key in factors)

    def without_experts(stored: Any) -> None:
        stored.state_dict_metadata = {
            fqn: about for fqn, about in stored.state_dict_metadata.items() if ".experts." not in fqn
        }
        stored.storage_data = {at: info for at, info in stored.storage_data.items() if ".experts." not in at.fqn}

    edit(run / "iter_0000000", without_experts)
    refused(convert("megatron2hf", run, tmp_path / "no", *EXPORT), 3, "holds no LoRA of linear_fc1")
