"""Presets: settings that exist, each with a source, and that fit their devices."""

from __future__ import annotations

import json

import pytest

from train.settings.config import keys
from train.settings.config_file import load_config
from train.settings.presets import PRESETS

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
MODELS = {
    "llama-3.1-8b": LLAMA,
    "smollm3-3b": {
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
    },
    "mistral-7b": LLAMA | {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768},
}  # fmt: skip
"""Sizes of the models, from their config.json on the Hub."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_its_devices(name, model, data, train, tmp_path):
    ran = train("init", tmp_path / "run", "--from", model("llama", vocab_size=253), "--data", data, "--preset", name)
    assert ran.code == 0, ran.err
    preset, path = PRESETS[name], tmp_path / "run/config.yml"
    config, _ = load_config(path)
    assert f"--ranks {preset.ranks} " in ran.err
    for key, (value, source) in preset.settings.items():
        assert key in keys()
        section, _, last = key.rpartition(".")
        assert getattr(getattr(config, section), last) == value
        assert f"{key}: {value}  ({source})" in ran.err
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.json").write_text(json.dumps(MODELS[name.partition("/")[0]]))
    options = ["--model.path", tmp_path / "whole", "--model.init", "config", "--ranks", preset.ranks, "--json"]
    planned = train("plan", path, *options)
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["bytes"] < 0.8 * preset.memory
    assert json.loads(planned.out)["batch"] == preset.settings["batch.size"][0]


def test_a_preset_that_is_none(model, data, train, tmp_path):
    ran = train("init", tmp_path / "run", "--from", model("llama"), "--data", data, "--preset", "llama")
    assert ran.code == 2
    assert "llama is no preset" in ran.err
    assert "llama-3.1-8b/lumi-8" in ran.err
