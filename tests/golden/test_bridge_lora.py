"""LoRA between PEFT and Megatron-Bridge: its own checkpoints, of two tensor ranks, and what is written for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import vitruvian
from formats.errors import UsageError
from formats.megatron import lora as bridge
from formats.megatron import lora_targets
from tests.faults.dcp_tools import edit, places, refused

REAL = Path(__file__).with_name("bridge")
KINDS = {"lora_tp2": "fused", "canonical_lora_tp2": "canonical"}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def base(convert, tmp_path) -> Path:
    """The model that Bridge's adapters are of."""
    assert convert("megatron2hf", REAL / "llama3_tied", tmp_path / "base").code == 0
    return tmp_path / "base"


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint of torch: tensors in one piece, and the names of objects."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    kinds = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(kind.size) for name, kind in kinds.items() if isinstance(kind, TensorStorageMetadata)}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {name: tensors[name].numpy() if name in tensors else None for name in kinds}


@pytest.mark.parametrize("name", KINDS)
def test_there_and_back(convert, base, tmp_path, name):
    """PEFT computes what Bridge did, and what is made of PEFT's files again has every tensor that Bridge saved."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter, run, golden = tmp_path / "adapter", tmp_path / "run", np.load(REAL / name / "golden.npz")
    ran = convert("megatron2hf", REAL / name, adapter, "--adapter", "only")
    assert ran.code == 0
    assert f'next: PeftModel.from_pretrained(BASE, "{adapter}"), ' in ran.out
    assert f"`convert merge BASE {adapter} OUT`" in ran.out
    assert convert("merge", base, adapter, tmp_path / "merged").code == 0
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(model, adapter)(torch.tensor(golden["ids"])).logits.numpy()
    assert np.abs(logits - golden["logits"]).max() < 5e-6 < np.abs(logits).max()

    options = ("--lora", KINDS[name], "--tp", 2, "--iteration", 7)
    assert convert("peft2megatron", base, adapter, run, *options).code == 0
    ours, theirs = (contents(place / "iter_0000007") for place in (run, REAL / name))
    assert ours.keys() == theirs.keys()
    assert all(tensor is None or np.array_equal(tensor, theirs[key]) for key, tensor in ours.items())
    ours, theirs = (
        yaml.safe_load((place / "iter_0000007/run_config.yaml").read_text()) for place in (run, REAL / name)
    )
    assert {key: ours["peft"][key] for key in theirs["peft"]} == theirs["peft"]
    assert ours["model"]["tensor_model_parallel_size"] == 2


def test_ranks_of_canonical(convert, base, tmp_path):
    """Gate and up are stored in halves of each rank: written for another number of ranks they are in another order."""
    rows: dict[int, Any] = {}
    assert convert("megatron2hf", REAL / "canonical_lora_tp2", tmp_path / "adapter", "--adapter", "only").code == 0
    for tp in (1, 2, 4):
        run = tmp_path / str(tp)
        assert convert("peft2megatron", base, tmp_path / "adapter", run, "--tp", tp).code == 0
        rows[tp] = contents(run / "iter_0000000")["decoder.layers.mlp.linear_fc1.adapter.adapter_up.linear_out.weight"]
        back = tmp_path / f"back{tp}"
        assert convert("megatron2hf", run, back, "--adapter", "only").code == 0
        assert (back / "adapter_model.safetensors").read_bytes() == (
            tmp_path / "adapter/adapter_model.safetensors"
        ).read_bytes()
    for tp in (2, 4):  # as `apply_swiglu_sharded_factory` puts the two halves of each rank
        parts = np.split(rows[1], tp, axis=1)
        halves = [np.split(part, 2, axis=1)[half] for half in (0, 1) for part in parts]
        assert np.array_equal(rows[tp], np.concatenate(halves, axis=1))
        assert not np.array_equal(rows[tp], rows[1])


def adapter_of(base: Path, out: Path, modules: list[str], shared: bool = False, **fields: Any) -> Path:
    """An adapter of random numbers with the names that PEFT would give it."""
    shapes = {key: tensor.shape for key, tensor in load_file(base / "model.safetensors").items()}
    dice, tensors = np.random.default_rng(5), {}
    for key, shape in shapes.items():
        if f".{key}".endswith(tuple(f".{name}.weight" for name in modules)):
            module = "base_model.model." + key.removesuffix(".weight")
            seeded = np.random.default_rng(9) if shared else dice
            tensors[f"{module}.lora_A.weight"] = seeded.normal(size=(4, shape[1])).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = dice.normal(size=(shape[0], 4)).astype(np.float32)
    out.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": modules, "bias": "none", **fields}
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    return out


CASES = {
    "llama": (LLAMA, "canonical", 2),
    "qwen3_moe": (["q_proj", "k_proj", "v_proj", "o_proj"], "canonical", 2),
    "ernie4_5": (LLAMA, "canonical", 2),
    "phi3": (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "fused", 2),
    "starcoder2": (["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"], "fused", 1),
    "phi3 without fused matrices": (["o_proj", "down_proj"], "canonical", 2),
}
"""Model, first: the modules that are changed, how they are written, and for how many ranks."""


@pytest.mark.parametrize("name", CASES)
def test_families(model, convert, tmp_path, name):
    """Heads in groups, rows that turn by neighbours, fused and ungated matrices: the factors come back bit for bit."""
    modules, kind, tp = CASES[name]
    folder, run, back = model(name.split()[0]), tmp_path / "run", tmp_path / "back"
    adapter = adapter_of(folder, tmp_path / "adapter", modules, kind == "fused")
    ran = convert("peft2megatron", folder, adapter, run, "--lora", kind, "--tp", tp)
    assert ran.code == 0, ran.err
    assert convert("megatron2hf", run, back, "--adapter", "only", "--config", folder).code == 0
    original, returned = (load_file(place / "adapter_model.safetensors") for place in (adapter, back))
    assert original.keys() == returned.keys()
    assert all(np.array_equal(original[key], returned[key]) for key in original)
    config = json.loads((back / "adapter_config.json").read_text())
    assert {*config["target_modules"]} == {*modules}
    assert (config["r"], config["lora_alpha"]) == (4, 6)


def test_an_adapter_of_zeros_beside_two(model, convert, tmp_path):
    """PEFT's usual targets: CanonicalLoRA has one of the key too, which adds nothing and is not trained."""
    folder, run = model("llama"), tmp_path / "run"
    adapter = adapter_of(folder, tmp_path / "adapter", ["q_proj", "v_proj"])
    assert convert("peft2megatron", folder, adapter, run).code == 0
    tensors = contents(run / "iter_0000000")
    keys = [key for key, tensor in tensors.items() if tensor is not None and not tensor.any()]
    place = "decoder.layers.self_attention.linear_qkv.adapter.adapter_k."
    assert sorted(keys) == [f"{place}linear_in.weight", f"{place}linear_out.weight"]
    assert convert("megatron2hf", run, tmp_path / "back", "--adapter", "only").code == 0
    original, returned = (load_file(place / "adapter_model.safetensors") for place in (adapter, tmp_path / "back"))
    assert all(np.array_equal(original[key], returned.pop(key)) for key in original)
    assert returned
    assert all("k_proj" in key and not tensor.any() for key, tensor in returned.items())


