"""Gemma 3 with images of Megatron-Bridge from 0.4.0 on; 0.4.2, 0.5.1 and 0.6.2 wrote tests/golden/bridge/gemma3_vl_0.*.

From 0.6.0 on the tokens of an image see all of their image, as in transformers. That of 0.3.1 is in
`test_bridge_gemma3_vision.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.faults.dcp_tools import edit, refused
from tests.golden.test_bridge_gemma3_vision import ACCEPT, BRIDGE, FIRST, ITERATION, differences, fields_of
from tests.golden.test_bridge_lora import contents
from tests.golden.test_only_text import build, save

REAL = Path(__file__).with_name("bridge") / "gemma3_vl_0.6"
EARLIER = ("gemma3_vl_0.4", "gemma3_vl_0.5")
FIRST_RUN = REAL.with_name("gemma3_vl")
TEXT = 6
"""The id that the text of these runs has in the place of an image's."""


@pytest.fixture
def base(convert, tmp_path) -> Path:
    """The Hugging Face folder that is read of 0.6.2's run: nothing has to be accepted."""
    ran = convert("megatron2hf", REAL, tmp_path / "base", "--config", REAL)
    assert ran.code == 0, ran.err
    return tmp_path / "base"


def with_fields(run: Path, at: Path, changes: dict[str, Any]) -> Path:
    """A run with other fields of its model's class."""
    copy = shutil.copytree(run, at)
    path = copy / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    document["model"] |= changes
    path.write_text(yaml.safe_dump(document))
    return copy


def as_released(folder: Path) -> Path:
    """A model without the head of its tower, with images within a window."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if ".head." not in key}
    assert kept.keys() < tensors.keys()
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["vision_use_head"] = False
    config["mm_tokens_per_image"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_its_logits(base):
    """What 0.6.2's modules compute, transformers does where it is told which tokens are of an image; settings show."""
    assert max(differences(base, told=True, golden=REAL, text=TEXT)) < 5e-6
    seen, text = differences(base, golden=REAL, text=TEXT)
    assert seen > 0.1
    assert text < 5e-6

    def other_tower(config: dict[str, Any]) -> None:
        config["vision_config"]["hidden_act"] = "relu"

    seen, text = differences(base, other_tower, told=True, golden=REAL, text=TEXT)
    assert seen > 1e-3
    assert text < 5e-6

    def other_window(config: dict[str, Any]) -> None:
        config["text_config"]["sliding_window"] = 9

    assert min(differences(base, other_window, told=True, golden=REAL, text=TEXT)) > 1e-4


