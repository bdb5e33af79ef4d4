"""Quantized models of the Hub: what is read of them is, bit for bit, what transformers makes of them on a CPU."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from converters.assets.files import has_floats_alone
from converters.move.dequantize import read_halves
from formats.disk.safetensors import Fragment, Scales, row_major
from formats.errors import UnsupportedError
from formats.huggingface.folder import read_files
from formats.huggingface.quantized import dequantized, without_quantization
from tests.faults.dcp_tools import refused
from train.settings.config_file import load_config
from train.start.start_weights import folder_of

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
LINEAR = ("_proj.weight", "_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def rewritten(source: Path, folder: Path, change, quantization: dict) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(source, folder)
    tensors, more = load_file(folder / "model.safetensors"), {}
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        more |= change(name, tensor)
    save_file(more, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float8_e4m3fn"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def blocks(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts of GPT-OSS as OpenAI publishes them: random bytes."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, wide, rows = tensor.shape
    scales = torch.randint(112, 124, (experts, rows, wide // 32), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 2][: wide // 32])  # so small that BF16 has no normal number for it
    codes = torch.randint(0, 256, (experts, rows, wide // 32, 16), dtype=torch.uint8)
    return {f"{name}_blocks": codes, f"{name}_scales": scales}


def scaled_whole(*grid: int):
    """Linear layers as Mistral publishes them: one scale for a matrix, and one for what it multiplies."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        more = scaled(tuple(tensor.shape), torch.bfloat16)(name, tensor)
        if len(more) > 1:
            more[f"{name}_scale_inv"] = more[f"{name}_scale_inv"].reshape(grid)
            more[name.replace(".weight", ".activation_scale")] = torch.tensor(0.25, dtype=torch.bfloat16)
        return more

    return change


def scaled(block: tuple[int, int], dtype: torch.dtype = torch.float32):
    """Linear layers as DeepSeek publishes them."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(LINEAR):
            return {name: tensor}
        codes = torch.randint(0, 256, tensor.shape, dtype=torch.uint8)
        codes[codes & 127 == 127] = 5  # no NaN
        grid = [-(-size // step) for size, step in zip(tensor.shape, block, strict=True)]
        factors = (torch.rand(grid) / 1000).to(dtype)
        return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": factors}

    return change


@pytest.fixture(scope="module")
def oss(model, tmp_path_factory):
    return rewritten(model("gpt_oss", "bfloat16"), tmp_path_factory.mktemp("oss") / "hf", blocks, MXFP4)


@pytest.fixture(scope="module")
def deepseek(model, tmp_path_factory):
    source = model("deepseek_v3", "bfloat16")
    return rewritten(source, tmp_path_factory.mktemp("deepseek") / "hf", scaled((8, 8)), FP8)


@pytest.fixture(scope="module")
def minimax(model, tmp_path_factory):
    source = model("minimax_m2", "bfloat16")
    return rewritten(source, tmp_path_factory.mktemp("minimax") / "hf", scaled((8, 8)), FP8)


def same_model(first: Path, second: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Two folders that transformers loads as one model, without a missing or unexpected key."""
    states = []
    for path in (first, second):
        net, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        states.append(net.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor.view(torch.int16), states[1][name].view(torch.int16)), name


@pytest.mark.parametrize(
    ("kind", "count", "how"),
    [
        ("oss", 8, "which holds them exactly"),
        ("deepseek", 104, "times their scales, rounded once"),
        ("minimax", 64, "times their scales, rounded once"),
    ],
)
def test_what_is_read_is_what_transformers_reads(kind, count, how, convert, tmp_path, request):
    source = request.getfixturevalue(kind)
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"{count} tensors of {'MXFP4' if kind == 'oss' else 'FP8'} are read as BF16, " in ran.err
    assert how in ran.err
    plan = json.loads(convert("plan", source, "--to", "huggingface", "--json").out)
    assert list(plan["edges"]) == [f"dequantize {'MXFP4' if kind == 'oss' else 'FP8'} to BF16"]
    assert "quantization_config" not in json.dumps(plan)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    same_model(source, tmp_path / "out")


