"""Gemma 3 with images of Megatron-Bridge 0.3.1, whose modules wrote and computed tests/golden/bridge/gemma3_vl.

That of later releases is in `test_bridge_gemma3_later.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.faults.dcp_tools import edit, refused
from tests.golden.test_bridge_lora import contents
from tests.golden.test_only_text import build, save

REAL = Path(__file__).with_name("bridge") / "gemma3_vl"
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
ACCEPT = ("--accept", "image_attention")
FIRST = (*ACCEPT, "--megatron-version", "0.16")
"""For Megatron-Bridge 0.3.1, which runs with no later megatron-core."""
HERE = ("--config", REAL)
PROJECTION = "multi_modal_projector.mm_input_projection_weight"


@pytest.fixture
def base(convert, tmp_path) -> Path:
    """The Hugging Face folder that is read of Bridge's run."""
    ran = convert("megatron2hf", REAL, tmp_path / "base", *HERE, *ACCEPT)
    assert ran.code == 0, ran.err
    assert "in Megatron-Bridge up to 0.5 the tokens of an image see only those before them" in ran.err
    return tmp_path / "base"


def differences(
    folder: Path,
    change: Callable[[dict[str, Any]], Any] = lambda _: None,
    *,
    told: bool = False,
    golden: Path = REAL,
    text: int = 60,
) -> tuple[float, float]:
    """How far the logits of transformers are from those of Bridge's modules: of an image in text, and of text.

    `told` which tokens are of an image, it lets these see each other. `golden` has a run's logits, and `text` is the id
    that its text has in the place of an image's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = json.loads((folder / "config.json").read_text())
    change(config)
    bridge = {name: torch.tensor(value) for name, value in np.load(golden / "golden.npz").items()}
    known, ids = AutoConfig.for_model(**config), bridge["ids"]
    model = AutoModelForImageTextToText.from_pretrained(folder, config=known, dtype=torch.float32).eval()
    image = {"pixel_values": bridge["pixels"]} | ({"token_type_ids": (ids == 60).long()} if told else {})
    with torch.no_grad():
        seen = model(input_ids=ids, **image).logits
        read = model(input_ids=torch.where(ids == 60, text, ids)).logits
    return float((seen - bridge["logits"]).abs().max()), float((read - bridge["text"]).abs().max())


def fields_of(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(next(run.glob("iter_*/run_config.yaml")).read_text())["model"])


def with_fields(at: Path, changes: dict[str, Any]) -> Path:
    """Bridge's run with other fields; those of a field inside by its name and theirs."""
    run = shutil.copytree(REAL, at)
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        if name == "vision_config":
            document["model"][name]["config_dict"] |= value
        elif name == "vision_projector_config":
            document["model"][name] |= value
        else:
            document["model"][name] = value
    path.write_text(yaml.safe_dump(document))
    return run


def test_its_logits(base):
    """What Bridge's modules compute, transformers does of what is read; towers and projectors show."""
    assert max(differences(base)) < 5e-6

    def other_tower(config: dict[str, Any]) -> None:
        config["vision_config"]["hidden_act"] = "relu"

    def other_norm(config: dict[str, Any]) -> None:
        config["vision_config"]["layer_norm_eps"] = 1e-2

    for change in (other_tower, other_norm):
        seen, read = differences(base, change)
        assert seen > 1e-3
        assert read < 5e-6


def test_an_image_that_sees_all_of_itself(base):
    """What transformers does where its processor says which tokens are of an image, and Bridge 0.3.1 does not."""
    seen, read = differences(base, told=True)
    assert seen > 0.1
    assert read < 5e-6