@pytest.mark.parametrize("topology", [(), ("--tp", 2), ("--pp", 2), ("--tp", 2, "--pp", 2), ("--archive",)])
def test_what_it_loads(convert, base, tmp_path, topology):
    """Every tensor that 0.6.2 saves, and every state that it asks for; the fields as it has written them; and back.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    run = tmp_path / "run"
    ran = convert("hf2megatron", base, run, *BRIDGE, *topology)
    assert ran.code == 0, ran.err
    assert "for Megatron-Bridge's Gemma3VLModelProvider alone" in ran.err
    assert "for its releases from 0.6.0 on" in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(REAL / ITERATION)
    theirs = {key: tensor for key, tensor in theirs.items() if not key.startswith("common_state")}
    assert all("_extra_state" in key for key in ours.keys() - theirs.keys())
    assert all(tensor is None or np.array_equal(tensor, ours[key]) for key, tensor in theirs.items())
    written, known = fields_of(run), fields_of(REAL)
    tower, its = written.pop("vision_config"), known.pop("vision_config")
    assert tower["_target_"].removesuffix(".from_dict") == its["_target_"]
    assert {key for key, value in tower["config_dict"].items() if its.get(key) != value} == set()
    projector, its = written.pop("vision_projector_config"), known.pop("vision_projector_config")
    assert {key for key, value in projector.items() if its[key] != value} == set()
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    assert {name for name in written if written[name] != known[name]} <= sizes
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert convert("reshard", run, tmp_path / "again", "--for", "bridge", "--tp", 2).code == 0
    digests = {convert("digest", folder).out.split()[0] for folder in (run, tmp_path / "again", base)}
    assert len(digests) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(convert, tmp_path, tied):
    """Files as transformers 5 saves them, into the layouts of 0.6.2 and of 0.3.1, and from one to the other."""
    source = save(build("gemma3", tied, vocab_size=64, rms_norm_eps=1e-5), tmp_path / "whole")
    ran = convert("hf2megatron", source, tmp_path / "no", *BRIDGE)
    refused(ran, 5, "without the head that vision_use_head asks for")
    as_released(source)
    assert convert("hf2hf", source, tmp_path / "half", "--dtype", "bf16").code == 0
    for number, options in enumerate(((), FIRST)):
        run, out = tmp_path / f"run{number}", tmp_path / f"out{number}"
        ran = convert("hf2megatron", source, run, *BRIDGE, *options, "--tp", 2, "--pp", 2, "--dtype", "bf16")
        assert ran.code == 0, ran.err
        ran = convert("megatron2hf", run, out, *options[:2])
        assert ran.code == 0, ran.err
        assert "names and shapes checked against: transformers" in ran.err
        assert convert("diff", out, tmp_path / "half", "--tensors").code == 0
    ran = convert("reshard", tmp_path / "run1", tmp_path / "again", "--for", "bridge", *ACCEPT)
    assert ran.code == 0, ran.err
    later, again = (contents(tmp_path / name / "iter_0000000") for name in ("run0", "again"))
    assert later.keys() == again.keys()
    assert all(tensor is None or np.array_equal(tensor, again[key]) for key, tensor in later.items())


@pytest.mark.parametrize("name", EARLIER)
def test_a_run_of_an_earlier_release(convert, base, tmp_path, name):
    """The names of 0.3.1 or of 0.6, and an attention that is causal within an image: read with `--accept` alone."""
    run = REAL.with_name(name)
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL)
    refused(ran, 5, "the tokens of an image see only those before them", *ACCEPT)
    ran = convert("megatron2hf", run, tmp_path / "out", "--config", REAL, *ACCEPT)
    assert ran.code == 0, ran.err
    assert max(differences(tmp_path / "out", golden=run, text=TEXT)) < 5e-6
    seen, _ = differences(tmp_path / "out", told=True, golden=run, text=TEXT)
    assert seen > 0.1
    assert convert("diff", tmp_path / "out", base, "--tensors").code == 0


def test_windows_of_0_3_1_and_later(convert, tmp_path):
    """The tensors of 0.3.1, with the window of later releases, which fields tell that 0.3.1 has not."""
    later = dict.fromkeys(("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"))
    run = with_fields(FIRST_RUN, tmp_path / "run", {**later, "window_size": 8})
    refused(convert("megatron2hf", run, tmp_path / "no", "--config", FIRST_RUN), 5, *ACCEPT)
    for source, out in ((run, "out"), (FIRST_RUN, "first")):
        ran = convert("megatron2hf", source, tmp_path / out, "--config", FIRST_RUN, *ACCEPT)
        assert ran.code == 0, ran.err
    assert convert("diff", tmp_path / "out", tmp_path / "first", "--tensors").code == 0
    odd = with_fields(FIRST_RUN, tmp_path / "odd", later)
    ran = convert("megatron2hf", odd, tmp_path / "no", "--config", FIRST_RUN, *ACCEPT)
    refused(ran, 5, "sliding_window: 7 | 8")


def test_what_it_computes_otherwise(convert, base, tmp_path):
    """An image that is larger than a window, and no window at all."""
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "4 tokens of an image and a window of 3": ("text_config", {"sliding_window": 3}),
        "a window of None": ("text_config", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    }
    for number, (message, (part, values)) in enumerate(changes.items()):
        folder = shutil.copytree(base, tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        config[part] |= values
        (folder / "config.json").write_text(json.dumps(config))
        refused(convert("hf2megatron", folder, tmp_path / "no", *BRIDGE), 5, message)
    run = with_fields(REAL, tmp_path / "run", {"window_size": 3})
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", tmp_path / "0")
    refused(ran, 5, "4 tokens of an image and a window of 3")


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "image_token_id: 59 | 60": {"image_token_id": 59},
    "mm_tokens_per_image: 16 | 4": {"mm_tokens_per_image": 16},
    "sliding_window: 9 | 8": {"window_size": 9},
    "yarn_rotary_scaling_factor = 2.0": {"yarn_rotary_scaling_factor": 2.0},
    "own_field": {"own_field": 3},
}
"""Part of an error: fields of a file that its config does not say, or that no model of the class has."""


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_fields_that_the_config_contradicts(convert, tmp_path, message):
    run = with_fields(REAL, tmp_path / "run", CONTRADICTIONS[message])
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL)
    assert ran.code in (4, 5), ran.err
    assert message in ran.err
    assert not (tmp_path / "no").exists()


def test_only_text(convert, base, tmp_path):
    """Without the tower nothing has to be accepted, whatever release wrote the run."""
    for name in (REAL.name, *EARLIER):
        assert convert("megatron2hf", REAL.with_name(name), tmp_path / name, "--only", "text").code == 0
    assert convert("hf2hf", base, tmp_path / "text", "--only", "text").code == 0
    assert len({convert("digest", tmp_path / name).out.split()[0] for name in (REAL.name, *EARLIER, "text")}) == 1


def test_a_tower_that_lacks_a_tensor(convert, tmp_path):
    run, name = shutil.copytree(REAL, tmp_path / "run"), "vision_tower.post_layernorm.weight"

    def drop(metadata: Any) -> None:
        del metadata.state_dict_metadata[name]
        stored = metadata.storage_data.items()
        metadata.storage_data = {index: where for index, where in stored if index.fqn != name}

    edit(run / ITERATION, drop)
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL)
    refused(ran, 3, "vision_tower.post_layernorm.weight is missing")
