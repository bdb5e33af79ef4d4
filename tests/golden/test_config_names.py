"""Two names of one setting in a config.json: those of transformers' `attribute_map`, of which the second one wins."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import CONFIG_MAPPING

from formats.families import FAMILIES
from formats.huggingface.settings_table import USUAL
from tests.faults.dcp_tools import refused


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
