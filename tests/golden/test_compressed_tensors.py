"""Models as llm-compressor publishes them: packed by compressed-tensors itself, read as transformers reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.huggingface.compressed_tensors import FORMATS
from tests.faults.dcp_tools import refused
from tests.golden.test_quantized import LINEAR, same_model

pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BLOCKS = FP8 | {"strategy": "block", "block_structure": [24, 40]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

CASES = {
    "INT4, as Kimi K2": ("deepseek_v3", "pack-quantized", INT4),
    "INT4 by rows": ("qwen3", "pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
    "INT8 in words": ("llama", "pack-quantized", INT8),
    "INT8": ("llama", "int-quantized", INT8),
    "FP8 by rows": ("mistral", "float-quantized", FP8),
    "FP8 whole": ("qwen3", "float-quantized", FP8 | {"strategy": "tensor"}),
    "FP8 by blocks": ("llama", "float-quantized", BLOCKS),
    "NVFP4": ("qwen3", "nvfp4-pack-quantized", NVFP4),
    "MXFP4": ("llama", "mxfp4-pack-quantized", MXFP4),
    "MXFP8": ("qwen3", "mxfp8-quantized", MXFP8),
}


def quantized(source: Path, folder: Path, form: str, weights: dict[str, Any], *, whole_words: bool = True) -> Path:
    """A copy of a model whose linear layers compressed-tensors has quantized and packed."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    shutil.copytree(source, folder)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    random = torch.Generator().manual_seed(1)
    tensors, ignored = {}, ["lm_head"]
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith(LINEAR) or tensor.shape[1] % (weights.get("group_size") or 8**whole_words):
            tensors[name] = tensor
            ignored += [module] if name.endswith(LINEAR) else []
            continue
        state = {"weight": tensor, "weight_scale": scale_of(tensor, form, weights, random)}
        if form.startswith("nvfp4"):
            state["weight_global_scale"] = torch.rand(1, generator=random) * 900 + 100
        packed = compressor.compress(state, scheme)
        tensors |= {f"{module}.{key}": value.contiguous() for key, value in packed.items() if value is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    rewrite(folder, {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignored,
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": None,
        "sparsity_config": {"format": "dense", "global_sparsity": 0.5, "sparsity_structure": "2:4"},
        "transform_config": {}, "version": "0.20.0", "dequantize": True,
    })  # fmt: skip
    return folder


def scale_of(tensor: torch.Tensor, form: str, weights: dict[str, Any], random: torch.Generator) -> torch.Tensor:
    """Scales that leave some elements of each kind: as a quantizer finds them, but for their exact values."""
    rows, columns = tensor.shape
    high, wide = {
        "tensor": (rows, columns), "channel": (1, columns), "block": weights.get("block_structure"),
    }.get(weights["strategy"], (1, weights.get("group_size")))  # fmt: skip
    grid = (-(-rows // high), -(-columns // wide))
    scale = (torch.rand(grid, generator=random) + 0.5) * tensor.abs().max() / {4: 6, 8: 100}[weights["num_bits"]]
    if form.startswith("mx"):
        return torch.exp2(torch.floor(torch.log2(scale)))
    if form.startswith("nvfp4"):
        return (scale * 500).to(torch.float8_e4m3fn).float()
    return (scale.reshape(1) if weights["strategy"] == "tensor" else scale).to(tensor.dtype)


def rewrite(folder: Path, quantization: dict[str, Any] | None) -> None:
    """Say in a folder's config.json how its weights are quantized."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.fixture(scope="module")
def kimi(model, tmp_path_factory):
    return quantized(model("deepseek_v3", "bfloat16"), tmp_path_factory.mktemp("kimi") / "hf", "pack-quantized", INT4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_transformers_reads(case, dtype, model, convert, tmp_path):
    name, form, weights = CASES[case]
    if dtype == "float16" and FORMATS[form, weights["type"], weights["num_bits"]].scales:
        pytest.skip("its scales have a type of their own, whatever that of the model is")
    source = quantized(model(name, dtype), tmp_path / "hf", form, weights)
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    count = sum(key.endswith(".weight_scale") for key in load_file(source / "model.safetensors"))
    assert count > 10
    assert f"{count} tensors of " in ran.err
    assert f"are read as {'F16' if dtype == 'float16' else 'BF16'}, " in ran.err
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    same_model(source, tmp_path / "out", getattr(torch, dtype))
    assert (
        convert("digest", source, "-j", 3, "--memory", "200KB").out.split()[0]
        == (convert("digest", tmp_path / "out").out.split()[0])
    )


@pytest.mark.parametrize(("width", "bits"), [(100, 4), (101, 4), (101, 8)])
def test_the_last_word_of_a_row_may_be_in_part_padding(model, convert, tmp_path, width, bits):
    """`down_proj` has rows of `width` columns, in words of 8 or 4: what is read is what compressed-tensors unpacks."""
    weights = {**INT4, "num_bits": bits, "strategy": "channel", "group_size": None}
    plain = model("llama", "bfloat16", intermediate_size=width)
    source = quantized(plain, tmp_path / "hf", "pack-quantized", weights, whole_words=False)
    packed = load_file(source / "model.safetensors")["model.layers.0.mlp.down_proj.weight_packed"]
    assert packed.shape[1] * 32 // bits > width
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    same_model(source, tmp_path / "out")
    assert convert("hf2fsdp", source, tmp_path / "fsdp").code == 0
    assert convert("verify", tmp_path / "fsdp", tmp_path / "out").code == 0


def test_groups_of_rows_that_end_within_a_word_are_refused(model, convert, tmp_path):
    plain = model("llama", "bfloat16", intermediate_size=100)
    source = quantized(plain, tmp_path / "hf", "pack-quantized", INT4 | {"group_size": 4})
    message = "of 100 columns, end within a word of 8, and scales are by groups"
    refused(convert("hf2hf", source, tmp_path / "out"), 4, "down_proj.weight_packed", message)


def test_it_goes_to_megatron_and_back(kimi, convert, tmp_path):
    assert convert("hf2megatron", kimi, tmp_path / "m", "--ep", 2, "--tp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    same_model(kimi, tmp_path / "back")


def test_scales_of_activations_are_left_out(model, convert, tmp_path):
    source = quantized(model("mistral", "bfloat16"), tmp_path / "hf", "float-quantized", FP8)
    tensors = load_file(source / "model.safetensors")
    for key in [key for key in tensors if key.endswith("k_proj.weight_scale")]:
        tensors[key.replace("weight_scale", "input_scale")] = torch.ones(1, dtype=torch.bfloat16)
        tensors[key.replace("k_proj.weight_scale", "k_scale")] = torch.ones(1, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "without 8 scales of activations" in ran.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "mixed-precision"}, "mixed-precision with weights of type int and 4 bits is not supported"),
        ({"weights": {"symmetric": False}}, "weights with symmetric = False are not supported"),
        ({"weights": {"actorder": "group"}}, "weights with actorder = 'group' are not supported"),
        ({"weights": {"num_bits": 3}}, "pack-quantized with weights of type int and 3 bits is not supported"),
        ({"weights": {"group_size": 0}}, "scales by group of 0 are not supported"),
        ({"weights": {"rotated": True}}, "weights with rotated = True are not supported"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config = "),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config = "),
        ({"config_groups": {}}, "without a format and groups is not supported"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "a group without weights is not supported"),
    ],
)
def test_what_is_not_understood_is_refused(change, message, kimi, convert, tmp_path):
    folder = shutil.copytree(kimi, tmp_path / "hf")
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantization["config_groups"]["group_0"]["weights"] |= change.get("weights", {})
    rewrite(folder, quantization | {key: value for key, value in change.items() if key != "weights"})
    refused(convert("hf2hf", folder, tmp_path / "out"), 4, message, "--verbatim")
    assert convert("hf2hf", folder, tmp_path / "kept", "--verbatim").code == 0


def test_a_config_that_names_no_quantization(kimi, convert, tmp_path):
    folder = shutil.copytree(kimi, tmp_path / "hf")
    rewrite(folder, None)
    refused(convert("inspect", folder), 3, "_proj.weight_scale, and config.json beside it no quantization_config")


def test_weights_of_several_kinds_are_refused(kimi, convert, tmp_path):
    folder = shutil.copytree(kimi, tmp_path / "hf")
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantization["config_groups"]["group_1"] = {"format": "float-quantized", "targets": ["re:.*mlp.*"], "weights": FP8}
    rewrite(folder, quantization)
    refused(convert("hf2hf", folder, tmp_path / "out"), 4, "weights of several kinds (FP8 and INT4)")


def test_a_weight_that_is_there_twice(kimi, convert, tmp_path):
    folder = shutil.copytree(kimi, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(convert("hf2hf", folder, tmp_path / "out"), 3, "o_proj.weight is there too")


def test_a_second_scale_that_int4_has_not(kimi, convert, tmp_path):
    """NVFP4 has one for a whole matrix, by which its scales are divided."""
    folder = shutil.copytree(kimi, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_global_scale"] = torch.tensor([2.0])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(convert("hf2hf", folder, tmp_path / "out"), 4, "o_proj.weight_global_scale, which INT4 has no use for")


def test_scales_of_weights_in_floats(model, convert, tmp_path):
    """As they are while a model is calibrated: what it computes is rounded as it runs."""
    folder = quantized(model("llama", "bfloat16"), tmp_path / "hf", "float-quantized", FP8)
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: value.bfloat16() if value.itemsize == 1 else value for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(convert("hf2hf", folder, tmp_path / "out"), 4, "weight_scale for BF16, not F8_E4M3")


@pytest.mark.parametrize(
    ("ending", "change", "code", "message"),
    [
        ("o_proj.weight_scale", lambda tensor: None, 3, "weight_packed, and no file its"),
        ("o_proj.weight_scale", lambda tensor: tensor[:, :-1], 3, "its elements imply BF16["),
        ("o_proj.weight_scale", lambda tensor: tensor.double(), 4, "is F64, not F32 or BF16 or F16"),
        ("o_proj.weight_scale", lambda tensor: tensor.half() * 0 + 6e4, 5, "weight_scale are too large for F16"),
        ("o_proj.weight_scale", lambda tensor: tensor * -1, 5, "quantized by finite and positive scales"),
        ("o_proj.weight_packed", lambda tensor: tensor[:, :-2], 3, "its elements imply BF16["),
        ("o_proj.weight_packed", lambda tensor: tensor[:, :-1], 3, "its elements imply BF16["),
        ("o_proj.weight_packed", lambda tensor: tensor[None], 4, "no matrix"),
        ("o_proj.weight_packed", lambda tensor: None, 3, "o_proj"),
        ("o_proj.weight_shape", lambda tensor: tensor.flip(0), 3, "and the weight_shape beside it says [96, 64]"),
        ("o_proj.weight_shape", lambda tensor: tensor[:1], 3, "is I64[1], no number of rows and of columns"),
        ("o_proj.weight_shape", lambda tensor: tensor.int(), 0, ""),
    ],
)
def test_what_does_not_fit_is_refused(ending, change, code, message, kimi, convert, tmp_path):
    folder = shutil.copytree(kimi, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    key = next(key for key in tensors if key.endswith(ending))
    changed = change(tensors.pop(key))
    if changed is not None:
        tensors[key] = changed.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ran = convert("hf2hf", folder, tmp_path / "out")
    if code:
        refused(ran, code, message)
        assert "--dtype" not in ran.err
    assert (tmp_path / "out").exists() is (code == 0)