def test_what_bridge_has_not(model, convert, tmp_path):
    folder = model("llama")
    adapter = adapter_of(folder, tmp_path / "adapter", LLAMA)
    fused = ("--lora", "fused")
    ran = convert("peft2megatron", folder, adapter, tmp_path / "no", *fused)
    refused(ran, 6, "q_proj.lora_A.weight differs", "--lora canonical")
    assert "--replicas" not in ran.err
    refused(convert("peft2megatron", folder, adapter, tmp_path / "no", *fused, "--replicas", "first"), 2, "canonical")
    refused(convert("peft2megatron", folder, adapter, tmp_path / "no", "--tp", 8), 4, "does not divide", "tp = 8")
    some = adapter_of(folder, tmp_path / "some", ["q_proj", "v_proj"], shared=True)
    refused(convert("peft2megatron", folder, some, tmp_path / "no", *fused), 4, "none of key", "--lora canonical")
    ranks = adapter_of(folder, tmp_path / "ranks", ["o_proj"], alpha_pattern={"layers.1.self_attn.o_proj": 3})
    refused(convert("peft2megatron", folder, ranks, tmp_path / "no"), 4, "2 ranks and scales")
    partial = adapter_of(folder, tmp_path / "one", ["layers.1.self_attn.o_proj"])
    message = "has no LoRA of model.layers.0.self_attn.o_proj"
    refused(convert("peft2megatron", folder, partial, tmp_path / "no"), 4, message, "in every layer", "convert merge")
    fused_matrix = adapter_of(model("phi3"), tmp_path / "qkv", ["qkv_proj"])
    refused(convert("peft2megatron", model("phi3"), fused_matrix, tmp_path / "no"), 4, "--lora fused")
    head = adapter_of(folder, tmp_path / "head", ["lm_head", "o_proj"])
    refused(convert("peft2megatron", folder, head, tmp_path / "no"), 4, "lm_head", "convert merge")
    plain = model("starcoder2")
    adapter = adapter_of(plain, tmp_path / "plain", ["c_fc"])
    refused(convert("peft2megatron", plain, adapter, tmp_path / "no", "--tp", 2, *fused), 4, "no gate", "--tp 1")
    for name, code, message in (("gemma2", 4, "gemma2"), ("granite", 4, "granite"), ("olmo2", 4, "olmo2")):
        adapter = adapter_of(model(name), tmp_path / name, ["q_proj", "k_proj", "v_proj"])
        refused(convert("peft2megatron", model(name), adapter, tmp_path / "no"), code, message)
    for name, code, hint in [
        ("deepseek_v2", 5, "convert merge"),
        ("bloom", 4, "formats"),
        ("gemma4_text", 4, "formats"),
    ]:
        adapter = adapter_of(model(name), tmp_path / name, ["o_proj", "query_key_value"])
        ran = convert("peft2megatron", model(name), adapter, tmp_path / "no")
        refused(ran, code, "Megatron", hint)
        assert "--for bridge" not in ran.err
    refused(convert("inspect", REAL / "lora_tp2"), 4, "--adapter only")
    refused(convert("megatron2hf", REAL / "llama3_tied", tmp_path / "no", "--adapter", "only"), 2, "holds no adapter")
    with pytest.raises(UsageError, match="holds no base"):
        vitruvian.convert(REAL / "lora_tp2", tmp_path / "no", adapter="merged")


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_that_lost_a_part(convert, tmp_path, name):
    """Megatron-Bridge#2240 saves one tensor rank's rows of it, NeMo-RL#2234 loaded none: it is whole or refused.

    A module that is missing as a whole is seen by `target_modules`, which the recipe of this run did not set.
    """
    run = shutil.copytree(REAL / name, tmp_path / "run")
    folder, key = run / "iter_0000007", "decoder.layers.self_attention.linear_proj.adapter.linear_out.weight"
    path, metadata = folder / "run_config.yaml", (folder / ".metadata").read_bytes()
    config = yaml.safe_load(path.read_text())
    targets = [*dict.fromkeys(kinds[KINDS[name]] for kinds in bridge.TARGETS.values())]
    path.write_text(yaml.safe_dump(config | {"peft": {**config["peft"], "target_modules": targets}}))
    export = ("megatron2hf", run, "--adapter", "only")
    assert convert(*export[:2], tmp_path / "whole", *export[2:]).code == 0

    def half(stored: Any) -> None:
        about = stored.state_dict_metadata[key]
        about.chunks = [chunk for chunk in about.chunks if not chunk.offsets[1]]
        for index, _ in places(stored, key):
            if index.offset[1]:
                del stored.storage_data[index]

    def without(end: str) -> Any:
        def change(stored: Any) -> None:
            for fqn in [fqn for fqn in stored.state_dict_metadata if f"linear_proj.adapter.{end}" in fqn]:
                stored.state_dict_metadata.pop(fqn)
            for index in [index for index in stored.storage_data if index.fqn not in stored.state_dict_metadata]:
                del stored.storage_data[index]

        return change

    for change, message in (
        (half, f"128 of the 256 elements of {key}"),
        (without("linear_out"), "2 tensors are missing"),
        (without("linear_"), "holds no LoRA of linear_proj, which its target_modules name"),
    ):
        (folder / ".metadata").write_bytes(metadata)
        edit(folder, change)
        refused(convert(*export[:2], tmp_path / "no", *export[2:]), 3, message)


