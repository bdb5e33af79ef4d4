"""--quantize fp8-block: the bits of transformers' own quantizer, in folders that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from converters.move.quantize import to_e4m3
from converters.plan import quantizing
from formats.checkpoint import Checkpoint
from formats.disk.safetensors import Fragment, row_major
from formats.errors import RefusedError, UnsupportedError
from formats.huggingface import HUGGINGFACE
from formats.huggingface.config import from_huggingface
from formats.huggingface.folder import model_slots
from formats.layout.placed import match
from formats.layout.slots import ALONE
from tests.faults.dcp_tools import refused
from tests.models import MODELS as TINY
from tests.models import family_of, settings_of

SIZES = {"hidden_size": 256, "head_dim": 64, "vocab_size": 300}
MODELS = {
    "llama": SIZES | {"intermediate_size": 384},
    "qwen3_moe": SIZES | {"moe_intermediate_size": 128, "intermediate_size": 200},
}
"""Some of whose matrices have whole blocks of 128 x 128, and some not."""

IN_ONE_TENSOR = ("gemma4_text_moe", "gpt_oss", "granitemoe", "granitemoehybrid", "llama4_text", "minimax_m3_vl_text")
REFUSED = {
    **dict.fromkeys(IN_ONE_TENSOR, "experts in one tensor"),
    **dict.fromkeys(("falcon", "falcon_11b", "falcon_40b"), "are FalconLinear"),
    "gpt2": "are Conv1D", "mamba2": "no linear layer of whole blocks",
}  # fmt: skip


def theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, quantized by transformers."""
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    changed = {}
    for name, tensor in tensors.items():
        linear = name.endswith("_proj.weight")
        changed |= quantizer.convert({name: tensor}) if linear else {name: tensor}
    return changed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_writes_what_transformers_quantizes(name, dtype, model, convert, tmp_path):
    source = model(name, dtype, **MODELS[name])
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][:128, :128] = 0  # a block of zeros
    folder = shutil.copytree(source, tmp_path / "hf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ran = convert("hf2hf", folder, tmp_path / "out", "--quantize", "fp8-block", "--memory", "200KB")
    assert ran.code == 0, ran.err
    written, expected = load_file(tmp_path / "out/model.safetensors"), theirs(tensors)
    assert written.keys() == expected.keys()
    count = sum(key.endswith("_scale_inv") for key in written)
    assert 8 < count < len(tensors)
    for key, tensor in expected.items():
        assert written[key].dtype == tensor.dtype, key
        assert torch.equal(written[key].view(torch.uint8), tensor.view(torch.uint8)), key
    plan = json.loads(convert("hf2hf", folder, tmp_path / "plan", "--quantize", "fp8-block", "-n", "--json").out)
    assert plan["edges"] == {"quantize to FP8 by blocks": 2 * count}
    assert convert("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it(name, model, convert, tmp_path):
    source = model(name, "bfloat16", **MODELS[name])
    assert convert("hf2hf", source, tmp_path / "out", "--quantize", "fp8-block").code == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert "lm_head" in config["quantization_config"]["modules_to_not_convert"]
    # in BF16, as on every machine without a kernel for FP8
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert convert("hf2hf", tmp_path / "out", tmp_path / "back").code == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, back(tokens).logits)


@pytest.mark.parametrize("name", {family_of(name).name: name for name in TINY}.values())
def test_transformers_replaces_what_is_quantized_and_nothing_else(name, monkeypatch):
    """Of each family, tied where it can be, on the meta device: what it replaces it computes with scales on a GPU."""
    monkeypatch.setattr(quantizing, "BLOCK", (8, 8))
    settings = settings_of(name)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    spec = from_huggingface(config.to_dict() | settings, {}, "config.json")
    shapes = {slot.keys[0]: slot.shape for slot in model_slots(spec) if "optional" not in slot.rule.conditions}
    fragments = {key: Fragment(Path("hf"), 0, "BF16", shape, row_major(shape)) for key, shape in shapes.items()}
    tensors, _ = match(model_slots(spec), {ALONE: fragments}, (), Path("hf"))
    source = Checkpoint(Path("hf"), Path("hf"), HUGGINGFACE.name, spec, tuple(tensors), (), (), config=config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {type(module).__name__ for module in model.modules()} & {"Conv1D", "FalconLinear"}
    assert linear == {family_of(name).linear} - {""}
    if message := REFUSED.get(family_of(name).name):
        with pytest.raises((RefusedError, UnsupportedError), match=message):
            quantizing.quantized(source)
        return
    assert not linear
    checkpoint, quantization = quantizing.quantized(source)
    written = {placed.key for placed in checkpoint.tensors}
    coded = {
        (tensor, placed.slot.layer)
        for placed in tensors if f"{placed.key}_scale_inv" in written for tensor in placed.slot.rule.pattern.tensors
    }  # fmt: skip
    modules = {
        slot.keys[0].rpartition(".")[0]
        for slot in model_slots(spec, memory=True)
        if len(slot.shape) > 1 and not coded.isdisjoint((tensor, slot.layer) for tensor in slot.rule.pattern.tensors)
    }
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config.from_dict(quantization))
    quantizer._process_model_before_weight_loading(model)
    replaced = {key for key, module in model.named_modules() if isinstance(module, (FP8Linear, FP8Experts))}
    assert replaced == modules


def test_every_float_becomes_the_byte_that_torch_gives():
    random = np.random.default_rng(0)
    words = random.integers(0, 1 << 32, 1 << 18, np.uint32)
    values = np.concatenate([words.view(np.float32), random.normal(0, 100, 1 << 16).astype(np.float32)])
    bytes_of_e4m3 = np.arange(256, dtype=np.uint8)
    exact = torch.from_numpy(bytes_of_e4m3).view(torch.float8_e4m3fn).float().numpy()
    between = (exact[:126] + exact[1:127]) / 2
    values = np.concatenate([values, exact, between, -between, np.nextafter(between, 0, dtype=np.float32)])
    values = np.clip(values[np.isfinite(values)], -448, 448).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_e4m3(values), expected)