@pytest.mark.parametrize(("name", "grid"), [("mistral", ()), ("deepseek_v3", ()), ("qwen3", (1,)), ("llama", (1, 1))])
def test_one_scale_for_a_matrix(name, grid, model, convert, tmp_path):
    quantization = FP8 | {"activation_scheme": "static", "weight_block_size": None, "dequantize": True}
    source = rewritten(model(name, "bfloat16"), tmp_path / "hf", scaled_whole(*grid), quantization)
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    count = sum("activation_scale" in key for key in load_file(source / "model.safetensors"))
    assert f"{count} tensors of FP8 are read as BF16, " in ran.err
    assert f", without {count} scales of activations" in ran.err
    same_model(source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["oss", "deepseek"])
def test_it_goes_to_megatron_and_back(kind, convert, tmp_path, request):
    source, mesh = request.getfixturevalue(kind), ["--ep", 2, "--pp", 2]
    assert convert("hf2megatron", source, tmp_path / "m", *mesh).code == 0
    assert convert("verify", tmp_path / "m", source).code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    same_model(source, tmp_path / "back")
    digest = convert("digest", source).out
    assert convert("digest", tmp_path / "m").out.split()[0] == digest.split()[0]
    small = convert("digest", source, "-j", 3, "--memory", "200KB")
    assert (small.code, small.out) == (0, digest)


def test_another_block_is_another_conversion(model, convert, tmp_path):
    """What is half done goes on with the blocks that it began with, or not at all."""
    source = rewritten(
        model("qwen3", "bfloat16"), tmp_path / "hf", scaled((40, 40)), FP8 | {"weight_block_size": [40, 40]}
    )
    text = (source / "config.json").read_text()
    wrong = json.loads(text)
    wrong["quantization_config"]["weight_block_size"] = [33, 33]
    (source / "config.json").write_text(json.dumps(wrong))
    assert convert("hf2hf", source, tmp_path / "out", "--part", "1/2").code == 0
    (source / "config.json").write_text(text)
    refused(convert("hf2hf", source, tmp_path / "out"), 7, "another conversion")


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "bitnet", "linear_class": "autobitlinear"}, {"quant_method": "fp8"}]
)
def test_what_is_not_known_stays_in_the_config(model, convert, tmp_path, quantization):
    """bitnet rounds as it computes: weights in floats that have it are not those of another model."""
    source = rewritten(model("llama", "bfloat16"), tmp_path / "hf", without("-"), quantization)
    assert convert("hf2hf", source, tmp_path / "out").code == 4
    assert convert("hf2hf", source, tmp_path / "out", "--verbatim").code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"] == quantization
    assert convert("verify", tmp_path / "out", source).code == 0


QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""ModelOpt's file, AutoGPTQ's and AutoAWQ's: servers read them."""


@pytest.mark.parametrize("options", [[], ["--verbatim"]])
@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("compression_config", "compressed-tensors"),
        *(("quantization_config", name) for name in ("gptq", "awq", "modelopt")),
    ],
)
def test_settings_of_a_quantized_base_do_not_travel_with_weights_in_floats(
    model, convert, tmp_path, options, key, method
):
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(model("llama", "bfloat16"), base)
    assert convert("hf2fsdp", base, run).code == 0
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {key: {"quant_method": method, "config_groups": {}}}))
    for name in QUANTIZATION_FILES:
        (base / name).write_text('{"quant_algo": "FP8"}')
    ran = convert("fsdp2hf", run, tmp_path / "out", "--config", base, *options)
    assert ran.code == 0, ran.err
    assert key not in json.loads((tmp_path / "out/config.json").read_text())
    assert not [name for name in QUANTIZATION_FILES if (tmp_path / "out" / name).exists()]
    assert f"{key} (config.json), {', '.join(QUANTIZATION_FILES)} of {base} are not carried" in ran.err
    if options or key == "quantization_config":
        assert "checked against: transformers" in ran.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("nested", [True, False])