LOST = {
    "*": ("lora_tp2", "self_attention.linear_proj.", "linear_proj"),
    "*.mlp.*": ("canonical_lora_tp2", "mlp.linear_fc1.adapter.adapter_up.", "linear_fc1_up"),
    "*.layers.0.*linear_fc1": ("glm4_moe_lora_tp2", "layers.0.mlp.linear_fc1.", "linear_fc1"),
    "*.layers.[0-3].*_fc2": ("glm4_moe_lora_tp2", "shared_experts.linear_fc2.", "linear_fc2"),
}
"""Pattern in `target_modules`: a checkpoint, the matrices that it loses, and their name there."""


@pytest.mark.parametrize("pattern", LOST)
def test_an_adapter_that_lost_what_a_wildcard_names(convert, tmp_path, pattern):
    name, matrix, target = LOST[pattern]
    run = shutil.copytree(REAL / name, tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text().replace("!!set", ""))
    given = [pattern, "*.self_attention.*", "*.mlp.*"]
    path.write_text(yaml.safe_dump(config | {"peft": {**config["peft"], "target_modules": given}}))
    export = ("megatron2hf", run, "--adapter", "only")
    assert convert(*export[:2], tmp_path / "whole", *export[2:]).code == 0
    path.write_text(yaml.safe_dump(config | {"peft": {**config["peft"], "target_modules": [pattern]}}))

    def without(stored: Any) -> None:
        stored.state_dict_metadata = {
            fqn: about for fqn, about in stored.state_dict_metadata.items() if matrix not in fqn
        }
        stored.storage_data = {at: info for at, info in stored.storage_data.items() if matrix not in at.fqn}

    edit(path.parent, without)
    ran = convert(*export[:2], tmp_path / "no", *export[2:])
    refused(ran, 3, f"holds no LoRA of {target}, which its target_modules name")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("pattern", ["*.(linear_qkv|linear_proj)", "*.linear_[a-z]+", "(a*)*b"])
