"""Qwen3-VL of Megatron-Bridge 0.6.2, whose modules wrote and computed tests/golden/bridge/qwen3_vl*_0.6.

Its tower is Bridge's own from 0.4.0 on; that of 0.3.1 is in `test_bridge_vision.py`.
"""

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
from tests.golden.test_bridge_vision import differences, unlike
from tests.golden.test_only_text import build, save

REAL = Path(__file__).with_name("bridge")
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
ACCEPT = ("--accept", "merger_gelu")
FIRST = ("--megatron-version", "0.16")
"""For Megatron-Bridge 0.3.1, which runs with no later megatron-core."""
KINDS = {"qwen3_vl": ("Qwen3VLModelProvider", "Qwen3VL"), "qwen3_vl_moe": ("Qwen3VLMoEModelProvider", "Qwen3VLMoe")}
"""Model type: its class in Megatron-Bridge, and the prefix of its classes in transformers."""


def real(kind: str) -> Path:
    """Bridge's run of a kind."""
    return REAL / f"{kind}_0.6"


def read(convert: Any, kind: str, folder: Path) -> Path:
    """The Hugging Face folder that is read of Bridge's run."""
    ran = convert("megatron2hf", real(kind), folder, "--config", real(kind), *ACCEPT)
    assert ran.code == 0, ran.err
    assert "the gelu that tanh approximates" in ran.err
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_its_logits(convert, tmp_path, monkeypatch, kind):
    """With the mergers' gelu of Bridge transformers computes the same of what is read; with its own a little else."""
    import torch

    base = read(convert, kind, tmp_path / "base")
    seen, text = differences(base, kind, golden=real(kind))
    assert text < 5e-6
    assert 1e-4 < seen < 5e-2  # of 2.5
    merger = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), f"{KINDS[kind][1]}VisionPatchMerger")
    made = merger.__init__

    def with_tanh(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.act_fn = torch.nn.GELU(approximate="tanh")

    monkeypatch.setattr(merger, "__init__", with_tanh)
    assert max(differences(base, kind, golden=real(kind))) < 5e-6
    for key, value in (("num_heads", 4), ("deepstack_visual_indexes", [1, 0])):

        def other(config: dict[str, Any], key: str = key, value: Any = value) -> None:
            config["vision_config"][key] = value

        seen, text = differences(base, kind, other, golden=real(kind))
        assert seen > 1e-2
        assert text < 5e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", [(), ("--tp", 2), ("--pp", 2), ("--tp", 2, "--pp", 2)])
def test_what_it_loads(convert, tmp_path, kind, topology):
    """Every tensor that Bridge saves, and every state that it asks for; and back.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    base, run = read(convert, kind, tmp_path / "base"), tmp_path / "run"
    ran = convert("hf2megatron", base, run, *BRIDGE, *ACCEPT, *topology)
    assert ran.code == 0, ran.err
    assert f"for Megatron-Bridge's {KINDS[kind][0]} alone" in ran.err
    assert "for its releases from 0.4.0 on" in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(real(kind) / ITERATION)
    theirs = {key: tensor for key, tensor in theirs.items() if not key.startswith("common_state")}
    assert all("_extra_state" in name for name in ours.keys() - theirs.keys())
    missing = theirs.keys() - ours.keys()  # states of experts one by one, which are grouped in Transformer Engine
    assert all("experts" in name and "_extra_state" in name for name in missing), missing
    assert all(
        np.array_equal(tensor, ours[key]) for key, tensor in theirs.items() if tensor is not None and key not in missing
    )
    written, known = (
        dict(yaml.safe_load(next(folder.glob("iter_*/run_config.yaml")).read_text())["model"])
        for folder in (run, real(kind))
    )
    tower, its = written.pop("vision_config"), known.pop("vision_config")
    assert tower["_target_"].removesuffix(".from_dict") == its["_target_"]
    assert {key for key, value in tower["config_dict"].items() if its.get(key) != value} <= {"model_type"}
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "rope_scaling_factor"}
    kernels = {"moe_grouped_gemm", "make_vocab_size_divisible_by", "moe_router_load_balancing_type"}
    assert {name for name in written if written[name] != known.get(name)} <= sizes | kernels
    assert convert("megatron2hf", run, tmp_path / "back", *ACCEPT).code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    digests = {convert("digest", folder, *ACCEPT).out.split()[0] for folder in (run, base)}
    assert len(digests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(convert, tmp_path, kind):
    """Files as transformers saves them, of other sizes: the same weights, in either tower of Bridge."""
    source = save(build(kind, False, vocab_size=64, **unlike(kind)), tmp_path / "whole")
    for options in ((*ACCEPT, "--tp", 2), FIRST):
        run, out = tmp_path / f"run{len(options)}", tmp_path / f"out{len(options)}"
        ran = convert("hf2megatron", source, run, *BRIDGE, *options)
        assert ran.code == 0, ran.err
        ran = convert("megatron2hf", run, out, *ACCEPT)
        assert ran.code == 0, ran.err
        assert "names and shapes checked against: transformers" in ran.err
        ran = convert("verify", out, source)
        assert ran.code == 0, ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_from_one_release_to_the_other(convert, tmp_path, kind):
    """A run of 0.3.1 becomes one of 0.6.2 and comes back; the weights are the same."""
    new, old = tmp_path / "new", tmp_path / "old"
    ran = convert("reshard", REAL / kind, new, "--config", REAL / kind, "--for", "bridge", *ACCEPT)
    assert ran.code == 0, ran.err
    assert any(name.startswith("vision_model.decoder.") for name in contents(new / ITERATION))
    ran = convert("reshard", new, old, "--for", "bridge", *ACCEPT, *FIRST)
    assert ran.code == 0, ran.err
    assert "for its release 0.3.1" in ran.err
    ours, theirs = contents(old / ITERATION), contents(REAL / kind / ITERATION)
    assert not theirs.keys() - ours.keys()
    assert all(tensor is None or np.array_equal(tensor, ours[key]) for key, tensor in theirs.items())


@pytest.mark.parametrize("kind", KINDS)
def test_its_language_model_alone(convert, tmp_path, kind):
    """Without the config of the whole, and without the gelu of its mergers."""
    base = read(convert, kind, tmp_path / "base")
    assert convert("hf2hf", base, tmp_path / "text", "--only", "text").code == 0
    ran = convert("megatron2hf", real(kind), tmp_path / "alone", "--only", "text")
    assert ran.code == 0, ran.err
    assert convert("diff", tmp_path / "alone", tmp_path / "text", "--tensors").code == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("release", ["", "_0.6"])
def test_without_a_config(convert, tmp_path, kind, release):
    """The fields hold the config of the text and that of the tower: of either release, and of what is written here."""
    folder = REAL / f"{kind}{release}"
    ran = convert("megatron2hf", folder, tmp_path / "base", *ACCEPT)
    assert ran.code == 0, ran.err
    assert "its config.json is made of the configs in run_config.yaml" in ran.err
    assert "names and shapes checked against: transformers" in ran.err
    made, known = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "base", folder))
    parts = ("text_config", "vision_config")
    assert {key: made[key] for key in known if key not in (*parts, "torch_dtype")} == {
        key: value for key, value in known.items() if key not in (*parts, "torch_dtype")
    }
    tower = known["vision_config"]
    assert {key: made["vision_config"][key] for key in tower if key != "model_type"} == {
        key: value for key, value in tower.items() if key != "model_type"
    }
    seen, text = differences(tmp_path / "base", kind, golden=folder)
    assert text < 5e-6
    assert seen < (5e-2 if release else 5e-6)
    with_config = convert("digest", folder, "--config", folder, *ACCEPT).out.split()[0]
    assert convert("digest", folder, *ACCEPT).out.split()[0] == with_config


def test_a_config_in_the_fields_is_named_where_it_is(convert, tmp_path):
    """There is no config.json: the file and its key are named."""
    place = f"{ITERATION}/run_config.yaml: model.hf_text_config says "
    for key, name in (("num_key_value_heads", "kv_heads"), ("num_hidden_layers", "layers")):
        run = with_fields(tmp_path / name, {"hf_text_config": {key: 0}})
        refused(convert("megatron2hf", run, tmp_path / "no", *ACCEPT), 3, f"{place}{name} = 0")
    run = with_fields(tmp_path / "tower", {"vision_config": {"num_heads": None}})
    ran = convert("megatron2hf", run, tmp_path / "no", *ACCEPT)
    refused(ran, 3, "the config of its model does not say vision_config.num_heads")
    assert "config.json" not in ran.err


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"hf_text_config": None, "hf_model_id": "acme/tiny"}, 3, "--config acme/tiny; or --only text"),
        ({"hf_text_config": {"rms_norm_eps": 0.1}}, 5, "norm_epsilon: 1e-06 | 0.1"),
        ({"hf_text_config": {"model_type": None}}, 3, "the config of its tower is missing"),
        ({"vision_config": {"num_heads": None}}, 3, "vision_config.num_heads"),
        ({"vision_config": {"deepstack_visual_indexes": None}}, 3, "deepstack_visual_indexes = None is no list"),
    ],
)
def test_without_a_config_that_its_fields_say(convert, tmp_path, changes, code, message):
    run = with_fields(tmp_path / "run", changes)
    refused(convert("megatron2hf", run, tmp_path / "no", *ACCEPT), code, message)
    assert not (tmp_path / "no").exists()


def with_fields(at: Path, changes: dict[str, Any]) -> Path:
    """Bridge's run with other fields; those of a config inside by its name and theirs."""
    run = shutil.copytree(real("qwen3_vl"), at)
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            document["model"][name] |= value
        else:
            document["model"][name] = value
    path.write_text(yaml.safe_dump(document))
    return run


def test_what_is_refused(convert, tmp_path):
    """What the class computes otherwise, and towers that it does not compute or divide."""
    base, no = read(convert, "qwen3_vl", tmp_path / "base"), tmp_path / "no"
    what = "the gelu that tanh approximates"
    refused(convert("hf2megatron", base, no, *BRIDGE), 5, what, *ACCEPT)
    refused(convert("megatron2hf", real("qwen3_vl"), no, "--config", real("qwen3_vl")), 5, what, *ACCEPT)
    ran = convert("hf2megatron", base, no, *BRIDGE, *ACCEPT, "--pp", 4)
    refused(ran, 5, "after the first 2 layers", "has 1")
    config = json.loads((base / "config.json").read_text())
    for key, value, topology, message in (
        ("hidden_act", "gelu", (), "hidden_act = 'gelu_pytorch_tanh'"),
        ("num_heads", 1, ("--tp", 2), "1 heads of the tower do not divide over tp = 2"),
    ):
        (base / "config.json").write_text(
            json.dumps(config | {"vision_config": config["vision_config"] | {key: value}})
        )
        refused(convert("hf2megatron", base, no, *BRIDGE, *ACCEPT, *topology), 5, message)
    source = save(build("qwen3_5", False, vocab_size=64), tmp_path / "qwen3_5")
    ran = convert("hf2megatron", source, no, *BRIDGE, *ACCEPT, *FIRST)
    refused(ran, 5, "in its releases from 0.4.0 on, which run with no megatron-core 0.16")
    assert not no.exists()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("vision_config.num_heads: 4 | 2", {"vision_config": {"num_heads": 4}}),
        (
            "vision_config.deepstack_visual_indexes: [1, 0] | [0, 1]",
            {"vision_config": {"deepstack_visual_indexes": [1, 0]}},
        ),
        ("mrope_section: [2, 2, 0] | [2, 1, 1]", {"mrope_section": [2, 2, 0]}),
        ("rope_theta", {"rotary_base": 1e4}),
        ("own_field", {"own_field": 3}),
    ],
)
def test_fields_that_the_config_contradicts(convert, tmp_path, message, changes):
    run = with_fields(tmp_path / "run", changes)
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", real("qwen3_vl"), *ACCEPT)
    assert ran.code in (3, 4, 5), ran.err
    assert message in ran.err
    assert not (tmp_path / "no").exists()
