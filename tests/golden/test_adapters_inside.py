"""Adapters inside the checkpoints of real trainers: `--adapter merged` and `--adapter only`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vitruvian

HERE = Path(__file__).parent / "peft"
COMMANDS = {"in_fsdp2": "fsdp2hf", "in_zero3": "zero2hf"}


@pytest.fixture(params=COMMANDS)
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The command for a checkpoint, and a copy of the fixture with the adapter_config.json that trainers write."""
    folder = tmp_path / "trained"
    shutil.copytree(HERE / request.param, folder)
    settings = json.loads((folder / "lora_config.json").read_text())["peft"]
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    return COMMANDS[request.param], folder


def logits(folder: Path, trained: Path, adapter: Path | None = None) -> float:
    """How far the logits of a model are from the golden ones."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        computed = model(torch.from_numpy(np.load(trained / "golden_ids.npy"))).logits.numpy()
    return float(np.abs(computed - np.load(trained / "golden_logits.npy")).max())


def test_the_adapter_alone_is_what_peft_loads(trained, convert, tmp_path):
    command, folder = trained
    ran = convert(command, folder / "checkpoint", tmp_path / "adapter", "--adapter", "only")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["inference_mode"] is True  # as PEFT saves
    assert convert("merge", folder / "base", tmp_path / "adapter", tmp_path / "out").code == 0
    if command == "fsdp2hf":
        assert logits(folder / "base", folder, tmp_path / "adapter") < 5e-7
        assert logits(tmp_path / "out", folder) < 5e-7


def test_merged(trained, convert, tmp_path):
    command, folder = trained
    options = ["--config", folder / "base", "--adapter", "merged", "--dtype", "fp32"]
    ran = convert(command, folder / "checkpoint", tmp_path / "out", *options)
    assert ran.code == 0, ran.err
    assert "lora_A.default.weight\n" not in ran.err
    # of ZeRO the FP32 master weights of the adapter, where the golden logits are those of its bfloat16 copies
    assert logits(tmp_path / "out", folder) < (5e-7 if command == "fsdp2hf" else 2e-3)
    assert convert("verify", tmp_path / "out").code == 0
    done = vitruvian.convert(
        folder / "checkpoint", tmp_path / "shards", to="megatron", tp=2, config=folder / "base", adapter="merged",
        dtype="fp32",
    )  # fmt: skip
    assert done.digest == vitruvian.digest(tmp_path / "out").digest


def test_the_weights_of_zero_as_it_computes_with_them(convert, tmp_path):
    """Both rounded to bfloat16, as the golden logits have them."""
    folder = tmp_path / "trained"
    shutil.copytree(HERE / "in_zero3", folder)
    settings = json.loads((folder / "lora_config.json").read_text())["peft"]
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    assert convert("zero2hf", folder / "checkpoint", tmp_path / "adapter", "--adapter", "only").code == 0
    weights = tmp_path / "adapter/adapter_model.safetensors"
    rounded = {name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in load_file(weights).items()}
    save_file(rounded, weights, {"format": "pt"})
    assert convert("hf2hf", folder / "base", tmp_path / "base", "--dtype", "bf16").code == 0
    assert convert("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "--dtype", "fp32").code == 0
    assert logits(tmp_path / "out", folder) < 5e-7


def test_what_is_refused(trained, convert, tmp_path):
    command, folder = trained
    checkpoint, base = folder / "checkpoint", ["--config", folder / "base"]
    ran = convert(command, checkpoint, tmp_path / "out", *base)
    assert (ran.code, "--adapter merged" in ran.err) == (4, True), ran.err
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    ran = convert(command, checkpoint, tmp_path / "out", "--adapter", "only")
    assert (ran.code, "changed the weights of its base" in ran.err) == (4, True), ran.err
    (checkpoint / "adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    ran = convert(command, checkpoint, tmp_path / "out", "--adapter", "only")
    assert (ran.code, "its biases are in the base" in ran.err) == (4, True), ran.err
    (checkpoint / "adapter_config.json").unlink()
    for options in (["--adapter", "only"], [*base, "--adapter", "merged"]):
        ran = convert(command, checkpoint, tmp_path / "out", *options)
        assert (ran.code, "holds no adapter_config.json" in ran.err) == (3, True), ran.err
    with pytest.raises(vitruvian.UsageError, match="not written as fsdp"):
        vitruvian.convert(checkpoint, tmp_path / "out", to="fsdp", adapter="only")
    assert not (tmp_path / "out").exists()


def test_without_an_adapter(model, convert, tmp_path):
    assert convert("hf2fsdp", model("llama"), tmp_path / "fsdp").code == 0
    ran = convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "out", "--adapter", "merged")
    assert (ran.code, "holds no adapter" in ran.err) == (2, True), ran.err
    with pytest.raises(vitruvian.UsageError, match="--adapter has no effect"):
        vitruvian.convert(model("llama"), tmp_path / "out", adapter="only")


def test_an_adapter_cut_by_columns(convert, tmp_path):
    """As tensor parallel ranks hold it: `--adapter only` makes it whole, which the refusal of `merged` says."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    trained, folder = shutil.copytree(HERE / "in_fsdp2", tmp_path / "trained"), tmp_path / "c"
    dcp_to_torch_save(trained / "checkpoint", tmp_path / "whole.pt")
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    offsets: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for key, tensor in torch.load(tmp_path / "whole.pt")["model"].items():
        axis = int("lora_A" in key)
        for rank, part in enumerate(tensor.chunk(2, axis)):
            parts[rank][key] = part.contiguous().numpy()
            start = rank * -(-tensor.shape[axis] // 2)
            offsets[rank][key] = {"saved_offsets": [start if i == axis else 0 for i in range(tensor.dim())]}
    folder.mkdir()
    for rank in range(2):
        about = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets[rank])}
        save_file(parts[rank], folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=about)
    settings = json.loads((trained / "lora_config.json").read_text())["peft"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    merged = ("--config", trained / "base", "--adapter", "merged")
    ran = convert("fsdp2hf", folder, tmp_path / "no", *merged)
    assert (ran.code, "holds some columns of" in ran.err, "take --adapter only first" in ran.err) == (4, True, True)
    assert not (tmp_path / "no").exists()
    assert convert("fsdp2hf", folder, tmp_path / "adapter", "--adapter", "only").code == 0
    assert convert("merge", trained / "base", tmp_path / "adapter", tmp_path / "out", "--dtype", "fp32").code == 0
    assert logits(tmp_path / "out", trained) < 5e-7