def test_patterns_of_other_lengths(convert, tmp_path, pattern):
    run = shutil.copytree(REAL / "lora_tp2", tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config | {"peft": config["peft"] | {"target_modules": [pattern]}}))
    ran = convert("megatron2hf", run, tmp_path / "no", "--adapter", "only")
    assert ran.code in (3, 4), ran.err
    assert "target_modules of its peft" in ran.err


def test_a_pattern_takes_no_time():
    """A regular expression with forty `.*` tries more places than there is time for."""
    assert not lora_targets._matches("*l" * 40 + "*x", "l" * 300)
    assert lora_targets._matches("*l" * 40 + "*x", "l" * 300 + "x")


def test_an_adapter_that_is_not_finite(convert, base, tmp_path):
    adapter = tmp_path / "adapter"
    assert convert("megatron2hf", REAL / "lora_tp2", adapter, "--adapter", "only").code == 0
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(tensor for key, tensor in tensors.items() if "lora_B" in key)[1, 2] = np.nan
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    ran = convert("peft2megatron", base, adapter, tmp_path / "no", "--lora", "canonical")
    refused(ran, 5, "NaN or infinity")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("place", ["mlp.router", "mlp.experts.experts", "cross_attention"])
def test_an_adapter_of_other_modules(convert, tmp_path, place):
    """A router, experts of a model that has none, and what the model has not."""
    run = shutil.copytree(REAL / "lora_tp2", tmp_path / "run")

    def of_others(stored: Any) -> None:
        def named(fqn: str) -> str:
            return fqn.replace("mlp.linear_fc2.adapter", f"{place}.linear_fc2.adapter")

        stored.state_dict_metadata = {named(fqn): about for fqn, about in stored.state_dict_metadata.items()}
        stored.storage_data = {replace(at, fqn=named(at.fqn)): info for at, info in stored.storage_data.items()}

    edit(run / "iter_0000007", of_others)
    ran = convert("megatron2hf", run, tmp_path / "no", "--adapter", "only")
    refused(ran, 3, f"{place}.linear_fc2.adapter", "adapters of attention, MLPs and experts are read")
    assert not (tmp_path / "no").exists()