@pytest.mark.parametrize("topology", [(), ("--tp", 2), ("--pp", 2), ("--tp", 2, "--pp", 2), ("--archive",)])
def test_what_it_loads(convert, base, tmp_path, topology):
    """Every tensor that Bridge saves, and every state that it asks for; the fields as it has written them.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    run = tmp_path / "run"
    ran = convert("hf2megatron", base, run, *BRIDGE, *FIRST, *topology)
    assert ran.code == 0, ran.err
    assert "for Megatron-Bridge's Gemma3VLModelProvider alone" in ran.err
    assert "for its release 0.3.1" in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(REAL / ITERATION)
    older = {name for name in ours if ".core_attention._extra_state/" in name}  # of megatron-core up to 0.14
    assert len(older) == 4
    assert ours.keys() - older == theirs.keys()
    assert all(tensor is None or np.array_equal(tensor, ours[key]) for key, tensor in theirs.items())
    written, known = fields_of(run), fields_of(REAL)
    for name in ("vision_config", "vision_projector_config"):
        mine, its = written.pop(name), known.pop(name)
        assert mine["_target_"] == its["_target_"]
        mine, its = (fields.get("config_dict", fields) for fields in (mine, its))
        assert {key for key, value in mine.items() if its.get(key) != value} <= {"dtype", "torch_dtype"}
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    assert {name for name in written if written[name] != known[name]} <= sizes
    assert convert("megatron2hf", run, tmp_path / "back", *ACCEPT).code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert convert("reshard", run, tmp_path / "again", "--for", "bridge", "--tp", 2, *FIRST).code == 0
    digests = {
        convert("digest", folder, *ACCEPT).out.split()[0] for folder in (run, tmp_path / "again")
    }  # fmt: skip
    assert digests == {convert("digest", base).out.split()[0]}


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(convert, tmp_path, tied):
    """Files as transformers 5 saves them, and a training with FSDP: the names of the Hub, and the same weights."""
    from safetensors.torch import load_file

    source = save(build("gemma3", tied, vocab_size=64, rms_norm_eps=1e-5), tmp_path / "whole")
    assert "vision_tower.post_layernorm.weight" in load_file(source / "model.safetensors")
    run, out = tmp_path / "run", tmp_path / "out"
    ran = convert("hf2megatron", source, run, *BRIDGE, *FIRST, "--tp", 2, "--pp", 2, "--dtype", "bf16")
    assert ran.code == 0, ran.err
    assert convert("hf2hf", source, tmp_path / "half", "--dtype", "bf16").code == 0
    ran = convert("megatron2hf", run, out, *ACCEPT)
    assert ran.code == 0, ran.err
    assert "names and shapes checked against: transformers" in ran.err
    assert "vision_tower.vision_model.post_layernorm.weight" in load_file(out / "model.safetensors")
    assert convert("verify", out, tmp_path / "half").code == 0
    assert convert("diff", out, tmp_path / "half", "--tensors").code == 0
    assert convert("verify", run, tmp_path / "half", *ACCEPT).code == 0
    assert convert("hf2fsdp", source, tmp_path / "fsdp", "--ranks", 2).code == 0
    for number, folder in enumerate((source, tmp_path / "fsdp")):
        ran = convert("hf2megatron", folder, tmp_path / str(number), *BRIDGE, *FIRST)
        assert ran.code == 0, ran.err
    assert len({convert("digest", tmp_path / name, *ACCEPT).out.split()[0] for name in "01"}) == 1


def test_files_that_differ_in_one_element(convert, tmp_path):
    """Whichever names the tower of each has."""
    from safetensors.torch import load_file, save_file

    source, run = save(build("gemma3", True, vocab_size=64, rms_norm_eps=1e-5), tmp_path / "whole"), tmp_path / "run"
    assert convert("hf2megatron", source, run, *BRIDGE, *FIRST).code == 0
    tensors = load_file(source / "model.safetensors")
    tensors[PROJECTION][3, 5] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert convert("megatron2hf", run, tmp_path / "out", *ACCEPT).code == 0
    ran = convert("verify", tmp_path / "out", source)
    assert (ran.code, "1 of 120 tensors" in ran.err, PROJECTION in ran.err) == (6, True, True)


def test_a_tower_that_is_there_twice(convert, base, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    tensors["vision_tower.post_layernorm.weight"] = tensors["vision_tower.vision_model.post_layernorm.weight"] + 1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    (base / "vitruvian.json").unlink()
    ran = convert("hf2megatron", base, tmp_path / "no", *BRIDGE, *FIRST)
    assert ran.code == 3
    assert "post_layernorm.weight" in ran.err


def test_only_by_name(convert, base, tmp_path):
    """What it computes otherwise has to be accepted, into Bridge and out of it; of text it computes the same."""
    what = "the tokens of an image see only those before them"
    refused(convert("hf2megatron", base, tmp_path / "no", *BRIDGE, *FIRST[2:]), 5, what, *ACCEPT)
    refused(convert("megatron2hf", REAL, tmp_path / "no", *HERE), 5, what, *ACCEPT)
    ran = convert("megatron2hf", REAL, tmp_path / "alone", "--only", "text")
    assert ran.code == 0, ran.err
    assert "--only text leaves out" in ran.err
    assert convert("megatron2hf", REAL, tmp_path / "known", "--only", "text", *HERE).code == 0
    digests = {convert("digest", tmp_path / name).out.split()[0] for name in ("alone", "known")}
    assert len(digests) == 1
    assert convert("hf2hf", base, tmp_path / "text", "--only", "text").code == 0
    assert convert("diff", tmp_path / "known", tmp_path / "text", "--tensors").code == 0
    refused(convert("megatron2hf", REAL, tmp_path / "no", *ACCEPT), 3, "the config of its tower", "--config BASE")


def test_two_epsilons(convert, base, tmp_path):
    """Both deviations, each by its name."""
    path, run = base / "config.json", tmp_path / "run"
    config = json.loads(path.read_text())
    config["text_config"]["rms_norm_eps"] = 1e-6
    path.write_text(json.dumps(config))
    refused(convert("hf2megatron", base, run, *BRIDGE, *FIRST), 5, "--accept post_layernorm_epsilon")
    both = (*ACCEPT, "--accept", "post_layernorm_epsilon")
    assert convert("hf2megatron", base, run, *BRIDGE, *both, *FIRST[2:]).code == 0
    ran = convert("megatron2hf", run, tmp_path / "out", *both)
    assert (ran.code, "they are taken as one" in ran.err) == (0, True), ran.err


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "image_token_id: 59 | 60": {"image_token_id": 59},
    "mm_tokens_per_image: 16 | 4": {"mm_tokens_per_image": 16},
    "vision_config.patch_size: 8 | 4": {"vision_config": {"patch_size": 8}},
    "vision_projector_config.image_size: 896 | 16": {"vision_projector_config": {"image_size": 896}},
    "vision_projector_config.tokens_per_image: None | 4": {"vision_projector_config": {"tokens_per_image": None}},
    "vision_projector_config.normalization: 'LayerNorm'": {"vision_projector_config": {"normalization": "LayerNorm"}},
    "vision_projector_config._target_": {"vision_projector_config": {"_target_": "mine.Projector"}},
    "is_vision_language: True | False": {"is_vision_language": True},
    "sliding_window: 9 | 8": {"window_size": 8},
    "own_field": {"own_field": 3},
}
"""Part of an error: fields of a file that its config does not say, or that no model of the class has."""


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_fields_that_the_config_contradicts(convert, tmp_path, message):
    run = with_fields(tmp_path / "run", CONTRADICTIONS[message])
    ran = convert("megatron2hf", run, tmp_path / "no", *HERE, *ACCEPT)
    assert ran.code in (3, 4, 5), ran.err
    assert message in ran.err
    assert not (tmp_path / "no").exists()


def test_a_tower_that_lacks_a_tensor(convert, base, tmp_path):
    """Into Bridge and out of it: no table tells what a tower has, and transformers does."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    del tensors[PROJECTION]
    (base / "vitruvian.json").unlink()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    refused(convert("hf2megatron", base, tmp_path / "no", *BRIDGE, *FIRST), 3, PROJECTION)
    run, name = shutil.copytree(REAL, tmp_path / "run"), "multi_modal_projector.proj.weight"

    def drop(metadata: Any) -> None:
        del metadata.state_dict_metadata[name]
        stored = metadata.storage_data.items()
        metadata.storage_data = {index: where for index, where in stored if index.fqn != name}

    edit(run / ITERATION, drop)
    refused(convert("megatron2hf", run, tmp_path / "no", *HERE, *ACCEPT), 3, PROJECTION)
    (run / ITERATION / "__0_1.distcp").unlink()
    assert convert("megatron2hf", run, tmp_path / "no", *HERE, *ACCEPT).code == 3
    assert not (tmp_path / "no").exists()


