"""Qwen3.5 with images of Megatron-Bridge 0.6.2, whose modules wrote and computed tests/golden/bridge/qwen3_5*."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.faults.dcp_tools import refused
from tests.golden.test_bridge_lora import contents
from tests.golden.test_bridge_vision import differences
from tests.golden.test_only_text import build, save

REAL = Path(__file__).with_name("bridge")
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
ACCEPT = ("--accept", "merger_gelu")
KINDS = {"qwen3_5": ("Qwen35VLModelProvider", "Qwen3_5"), "qwen3_5_moe": ("Qwen35VLMoEModelProvider", "Qwen3_5Moe")}
"""Model type: its class in Megatron-Bridge, and the prefix of its classes in transformers."""


def read(convert: Any, kind: str, folder: Path) -> Path:
    """The Hugging Face folder that is read of Bridge's run."""
    ran = convert("megatron2hf", REAL / kind, folder, "--config", REAL / kind, *ACCEPT)
    assert ran.code == 0, ran.err
    assert "the gelu that tanh approximates" in ran.err
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_its_logits(convert, tmp_path, monkeypatch, kind):
    """With the merger's gelu of Bridge transformers computes the same of what is read; with its own a little else."""
    import torch

    base = read(convert, kind, tmp_path / "base")
    seen, text = differences(base, kind)
    assert text < 5e-6
    assert 1e-4 < seen < 5e-3  # of 2.5
    merger = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), f"{KINDS[kind][1]}VisionPatchMerger")
    made = merger.__init__

    def with_tanh(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.act_fn = torch.nn.GELU(approximate="tanh")

    monkeypatch.setattr(merger, "__init__", with_tanh)
    assert max(differences(base, kind)) < 5e-6
    seen, text = differences(base, kind, lambda config: config["vision_config"].update(num_heads=2))
    assert seen > 1e-2
    assert text < 5e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", [(), ("--tp", 2, "--pp", 2)])
def test_what_it_loads(convert, tmp_path, kind, topology):
    """Every tensor that Bridge saves, and every state that it asks for; and back.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    base, run = read(convert, kind, tmp_path / "base"), tmp_path / "run"
    ran = convert("hf2megatron", base, run, *BRIDGE, *ACCEPT, *topology)
    assert ran.code == 0, ran.err
    assert f"for Megatron-Bridge's {KINDS[kind][0]} alone" in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(REAL / kind / ITERATION)
    theirs = {key: tensor for key, tensor in theirs.items() if not key.startswith("common_state")}
    assert all("_extra_state" in name for name in ours.keys() - theirs.keys())
    assert not theirs.keys() - ours.keys()
    odd = [key for key, tensor in theirs.items() if tensor is not None and not np.array_equal(tensor, ours[key])]
    assert all(key.endswith(".out_norm.weight") for key in odd), odd  # plus 1, and minus 1 again
    assert all(np.abs(theirs[key] - ours[key]).max() < 1e-7 for key in odd)
    written, known = (
        dict(yaml.safe_load(next(folder.glob("iter_*/run_config.yaml")).read_text())["model"])
        for folder in (run, REAL / kind)
    )
    tower, its = written.pop("vision_config"), known.pop("vision_config")
    assert tower["_target_"].removesuffix(".from_dict") == its["_target_"]
    assert {key for key, value in tower["config_dict"].items() if its.get(key) != value} <= {"model_type"}
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "rope_scaling_factor"}
    kernels = {"moe_grouped_gemm", "make_vocab_size_divisible_by", "ffn_hidden_size", "moe_router_load_balancing_type"}
    assert {name for name in written if written[name] != known.get(name)} <= sizes | kernels
    assert convert("megatron2hf", run, tmp_path / "back", *ACCEPT).code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    digests = {convert("digest", folder, *ACCEPT).out.split()[0] for folder in (run, base)}
    assert len(digests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(convert, tmp_path, kind):
    """Files as transformers saves them, of other sizes: the same weights."""
    source, run = save(build(kind, False, vocab_size=64), tmp_path / "whole"), tmp_path / "run"
    ran = convert("hf2megatron", source, run, *BRIDGE, *ACCEPT, "--tp", 2)
    assert ran.code == 0, ran.err
    ran = convert("megatron2hf", run, tmp_path / "out", *ACCEPT)
    assert ran.code == 0, ran.err
    assert "names and shapes checked against: transformers" in ran.err
    ran = convert("verify", tmp_path / "out", source)
    assert ran.code == 0, ran.err


def test_experts_that_files_hold_fused(convert, tmp_path):
    """As transformers has them in memory, and as the Hub may have them: the same run."""
    import torch
    from safetensors.torch import load_file, save_file

    source = save(build("qwen3_5_moe", False, vocab_size=64), tmp_path / "whole")
    tensors, fused = load_file(source / "model.safetensors"), tmp_path / "fused"
    shutil.copytree(source, fused)
    for first in sorted({key.split("experts.")[0] for key in tensors if ".experts." in key}):
        parts = ([tensors.pop(f"{first}experts.{i}.{n}_proj.weight") for i in range(4)] for n in ("gate", "up", "down"))
        gate, up, down = map(torch.stack, parts)
        tensors |= {f"{first}experts.gate_up_proj": torch.cat([gate, up], 1), f"{first}experts.down_proj": down}
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    for number, folder in enumerate((source, fused)):
        ran = convert("hf2megatron", folder, tmp_path / f"run-{number}", *BRIDGE, *ACCEPT)
        assert ran.code == 0, ran.err
    assert convert("diff", tmp_path / "run-0", tmp_path / "run-1", *ACCEPT, "--tensors").code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_predicts_a_second_token(convert, tmp_path, kind):
    """Bridge has megatron-core build it like the last layer of the decoder, which builds none with linear attention."""
    layers = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    source, run = (
        with_second(save(build(kind, False, vocab_size=64, layer_types=layers), tmp_path / "a")),
        tmp_path / "m",
    )
    ran = convert("hf2megatron", source, run, *BRIDGE, *ACCEPT)
    assert ran.code == 0, ran.err
    fields = yaml.safe_load((run / "iter_0000000/run_config.yaml").read_text())["model"]
    assert (fields["mtp_num_layers"], fields["linear_attention_freq"]) == (1, [0, 1, 1, 0])
    assert any(
        key.startswith("language_model.mtp.layers.0.transformer_layer.") for key in contents(run / "iter_0000000")
    )
    assert convert("megatron2hf", run, tmp_path / "out", *ACCEPT).code == 0
    assert convert("verify", tmp_path / "out", source).code == 0
    layers = [*layers[:3], "linear_attention"]
    source = with_second(save(build(kind, False, vocab_size=64, layer_types=layers), tmp_path / "b"))
    what = "and layer 3, the last of this"
    refused(
        convert("hf2megatron", source, tmp_path / "no", *BRIDGE, *ACCEPT), 5, what, "has linear attention", "--drop mtp"
    )
    ran = convert("hf2megatron", source, tmp_path / "without", *BRIDGE, *ACCEPT, "--drop", "mtp")
    assert ran.code == 0, ran.err


def with_second(folder: Path, like: int = 0) -> Path:
    """The folder with such a layer under the Hub's names, its block like a layer of the decoder."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    first, norm = f"model.language_model.layers.{like}.", tensors["model.language_model.norm.weight"]
    block = {
        f"mtp.layers.0.{key.removeprefix(first)}": tensor + 0.5
        for key, tensor in tensors.items()
        if key.startswith(first)
    }
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    around = {f"mtp.{name}.weight": norm + number for number, name in enumerate(names)}
    join = norm.new_ones(len(norm), 2 * len(norm)).cumsum(1)
    save_file(tensors | block | around | {"mtp.fc.weight": join}, path, {"format": "pt"})
    return folder


def test_what_is_refused(convert, tmp_path):
    """What the class computes otherwise, and towers that it does not compute or divide."""
    base = read(convert, "qwen3_5", tmp_path / "base")
    what = "the gelu that tanh approximates"
    refused(convert("hf2megatron", base, tmp_path / "no", *BRIDGE), 5, what, *ACCEPT)
    run = ("megatron2hf", REAL / "qwen3_5", tmp_path / "no")
    refused(convert(*run, "--config", REAL / "qwen3_5"), 5, what, *ACCEPT)
    refused(convert(*run, *ACCEPT), 3, "the config of its tower is missing", "--config BASE")
    config = json.loads((base / "config.json").read_text())
    for key, value, message in (
        ("hidden_act", "gelu", "hidden_act = 'gelu_pytorch_tanh'"),
        ("deepstack_visual_indexes", [0], "deepstack_visual_indexes = []"),
        ("rope_parameters", {"rope_theta": 5e3, "rope_type": "axial"}, "a base of 10000, not 5000"),
        ("rope_theta", 5e3, "a base of 10000, not 5000"),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "knows no partial_rotary_factor"),
    ):
        tower = {name: of_file for name, of_file in config["vision_config"].items() if name != "rope_parameters"}
        (base / "config.json").write_text(json.dumps(config | {"vision_config": tower | {key: value}}))
        ran = convert("hf2megatron", base, tmp_path / "no", *BRIDGE, *ACCEPT)
        refused(ran, 5, message)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_heads", 2, "vision_config.num_heads: 2 | 4"),
        ("_target_", "mine.Tower", "vision_config._target_: 'mine.Tower'"),
    ],
)
def test_a_tower_that_the_config_contradicts(convert, tmp_path, key, value, message):
    """The config of the tower is in the fields as 0.6.2 writes it: beside the name of its class."""
    run = shutil.copytree(REAL / "qwen3_5", tmp_path / "run")
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    document["model"]["vision_config"][key] = value
    path.write_text(yaml.safe_dump(document))
    refused(convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "qwen3_5", *ACCEPT), 5, message)