def test_another_method(convert, tmp_path):
    run = shutil.copytree(REAL / "lora_tp2", tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    for change, code, message in (
        ({"_target_": "megatron.bridge.peft.dora.DoRA"}, 4, "dora.DoRA"),
        ({"dim": 8}, 3, "rank 4", ),
    ):  # fmt: skip
        path.write_text(yaml.safe_dump(config | {"peft": config["peft"] | change}))
        refused(convert("megatron2hf", run, tmp_path / "no", "--adapter", "only"), code, message)


LEFT_OUT = {
    "names": {"target_modules": ["linear_qkv"]},
    "of CanonicalLoRA": {"target_modules": ["linear_q", "linear_proj", "linear_fc1_up", "linear_fc2"]},
    "a layer": {"target_modules": ["*.layers.0.*.linear_*"]},
    "a place": {"target_modules": ["*.self_attention.*"]},
    "excluded": {"exclude_modules": ["linear_proj"]},
    "an excluded place": {"exclude_modules": ["*.layers.1.mlp.linear_fc2"]},
}
"""Settings that leave out modules with a LoRA."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("case", LEFT_OUT)
def test_modules_that_the_settings_leave_out(convert, tmp_path, name, case):
    run = shutil.copytree(REAL / name, tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config | {"peft": config["peft"] | LEFT_OUT[case]}))
    ran = convert("megatron2hf", run, tmp_path / "no", "--adapter", "only")
    refused(ran, 3, "modules that its config leaves out")
    assert not (tmp_path / "no").exists()


ALL_LAYERS = [f"*.layers.{layer}.*" for layer in (0, 1)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": None},
        {"target_modules": []},
        {"target_modules": ["*"]},
        {"target_modules": ALL_LAYERS, "exclude_modules": ["linear_router", "*.cross_attention.*"]},
    ],
    ids=["null", "empty", "all", "layers"],
)
def test_modules_that_wildcards_name(convert, tmp_path, name, change):
    run = shutil.copytree(REAL / name, tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config | {"peft": config["peft"] | change}))
    ran = convert("megatron2hf", run, tmp_path / "adapter", "--adapter", "only")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("value", ["linear_qkv", [3], [["linear_qkv"]], ["*("]], ids=str)
def test_targets_that_are_no_names(convert, tmp_path, value):
    run = shutil.copytree(REAL / "lora_tp2", tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config | {"peft": config["peft"] | {"target_modules": value}}))
    refused(convert("megatron2hf", run, tmp_path / "no", "--adapter", "only"), 3, "target_modules of its peft")


def test_layers_of_pipeline_stages_count_from_zero(convert, tmp_path):
    """A pattern of layer 0 names the first layer of each stage."""
    run = shutil.copytree(REAL / "lora_tp2", tmp_path / "run")
    path = run / "iter_0000007/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["peft"]["target_modules"] = ["*.layers.0.*"]
    for stages, code in ((2, 0), (1, 3)):
        config["model"]["pipeline_model_parallel_size"] = stages
        path.write_text(yaml.safe_dump(config))
        ran = convert("megatron2hf", run, tmp_path / f"out{stages}", "--adapter", "only")
        assert (ran.code, "leaves out" in ran.err) == (code, code == 3), ran.err