def test_keys_for_a_quantization_of_files(nested):
    """The language model in a Kimi-K2.5 has its own; bitnet computes with it, and null is none."""
    files = {"quantization_config": {"quant_method": "gptq"}, "compression_config": {"format": "dense"}}
    config = {"text_config": files | {"a": 1}, "b": 2} if nested else files | {"a": 1}
    rest, names = without_quantization(config)
    assert rest == ({"text_config": {"a": 1}, "b": 2} if nested else {"a": 1})
    assert names == [f"text_config.{key}" if nested else key for key in files]
    for value in ({"quant_method": "bitnet"}, None):
        assert without_quantization({"quantization_config": value}) == ({"quantization_config": value}, [])


@pytest.mark.parametrize(("dtype", "floats"), [("I64", True), ("BOOL", True), ("I32", False), ("U8", False)])
def test_a_buffer_of_positions_is_no_quantized_weight(dtype, floats):
    assert has_floats_alone(SimpleNamespace(dtypes=lambda: {"weight": "BF16", "other": dtype})) == floats


@pytest.mark.parametrize("method", [None, "modelopt"])
def test_a_quantization_of_the_cache_stays_in_a_folder_that_is_carried_as_it_is(model, convert, tmp_path, method):
    source = shutil.copytree(model("llama", "bfloat16"), tmp_path / "hf")
    quantization = (
        {"quantization_config": {"quant_method": method, "kv_cache_scheme": {"num_bits": 8}}} if method else {}
    )
    config = json.loads((source / "config.json").read_text()) | quantization
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert ("checked against: transformers" in ran.err) == (method is not None)
    for name in ("config.json", "hf_quant_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    stays = f"note: quantization_config in the config.json of {source} stays, and no weight is quantized"
    assert (stays in ran.err) == (method is not None)
    assert "not carried" not in ran.err
    assert convert("verify", tmp_path / "out", source).code == 0


def test_the_settings_of_weights_that_are_dequantized_do_not_travel(deepseek, convert, tmp_path):
    source = shutil.copytree(deepseek, tmp_path / "hf")
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"note: hf_quant_config.json of {source} is not carried: the weights that are written are not" in ran.err
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert convert("hf2hf", source, tmp_path / "as it is", "--verbatim").code == 0
    assert (tmp_path / "as it is/hf_quant_config.json").is_file()


def test_verbatim_keeps_every_bit(oss, convert, tmp_path):
    assert convert("hf2hf", oss, tmp_path / "out", "--verbatim").code == 0
    assert (tmp_path / "out/config.json").read_bytes() == (oss / "config.json").read_bytes()
    here, there = load_file(tmp_path / "out/model.safetensors"), load_file(oss / "model.safetensors")
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(("block", "dtype"), [((128, 128), torch.float32), ((40, 36), torch.bfloat16)])
def test_blocks_that_do_not_fill_a_matrix(model, convert, tmp_path, block, dtype):
    """transformers wants them to; DeepSeek's own script and vLLM do not."""
    quantization = FP8 | {"weight_block_size": list(block)}
    source = rewritten(model("qwen3", "bfloat16"), tmp_path / "hf", scaled(block, dtype), quantization)
    assert convert("hf2hf", source, tmp_path / "out").code == 0
    stored, converted = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for name, tensor in converted.items():
        expected = stored[name]
        if f"{name}_scale_inv" in stored:
            factors = stored[f"{name}_scale_inv"].float()
            for axis, size in enumerate(expected.shape):
                factors = factors.repeat_interleave(block[axis], axis).narrow(axis, 0, size)
            expected = (expected.float() * factors).bfloat16()
        assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), name


