"""Mistral 3 of Megatron-Bridge 0.6.2, whose modules wrote and computed tests/golden/bridge/mistral3."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.faults.dcp_tools import refused
from tests.golden.test_bridge_lora import contents
from tests.golden.test_only_text import build, save

REAL = Path(__file__).with_name("bridge") / "mistral3"
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
FIRST = ("--megatron-version", "0.16")
CLASS = "Ministral3ModelProvider"


def differences(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> tuple[float, float]:
    """How far the logits of transformers are from those of Bridge's modules: of an image in text, and of text."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = json.loads((folder / "config.json").read_text())
    change(config)
    golden = {name: torch.tensor(value) for name, value in np.load(REAL / "golden.npz").items()}
    known = AutoConfig.for_model(**config)
    model = AutoModelForImageTextToText.from_pretrained(folder, config=known, dtype=torch.float32).eval()
    image = {"pixel_values": golden["pixels"], "image_sizes": golden["sizes"]}
    with torch.no_grad():
        seen, read = model(input_ids=golden["ids"], **image).logits, model(input_ids=golden["ids"]).logits
    return float((seen - golden["logits"]).abs().max()), float((read - golden["text"]).abs().max())


@pytest.fixture
def base(convert, tmp_path) -> Path:
    """The Hugging Face folder that is read of Bridge's run."""
    ran = convert("megatron2hf", REAL, tmp_path / "base", "--config", REAL)
    assert ran.code == 0, ran.err
    return tmp_path / "base"


def fields_of(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(next(run.glob("iter_*/run_config.yaml")).read_text())["model"])


def with_fields(at: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Bridge's run with other fields."""
    run = shutil.copytree(REAL, at)
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    change(document["model"])
    path.write_text(yaml.safe_dump(document))
    return run


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a range that is truncated": ("rope_parameters", {"truncate": True}),
    "queries that grow otherwise": ("rope_parameters", {"llama_4_scaling_beta": 0.1}),
    "another original length": ("rope_parameters", {"original_max_position_embeddings": 16}),
    "another factor": ("rope_parameters", {"factor": 8.0}),
    "another base": ("rope_parameters", {"rope_theta": 200.0}),
}


def test_its_logits(base):
    """What Bridge's modules compute, transformers does of what is read; and each setting shows in the logits."""
    assert max(differences(base)) < 1e-5
    for why, (name, changes) in WRONG.items():

        def change(config: dict[str, Any], name: str = name, changes: dict[str, Any] = changes) -> None:
            config["text_config"][name] |= changes

        assert min(differences(base, change)) > 1e-4, why
    seen, text = differences(base, lambda config: config["vision_config"].update(hidden_act="gelu"))
    assert seen > 1e-3
    assert text < 1e-5


@pytest.mark.parametrize("topology", [(), ("--tp", 2), ("--pp", 2), ("--tp", 2, "--pp", 2)])
def test_what_it_loads(convert, tmp_path, base, topology):
    """Every tensor that Bridge saves, and every state that it asks for; the fields as it has written them; and back.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    run = tmp_path / "run"
    ran = convert("hf2megatron", base, run, *BRIDGE, *topology)
    assert ran.code == 0, ran.err
    assert f"for Megatron-Bridge's {CLASS} alone" in ran.err
    assert "for its releases from 0.4.0 on" in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(REAL / ITERATION)
    theirs = {key: tensor for key, tensor in theirs.items() if not key.startswith("common_state")}
    assert all("_extra_state" in name for name in ours.keys() - theirs.keys())
    assert not theirs.keys() - ours.keys()
    assert all(tensor is None or np.array_equal(tensor, ours[key]) for key, tensor in theirs.items())
    written, known = fields_of(run), fields_of(REAL)
    whole, its = written.pop("hf_config"), known.pop("hf_config")
    assert whole["_target_"].removesuffix(".from_dict") == its["_target_"]
    for part in ("text_config", "vision_config"):
        ours_of_it, theirs_of_it = whole["config_dict"].pop(part), its.pop(part)
        assert {key for key, value in ours_of_it.items() if theirs_of_it.get(key) != value} <= {"dtype", "torch_dtype"}
    further = {"dtype", "torch_dtype", "model_type"}  # of which 0.6.2 leaves the last one to the class
    assert {key for key, value in whole["config_dict"].items() if its.get(key) != value} <= further
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    assert {name for name in written if written[name] != known[name]} <= sizes
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())
    digests = {convert("digest", folder).out.split()[0] for folder in (run, base)}
    assert len(digests) == 1


def test_without_a_config(convert, tmp_path):
    """The fields hold the config of the whole."""
    ran = convert("megatron2hf", REAL, tmp_path / "base")
    assert ran.code == 0, ran.err
    assert "its config.json is made of the configs in run_config.yaml" in ran.err
    assert "names and shapes checked against: transformers" in ran.err
    assert max(differences(tmp_path / "base")) < 1e-5
    run = with_fields(tmp_path / "run", lambda fields: fields["hf_config"].pop("text_config"))
    refused(convert("megatron2hf", run, tmp_path / "no"), 4, "queries grow each None positions")


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(convert, tmp_path, tied):
    """Files as transformers saves them, of other sizes: the same weights, and the same config."""
    source, run = save(build("mistral3", tied, vocab_size=64), tmp_path / "whole"), tmp_path / "run"
    ran = convert("hf2megatron", source, run, *BRIDGE, "--tp", 2)
    assert ran.code == 0, ran.err
    assert fields_of(run)["share_embeddings_and_output_weights"] is tied
    ran = convert("megatron2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "names and shapes checked against: transformers" in ran.err
    ran = convert("verify", tmp_path / "out", source)
    assert ran.code == 0, ran.err


def test_its_language_model_alone(convert, tmp_path, base):
    """Without the config of the whole, and the same as of the whole's files."""
    assert convert("hf2hf", base, tmp_path / "text", "--only", "text").code == 0
    ran = convert("megatron2hf", REAL, tmp_path / "alone", "--only", "text")
    assert ran.code == 0, ran.err
    assert "--only text leaves out 24 tensors: vision_tower, multi_modal_projector" in ran.err
    assert len({convert("digest", tmp_path / name).out.split()[0] for name in ("alone", "text")}) == 1
    ropes = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("alone", "text")]
    alone, text = (config.get("rope_parameters") or config["rope_scaling"] for config in ropes)
    assert {key: text[key] for key in alone} == alone
    ran = convert("hf2megatron", tmp_path / "alone", tmp_path / "no", *BRIDGE)
    refused(ran, 4, f"{CLASS} builds a ministral3 with a tower alone", "a mistral3")
    ran = convert("hf2megatron", tmp_path / "alone", tmp_path / "no", *BRIDGE, *FIRST)
    refused(ran, 4, "Megatron-Bridge's release 0.3.1 does not compute it")
    for options in ((), ("--format", "torch_dist")):
        ran = convert("hf2megatron", base, tmp_path / "no", *options)
        refused(ran, 4, "has no Megatron layout", " ".join(BRIDGE))
    refused(
        convert("hf2megatron", base, tmp_path / "no", *BRIDGE, *FIRST),
        5,
        f"{CLASS} is written for Megatron-Bridge in its releases from",
    )


