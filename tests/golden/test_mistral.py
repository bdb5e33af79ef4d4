"""Mistral's own files, which mistral-inference wrote, there and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused
from tests.roundtrip.test_not_refused import logits

REAL = Path(__file__).with_name("mistral")
KINDS = ("dense", "experts")
LENGTH = ("--set", "max_positions=64")


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(convert, tmp_path, kind):
    """transformers computes what mistral-inference did; and back come the tensors that it loaded, bit for bit."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out, again, golden = tmp_path / "out", tmp_path / "again", np.load(REAL / kind / "golden.npz")
    assert convert("mistral2hf", REAL / kind, out, *LENGTH).code == 0
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        logits = model(torch.tensor(golden["ids"])[None]).logits.numpy()[0]
    assert np.abs(logits - golden["logits"]).max() < 1e-5 < np.abs(logits).max()
    assert convert("to", "mistral", out, again).code == 0
    before, after = (load_file(place / "consolidated.safetensors") for place in (REAL / kind, again))
    assert {key: tensor.tolist() for key, tensor in before.items()} == {k: t.tolist() for k, t in after.items()}
    theirs, ours = (json.loads((place / "params.json").read_text()) for place in (REAL / kind, again))
    assert {key: ours.get(key, value) for key, value in theirs.items()} == theirs
    assert convert("diff", REAL / kind, again, *LENGTH).code == 0
    assert "mistral" in convert("inspect", again).out


def test_several_files(convert, tmp_path):
    """As the large models are published: an index says which file holds what."""
    from safetensors.torch import load_file, save_file

    run = shutil.copytree(REAL / "dense", tmp_path / "run")
    tensors = load_file(run / "consolidated.safetensors")
    (run / "consolidated.safetensors").unlink()
    names = {key: f"consolidated-0000{number % 2 + 1}-of-00002.safetensors" for number, key in enumerate(tensors)}
    for name in {*names.values()}:
        save_file({key: tensors[key] for key in tensors if names[key] == name}, run / name)
    index = run / "consolidated.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert convert("diff", run, REAL / "dense", *LENGTH).code == 0
    index.write_text(json.dumps({"weight_map": names | {"norm.weight": names["output.weight"]}}))
    if names["norm.weight"] != names["output.weight"]:
        refused(convert("inspect", run, *LENGTH), 3, "norm.weight")


@pytest.mark.parametrize(
    "name", ["consolidated.00.safetensors", "consolidated-00001-of-00001.safetensors", "model.safetensors"]
)
def test_two_models_in_a_folder_are_refused(convert, tmp_path, name):
    run = shutil.copytree(REAL / "dense", tmp_path / "run")
    (run / name).write_bytes((run / "consolidated.safetensors").read_bytes())
    refused(convert("mistral2hf", run, tmp_path / "out", *LENGTH), 3, name)


def test_what_is_refused(convert, model, tmp_path):
    """What params.json leaves open, what no reader knows, and models that these files cannot hold."""
    refused(convert("mistral2hf", REAL / "dense", tmp_path / "out"), 3, "max_positions")
    changes = {
        "rope_theta": ({"rope_theta": None}, 3),
        "llama_4_scaling": ({"llama_4_scaling": {"beta": 0.1}}, 4),
        "vision_encoder": ({"vision_encoder": {"hidden_size": 8}}, 4),
        "tied_embeddings": ({"tied_embeddings": True}, 4),
        "windows in some layers": ({"sliding_window": [None, 8]}, 4),
    }
    for number, (message, (change, code)) in enumerate(changes.items()):
        run = shutil.copytree(REAL / "dense", tmp_path / str(number))
        params = json.loads((run / "params.json").read_text()) | change
        (run / "params.json").write_text(json.dumps(params))
        refused(convert("inspect", run, *LENGTH), code, message)
    refused(convert("hf2mistral", model("llama"), tmp_path / "out"), 4, "a llama has no files of Mistral's own")
    assert not (tmp_path / "out").exists()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("beside", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize(
    ("name", "key", "value", "setting"),
    [
        ("mistral", "rope_parameters", YARN, "rope_scaling"),
        ("mixtral", "rope_parameters", YARN, "rope_scaling"),
        ("mistral", "rope_parameters", {"rope_theta": 500}, "rope_theta"),
        ("mistral", "rms_norm_eps", 0.1, "norm_epsilon"),
        ("mistral", "max_position_embeddings", 77, "max_positions"),
        ("mistral", "sliding_window", 4, "sliding_window"),
        ("mistral", "sliding_window", None, "sliding_window"),
        ("mixtral", "num_experts_per_tok", 1, "top_k"),
    ],
)
def test_a_setting_of_the_user(convert, model, tmp_path, name, key, value, setting, beside):
    """It overrules params.json and the config beside it, as it overrules a config alone."""
    from transformers import AutoConfig

    source, run, out, expected = model(name, head_dim=16), tmp_path / "run", tmp_path / "out", tmp_path / "expected"
    assert convert("hf2mistral", source, run).code == 0
    (run / "vitruvian.json").unlink()
    if not beside:
        (run / "config.json").unlink()
    option = ("--set", f"{setting}={json.dumps(value.get(setting, value) if isinstance(value, dict) else value)}")
    assert convert("mistral2hf", run, out, *option).code == 0
    assert convert("hf2hf", source, expected, *option).code == 0
    got = getattr(AutoConfig.from_pretrained(out), key)
    assert got | value == got if isinstance(value, dict) else got == value
    assert (logits(out) == logits(expected)).all()
    assert key == "max_position_embeddings" or (logits(out) != logits(source)).any()


def test_a_contradiction_that_no_setting_of_the_user_decides(convert, model, tmp_path):
    run = tmp_path / "run"
    assert convert("hf2mistral", model("mistral"), run).code == 0
    params = json.loads((run / "params.json").read_text())
    (run / "params.json").write_text(json.dumps(params | {"rope_theta": 7.0}))
    refused(convert("inspect", run, "--set", "norm_epsilon=0.1"), 5, "rope_theta: 7.0 | 10000.0", "--set NAME=VALUE")
    assert convert("inspect", run, "--set", "norm_epsilon=0.1", "--set", "rope_theta=7").code == 0


@pytest.mark.parametrize(
    ("windows", "said"),
    [((8, 16), "sliding_window = 8 and _sliding_window = 16"), (([8, 8], [16]), "sliding_window = [8, 8] and"),
     ((8, [8, 8]), ""), ((None, 16), ""), ((16, None), "")],
)  # fmt: skip
def test_two_keys_of_the_window(convert, tmp_path, windows, said):
    run = shutil.copytree(REAL / "dense", tmp_path / "run")
    params = json.loads((run / "params.json").read_text())
    params |= {"sliding_window": windows[0], "_sliding_window": windows[1]}
    (run / "params.json").write_text(json.dumps(params))
    ran = convert("inspect", run, *LENGTH)
    if said:
        refused(ran, 5, said)
    else:
        assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [(64, 32, "max_position_embeddings = 64 and max_seq_len = 32"), (64, 64, ""), (None, 64, ""), (64, None, "")],
)
def test_two_keys_of_the_number_of_positions(convert, tmp_path, first, second, said):
    run = shutil.copytree(REAL / "dense", tmp_path / "run")
    params = json.loads((run / "params.json").read_text())
    (run / "params.json").write_text(json.dumps(params | {"max_position_embeddings": first, "max_seq_len": second}))
    ran = convert("mistral2hf", run, tmp_path / "out")
    if said:
        refused(ran, 5, said)
    else:
        assert ran.code == 0, ran.err
        assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 64