def test_what_it_does_not_hold(convert, base, tmp_path):
    """A config of another model, a vocabulary that does not divide, and a config that its class cannot say."""
    ran = convert("megatron2hf", REAL, tmp_path / "no", "--config", REAL.with_name("qwen3_vl"), *ACCEPT)
    refused(ran, 3, "'qwen3_vl'", "is of a gemma3", "--config")
    refused(convert("megatron2hf", REAL, tmp_path / "no", "--adapter", "only"), 4, "an adapter of a gemma3")
    for options in ((), ("--format", "torch_dist")):
        ran = convert("hf2megatron", base, tmp_path / "no", *options, *ACCEPT)
        refused(ran, 4, "has no Megatron layout", " ".join(BRIDGE), "--only text")
    odd = save(build("gemma3", True, vocab_size=63, rms_norm_eps=1e-5), tmp_path / "odd")
    refused(convert("hf2megatron", odd, tmp_path / "no", *BRIDGE, *FIRST, "--tp", 2), 5, "63 tokens", "pads none")
    uneven = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    source = save(build("gemma3", True, layer_types=uneven, rms_norm_eps=1e-5), tmp_path / "uneven")
    refused(convert("hf2megatron", source, tmp_path / "no", *BRIDGE, *FIRST), 5, "the last has no window")
    assert not (tmp_path / "no").exists()