def test_texts_that_the_class_does_not_compute(convert, tmp_path, base):
    """That of Mistral Small 3.1, a window, and other scalings."""
    text = {"model_type": "mistral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 128, "sliding_window": None}  # fmt: skip
    source = save(build("mistral3", False, **text), tmp_path / "small")
    what = f"{CLASS} computes a ministral3, and this text is a mistral"
    refused(convert("hf2megatron", source, tmp_path / "no", *BRIDGE), 5, what)
    config = json.loads((base / "config.json").read_text())
    ropes = config["text_config"]["rope_parameters"]
    for changes, message in (
        ({"sliding_window": 8}, "its attention has no window, and this model's 8"),
        ({"rope_parameters": ropes | {"attention_factor": 2.0}}, "its rotary embeddings are YaRN"),
    ):
        changed = config | {"text_config": config["text_config"] | changes}
        (base / "config.json").write_text(json.dumps(changed))
        refused(convert("hf2megatron", base, tmp_path / "no", *BRIDGE), 5, message)


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "image_token_id: 10 | 60": lambda fields: fields.update(image_token_id=10),
    "hf_config.spatial_merge_size: 4 | 2": lambda fields: fields["hf_config"].update(spatial_merge_size=4),
    "hf_config.vision_feature_layer: -2 | -1": lambda fields: fields["hf_config"].update(vision_feature_layer=-2),
    "hf_config.vision_config.num_attention_heads: 4 | 2": lambda fields: fields["hf_config"]["vision_config"].update(
        num_attention_heads=4
    ),
    "hf_config.vision_config.rope_parameters.rope_theta: 5.0 | 10000.0": lambda fields: fields["hf_config"][
        "vision_config"
    ]["rope_parameters"].update(rope_theta=5.0),
    "hf_config.text_config.rms_norm_eps: 0.1 | 1e-05": lambda fields: fields["hf_config"]["text_config"].update(
        rms_norm_eps=0.1
    ),
    "'llama_4_scaling_beta': 0.2": lambda fields: fields["hf_config"]["text_config"]["rope_parameters"].update(
        llama_4_scaling_beta=0.2
    ),
    "'truncate': True": lambda fields: fields.update(yarn_correction_range_round_to_int=True),
    "yarn_original_max_position_embeddings = 16384, and queries grow each 8 positions": lambda fields: fields.update(
        yarn_original_max_position_embeddings=16384
    ),
    "position_embedding_type = 'rope'": lambda fields: fields.update(position_embedding_type="rope"),
    "window_size = 8": lambda fields: fields.update(window_size=8),
    "own_field": lambda fields: fields.update(own_field=3),
}
"""Part of an error: a change of the fields, to what the config does not say or the class does not compute."""


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_fields_that_the_config_contradicts(convert, tmp_path, message):
    run = with_fields(tmp_path / "run", CONTRADICTIONS[message])
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL)
    assert ran.code in (3, 4, 5), ran.err
    assert message in ran.err
    assert not (tmp_path / "no").exists()


def test_what_a_config_leaves_out_is_assumed():
    """The defaults of the whole and of its tower are those of their classes in transformers."""
    from transformers import Mistral3Config, PixtralVisionConfig

    from formats.megatron.args.vision import ASSUMED

    assumed = dict(ASSUMED["Mistral3Config"])
    tower, text = assumed.pop("vision_config"), assumed.pop("text_config")
    whole = Mistral3Config(text_config={"model_type": "ministral3"}, vision_config={"model_type": "pixtral"}).to_dict()
    assert {key: whole[key] for key in assumed} == assumed
    assert {key: whole["text_config"][key] for key in text} == text
    made = PixtralVisionConfig().to_dict()
    assert {key: made[key] for key in tower if key != "rope_parameters"} | {
        "rope_parameters": {"rope_theta": made["rope_parameters"]["rope_theta"]}
    } == tower