@pytest.mark.parametrize(
    ("name", "options", "code", "message"),
    [
        ("llama", ["--dtype", "fp32"], 2, "--quantize fp8-block and --dtype contradict each other"),
        ("llama", ["--verbatim"], 4, "cannot be quantized: --verbatim"),
        ("gpt_oss", [], 4, "experts in one tensor"),
        ("gpt2", [], 4, "the linear layers of gpt2 are Conv1D, and transformers replaces nn.Linear alone"),
    ],
)
def test_what_cannot_be_quantized_is_refused(name, options, code, message, model, convert, tmp_path):
    source = model(name, "bfloat16", **MODELS.get(name, {}))
    refused(convert("hf2hf", source, tmp_path / "out", "--quantize", "fp8-block", *options), code, message)


def test_a_model_without_whole_blocks(model, convert, tmp_path):
    ran = convert("hf2hf", model("llama", "bfloat16"), tmp_path / "out", "--quantize", "fp8-block")
    refused(ran, 5, "has no linear layer of whole blocks of 128 x 128")


def test_a_weight_that_is_no_number(model, convert, tmp_path):
    folder = shutil.copytree(model("llama", "bfloat16", **MODELS["llama"]), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ran = convert("hf2hf", folder, tmp_path / "out", "--quantize", "fp8-block")
    refused(ran, 5, "a weight is NaN or infinite")
    assert not (tmp_path / "out").exists()


def test_a_block_without_a_finite_factor_is_zeros(model, convert, tmp_path):
    """448 divided by its largest element is infinite."""
    source = shutil.copytree(model("llama", "float32", hidden_size=128, intermediate_size=128), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 1e-37)
    tensors[name][0, 0] = 0
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ran = convert("hf2hf", source, tmp_path / "out", "--quantize", "fp8-block")
    assert ran.code == 0, ran.err
    assert convert("hf2hf", tmp_path / "out", tmp_path / "back").code == 0
    assert not load_file(tmp_path / "back/model.safetensors")[name].any()