@given(st.data())
def test_any_part_of_it_is_a_part_of_the_whole(tmp_path_factory, data):
    """As tiles ask for it: from any element to any other."""
    method = data.draw(st.sampled_from(["MXFP4", "FP8"]))
    stack, rows, columns = (data.draw(st.integers(1, 5)) for _ in range(3))
    columns *= 32
    block = (1, 32) if method == "MXFP4" else (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40)))
    file, count = tmp_path_factory.getbasetemp() / "elements", stack * rows * columns
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    grid = (stack, -(-rows // block[0]), -(-columns // block[1]))
    factors = random.random(grid, np.float32) if method == "FP8" else random.integers(90, 150, grid, np.uint8)
    codes = random.integers(0, 127, count if method == "FP8" else count // 2, np.uint8)
    file.write_bytes(codes.tobytes() + factors.tobytes())
    scale_fragment = Fragment(file, codes.nbytes, "F32" if method == "FP8" else "U8", grid, row_major(grid))
    shape = (stack, rows, columns)
    scales = Scales(method, scale_fragment, block, rows, columns, "scales")
    tensor = Fragment(file, 0, "BF16", shape, row_major(shape), scales=scales)
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    descriptor = file.open("rb")
    with descriptor:
        parts = []
        for start, stop in ((first, last), (0, count)):
            out = np.zeros(stop - start, np.uint16)
            read_halves(lambda _: nullcontext(descriptor.fileno()), tensor, scales, 2 * start, out.data.cast("B"))
            parts.append(out)
    assert np.array_equal(parts[0], parts[1][first:last])
    wide = np.repeat(np.repeat(factors, block[0], 1)[:, :rows], block[1], 2)[..., :columns].ravel()
    if method == "FP8":
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(wide)
    else:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        values = table[np.stack([codes & 15, codes >> 4], 1).ravel().astype(np.int64)] * torch.exp2(
            torch.from_numpy(wide) - 127.0
        )
    assert np.array_equal(parts[1], values.bfloat16().view(torch.int16).numpy().view(np.uint16))


def test_every_byte_of_fp8():
    from converters.move.dequantize import E4M3

    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3.view(np.uint32)[~np.isnan(E4M3)], theirs.view(np.uint32)[~np.isnan(theirs)])
    assert np.array_equal(np.isnan(E4M3), np.isnan(theirs))


def without(ending: str):
    """Changes that leave a kind of tensors out."""
    return lambda name, tensor: {} if name.endswith(ending) else {name: tensor}


def also(ending: str):
    """Changes that keep the weights of a kind beside their blocks."""
    blocks = f"{ending}_blocks"
    return lambda name, tensor: (
        {name: tensor} | ({name.removesuffix("_blocks"): torch.zeros(2, 2)} if name.endswith(blocks) else {})
    )


def cut(ending: str):
    """Changes that leave the last column of a kind of tensors out."""
    return lambda name, tensor: {name: tensor[..., :-1].contiguous() if name.endswith(ending) else tensor}


def retyped(ending: str, dtype: torch.dtype):
    """Changes that give another type to a kind of tensors in a layer."""
    return lambda name, tensor: {name: tensor.to(dtype) if "_proj" in name and name.endswith(ending) else tensor}


def broken(value: float):
    """Changes that make one scale of a layer another."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith(("layers.1.self_attn.o_proj.weight_scale_inv", "layers.1.mlp.experts.down_proj_scales")):
            tensor = tensor.clone()
            tensor.view(-1)[-2] = value
        return {name: tensor}

    return change


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("deepseek", float("nan"), "self_attn.o_proj.weight_scale_inv is nan"),
        ("deepseek", 0.0, "self_attn.o_proj.weight_scale_inv is 0"),
        ("deepseek", -0.5, "self_attn.o_proj.weight_scale_inv is -0.5"),
        ("deepseek", float("inf"), "self_attn.o_proj.weight_scale_inv is inf"),
        ("deepseek", 1e38, "self_attn.o_proj.weight_scale_inv are too large for BF16"),
        ("oss", 255, "experts.down_proj_scales is nan, and"),
        ("oss", 254, "experts.down_proj_scales are too large for BF16"),
        ("oss", 252, ""),
    ],
)
def test_a_scale_that_no_quantizer_writes(kind, value, message, convert, tmp_path, request):
    quantization = MXFP4 if kind == "oss" else FP8
    source = rewritten(request.getfixturevalue(kind), tmp_path / "hf", broken(value), quantization)
    ran = convert("hf2hf", source, tmp_path / "out", "--dtype", "bf16")
    if message:
        refused(ran, 5, source / "model.safetensors", message, "--verbatim carries every tensor")
        assert not (tmp_path / "out").exists()
        assert convert("hf2hf", source, tmp_path / "kept", "--verbatim").code == 0
    else:
        assert ran.code == 0, ran.err


def test_an_element_of_fp8_that_is_no_number(deepseek, convert, tmp_path):
    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("layers.1.self_attn.o_proj.weight"):
            tensor.view(torch.uint8).view(-1)[-2] = 0x7F
        return {name: tensor}

    source = rewritten(deepseek, tmp_path / "hf", change, FP8)
    ran = convert("hf2hf", source, tmp_path / "out")
    refused(ran, 5, "self_attn.o_proj.weight_scale_inv are NaN in FP8", "--verbatim carries every tensor")


def test_elements_that_do_not_lie_row_by_row(deepseek, convert, tmp_path):
    tensors = load_file(deepseek / "model.safetensors")
    for name in ("o_proj.weight", "o_proj.weight_scale_inv"):
        folder = tmp_path / name.rpartition(".")[2]
        shutil.copytree(deepseek, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        turned = {key: tensor.t().contiguous().t() if key.endswith(name) else tensor for key, tensor in tensors.items()}
        torch.save(turned, folder / "pytorch_model.bin")
        refused(convert("digest", folder), 4, f"{name} is not row-major: strides [1, ")
    torch.save(tensors, folder / "pytorch_model.bin")
    assert convert("digest", folder).out.split()[0] == convert("digest", deepseek).out.split()[0]


def test_a_block_larger_than_its_matrix(model, convert, tmp_path):
    block = (8, 10**9)
    quantization = FP8 | {"weight_block_size": list(block)}
    source = rewritten(model("qwen3", "bfloat16"), tmp_path / "hf", scaled(block), quantization)
    assert convert("hf2hf", source, tmp_path / "out").code == 0


@pytest.mark.parametrize(
    ("kind", "change", "fields", "code", "messages"),
    [
        ("oss", without("down_proj_scales"), {}, 3, ["experts.down_proj_blocks, and no file its", "down_proj_scales"]),
        ("oss", also("down_proj"), {}, 3, ["down_proj_blocks, and model.layers.0.mlp.experts.down_proj is there too"]),
        ("oss", cut("down_proj_scales"), {}, 3, ["down_proj_scales is U8[4, 64, 2]", "imply U8[4, 64, 3]"]),
        ("oss", cut("down_proj_blocks"), {}, 3, ["down_proj_blocks is U8[4, 64, 3, 15], not MXFP4"]),
        ("deepseek", without("o_proj.weight_scale_inv"), {}, 3, ["o_proj.weight, and no file its"]),
        ("deepseek", cut("o_proj.weight_scale_inv"), {}, 3, ["weight_scale_inv is F32[8, 11]", "imply F32[8, 12]"]),
        (
            "deepseek",
            without("-"),
            {"weight_block_size": None},
            3,
            ["weight_scale_inv is F32[8, 12]", "imply F32[1, 1]"],
        ),
        ("deepseek", without("-"), {"fmt": "e5m2"}, 4, ["a quantization_config are not supported whose fmt is 'e5m2'"]),
        ("deepseek", without("-"), {"weight_block_size": 8}, 4, ["a quantization_config are not supported", "is 8"]),
        ("deepseek", without("-"), {"weight_block_size": [0, 8]}, 4, ["whose weight_block_size is [0, 8], only two"]),
        ("deepseek", without("-"), {"weight_block_size": [8, -8]}, 4, ["whose weight_block_size is [8, -8], only two"]),
        ("deepseek", without("-"), {"weight_block_size": [True, 8]}, 4, ["weight_block_size is [True, 8], only two"]),
        ("deepseek", without("-"), {"weight_block_size": [8, 16]}, 3, ["weight_scale_inv is F32", "imply F32"]),
        ("deepseek", without("-"), {"activation_scheme": "often"}, 4, ["a quantization_config are not supported"]),
        ("deepseek", retyped(".weight", torch.float8_e5m2), {}, 4, ["weight_scale_inv for F8_E5M2, not F8_E4M3"]),
        ("deepseek", retyped("_scale_inv", torch.float16), {}, 4, ["weight_scale_inv is F16, not F32 or BF16"]),
        ("deepseek", without("-"), {"quant_method": "gptq"}, 4, ["a quantization_config are not supported"]),
    ],
)
def test_what_does_not_fit_is_refused(kind, change, fields, code, messages, convert, tmp_path, request):
    quantization = (MXFP4 if kind == "oss" else FP8) | fields
    source = rewritten(request.getfixturevalue(kind), tmp_path / "hf", change, quantization)
    refused(convert("hf2megatron", source, tmp_path / "out", "--ep", 2), code, *messages)
    assert convert("hf2hf", source, tmp_path / "kept", "--verbatim").code == 0


@pytest.mark.parametrize("kind", ["oss", "deepseek"])
def test_a_config_that_names_no_quantization(kind, convert, tmp_path, request):
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    messages = ["holds model.layers.0.", "and config.json beside it no quantization_config"]
    refused(convert("inspect", folder), 3, *messages)


@pytest.mark.parametrize("kind", ["oss", "deepseek"])
def test_a_quantization_that_is_not_known_and_a_base(kind, convert, tmp_path, request, model):
    """A base in floats does not tell what the elements stand for, so that no hint names it."""
    unknown = rewritten(request.getfixturevalue(kind), tmp_path / "hf", without("-"), {"quant_method": "theirs"})
    base = model({"oss": "gpt_oss", "deepseek": "deepseek_v3"}[kind], "bfloat16")
    messages = [unknown / "config.json", "a quantization_config are not supported", "hint: ", "--verbatim"]
    for named in ([], ["--config", base]):
        ran = convert("hf2hf", unknown, tmp_path / "out", *named)
        refused(ran, 4, *messages)
        assert "BASE" not in ran.err


@pytest.mark.parametrize("known", [True, False])
def test_a_quantization_in_text_config(known, deepseek, convert, tmp_path):
    """transformers reads it there, too."""
    folder = shutil.copytree(deepseek, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config") | ({} if known else {"quant_method": "theirs"})
    fragments = read_files(folder)
    if known:
        expected = dequantized(fragments, {"quantization_config": quantization})
        assert dequantized(fragments, {"text_config": config | {"quantization_config": quantization}}) == expected
    else:
        with pytest.raises(UnsupportedError, match="models with a quantization_config are not supported"):
            dequantized(fragments, {"text_config": config | {"quantization_config": quantization}})


@pytest.mark.parametrize("known", [True, False])
def test_a_config_that_names_nothing(known, model, convert, tmp_path):
    """Without a method transformers loads no model; null is no quantization, for it as for us."""
    for value in ({}, None):
        folder = shutil.copytree(model("llama"), tmp_path / str(value))
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": value}
        argv = ["hf2hf", folder, tmp_path / f"out{value}"]
        if not known:
            config |= {"model_type": "foo", "architectures": ["FooForCausalLM"]}
            argv.append("--verbatim")
        (folder / "config.json").write_text(json.dumps(config))
        ran = convert(*argv)
        if value is None:
            assert ran.code == 0, ran.err
            assert "quantized" not in ran.err
        else:
            refused(ran, 3, folder / "config.json", "quantization_config = {}", "remove the key")
            if known:
                with pytest.raises(ValueError, match="no `quant_method` attribute"):
                    AutoModelForCausalLM.from_pretrained(folder)


def test_a_training_begins_with_what_it_stands_for(oss, tmp_path):
    text = (
        "model: {path: PATH}\ndata: {train: P, seq_length: 8}\nbatch: {size: 4}\noptim: {lr: 0.1}\nsave: {path: SAVE}\n"
    )
    file = tmp_path / "config.yml"
    file.write_text(text.replace("PATH", str(oss)).replace("SAVE", str(tmp_path / "save")))
    folder, _ = folder_of(load_config(file)[0])
    assert folder == tmp_path / "save/start"
    same_model(oss, folder)
    other = rewritten(oss, tmp_path / "hf", without("-"), {"quant_method": "gptq"})
    file.write_text(text.replace("PATH", str(other)).replace("SAVE", str(tmp_path / "save")))
    with pytest.raises(UnsupportedError, match=r"hf cannot be trained: .*models with a quantization_config"):
        folder_of(load_config(file)[0])
