"""Two names of one setting in a config.json: those of transformers' `attribute_map`, of which the second one wins."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from formats.families import FAMILIES
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.huggingface.settings_table import USUAL
from tests.faults.dcp_tools import refused
from tests.models import settings_of


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_of_transformers_is_one_of_the_family(name):
    family = FAMILIES[name]
    kind = family.model_type or name
    names = [key.split() for key in {**USUAL, **family.keys}.values()]
    for alias, key in (CONFIG_MAPPING[kind].attribute_map or {}).items():
        rows = [row for row in names if key in row]
        assert all(alias in row for row in rows), (alias, key)


@pytest.mark.parametrize(
    ("kind", "alias", "value"),
    [("gpt2", "num_attention_heads", 2), ("gpt2", "num_hidden_layers", 1), ("mixtral", "num_experts", 2)],
)
def test_two_names_with_two_values_are_refused(model, convert, tmp_path, kind, alias, value):
    source = shutil.copytree(model(kind), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {alias: value}))
    ran = convert("hf2megatron", source, tmp_path / "out", "--tp", 2)
    refused(ran, 3, "config.json contradicts itself: ", f"{alias} = {value}")


def test_the_other_name_alone_is_the_setting(model, convert, tmp_path):
    source = shutil.copytree(model("gpt2"), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    config["num_attention_heads"] = config.pop("n_head")
    (source / "config.json").write_text(json.dumps(config))
    digests = [convert("digest", folder).out.split()[0] for folder in (source, model("gpt2"))]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("kind", "setting", "value"), [("qwen3_moe", "experts", 2), ("glm4_moe_lite", "rope_dim", 4)])
def test_a_corrected_setting_has_one_value_under_all_its_names(kind, setting, value):
    family, config = FAMILIES[kind], AutoConfig.for_model(**settings_of(kind)).to_dict()
    names = family.keys[setting].split()
    config |= dict.fromkeys(names, next(config[name] for name in names if name in config))
    written = to_huggingface(from_huggingface(config, {setting: value}, "config.json"), config)
    assert {name: written[name] for name in names} == dict.fromkeys(names, value)
    assert from_huggingface(written, {}, "config.json").rope_dim == written.get("qk_rope_head_dim")


@pytest.mark.parametrize("head_dim", [16, None])
@pytest.mark.parametrize("kind", ["deepseek_v3", "youtu"])
def test_a_copy_of_a_setting_with_another_value_is_refused(model, convert, tmp_path, kind, head_dim):
    """The class rotates by `head_dim`, a copy of `qk_rope_head_dim` unless the config has one."""
    source = shutil.copytree(model(kind), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"head_dim": head_dim, "hidden_size": 128}))
    with pytest.raises((RuntimeError, TypeError)):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))(torch.arange(8)[None])
    (source / "config.json").write_text(json.dumps(config | {"head_dim": head_dim}))
    said = "qk_rope_head_dim = 8 and head_dim = 16" if head_dim else "head_dim = null"
    for command in ("hf2hf", "hf2megatron", "hf2fsdp"):
        refused(convert(command, source, tmp_path / "out"), 3, said)
    (source / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    assert convert("hf2hf", source, tmp_path / "out", "--set", "rope_theta=500000").code == 0


def test_a_copy_of_a_setting_follows_it():
    config = AutoConfig.for_model(**settings_of("deepseek_v3")).to_dict()
    assert config["head_dim"] == config["qk_rope_head_dim"] == 8
    written = to_huggingface(from_huggingface(config, {"rope_dim": 4}, "config.json"), config)
    assert written["head_dim"] == written["qk_rope_head_dim"] == 4
