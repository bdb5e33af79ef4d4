"""A config.json that is written is one that transformers builds a model of, and null means what it means there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from converters import convert as convert_module
from formats.errors import SourceError, VitruvianError
from formats.families import FAMILIES, find_family
from formats.families.family import Family
from formats.huggingface.config import from_huggingface, to_huggingface, unknown_keys
from tests.models import MODELS, settings_of

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LOUD = {"head_dim", "num_key_value_heads", "n_group", "topk_group"}
"""Keys that may be null, but not in every class: where not, transformers loads neither the source nor the output."""


def config_of(name: str) -> dict[str, Any]:
    """The whole config.json of a tiny model, defaults and all."""
    settings = settings_of(name)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return json.loads(config.to_json_string(use_diff=False))


def built(config: dict[str, Any], folder: Path) -> torch.nn.Module:
    """What transformers makes of it, without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_a_family_are_those_of_its_class(name):
    family = FAMILIES[name]
    defaults = CONFIG_MAPPING[family.model_type or family.name]().to_dict()
    ids = {key: tuple(defaults[key]) if isinstance(defaults[key], list) else defaults[key] for key in IDS}
    expected = {key: value for key, value in ids.items() if value not in (None, *range(11))}
    assert family.tokens == {key: value for key, value in expected.items() if takes_null(family, key)}


def takes_null(family: Family, key: str) -> bool:
    """Whether a class of transformers can do without a token: that of CWM wants two of them."""
    try:
        return getattr(CONFIG_MAPPING[family.model_type or family.name](**{key: None}), key) is None
    except StrictDataclassError:
        return False


@pytest.mark.parametrize("name", MODELS)
def test_a_config_without_a_base_can_be_loaded(name, tmp_path):
    """As from Megatron and GPT-NeoX, with a vocabulary that ends before the tokens that the class assumes."""
    spec = from_huggingface(config_of(name), {}, "config.json")
    written = to_huggingface(spec, {})
    model = built(written, tmp_path)
    assert model.get_input_embeddings().weight.shape == (spec.vocab, spec.hidden)
    for key in IDS:
        value = getattr(model.config, key, None) if takes_null(FAMILIES[spec.family], key) else None
        assert value is None or max(value if isinstance(value, list) else [value]) < spec.vocab


@pytest.mark.parametrize(("name", "command"), [("phi3", "megatron"), ("smollm3", "megatron"), ("gpt_neox", "neox")])
def test_a_run_without_a_config(model, convert, tmp_path, name, command):
    run, out = tmp_path / "run", tmp_path / "out"
    assert convert(f"hf2{command}", model(name), run).code == 0
    for folder in [path for path in run.rglob("huggingface") if path.is_dir()]:
        shutil.rmtree(folder)
    ran = convert(f"{command}2hf", run, out, "--vocab-size", 211)
    assert ran.code == 0, ran.err
    assert json.loads((out / "config.json").read_text())["model_type"] == name
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("name", sorted({FAMILIES[name].name for name in MODELS if name in FAMILIES}))
def test_null(name, tmp_path):
    """Of the keys that a table reads: what transformers does not take for null, is refused."""
    config = config_of(name)
    family = find_family(config)
    assert family is not None
    fixed = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", *LOUD}
    for key in sorted(config.keys() - {*unknown_keys(config)} - fixed):
        changed = {**config, key: None}
        try:
            from_huggingface(changed, {}, "config.json")
        except VitruvianError:
            continue
        built(changed, tmp_path)


def test_a_tied_head_that_is_null(model, convert, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(model("llama"), source)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": None}
    (source / "config.json").write_text(json.dumps(config))
    for command in ("hf2hf", "hf2megatron", "hf2fsdp"):
        ran = convert(command, source, tmp_path / "out")
        assert ran.code == 3
        assert "tie_word_embeddings = null" in ran.err
    with pytest.raises(Exception, match="tie_word_embeddings"):
        AutoConfig.from_pretrained(source)


@pytest.mark.parametrize("key", ["foo", "hidden_size", "rope_theta"])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + 400 * "0", "1" + 5000 * "0"])
def test_a_number_that_no_setting_can_be(model, convert, tmp_path, key, number):
    """It is JSON: it is not called anything else."""
    source = tmp_path / "hf"
    shutil.copytree(model("llama"), source)
    text = json.dumps(json.loads((source / "config.json").read_text()) | {key: "HERE"})
    (source / "config.json").write_text(text.replace('"HERE"', number))
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 3
    assert f"{source / 'config.json'} has " in ran.err
    assert "which no setting can be" in ran.err
    assert ("digits" if "e" not in number else number) in ran.err


@pytest.mark.parametrize("command", ["hf2hf", "hf2megatron", "hf2neox"])
def test_what_does_not_read_back_is_known_before_it_is_written(model, convert, tmp_path, command):
    """As a float 10**30 is above 10**30, which is the limit."""
    source = tmp_path / "hf"
    shutil.copytree(model("llama"), source)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10**30
    (source / "config.json").write_text(json.dumps(config))
    for options in ((), ("-n",)):
        ran = convert(command, source, tmp_path / "out", *options)
        assert ran.code == 3
        assert f"{source / 'config.json'} says rope_theta" in ran.err
        assert ".partial" not in ran.err


def test_an_output_that_cannot_be_read_names_its_source(model, convert, tmp_path, monkeypatch):
    """The folder that it would name is deleted."""
    opened = convert_module.open_checkpoint

    def fails(path: Path, settings: Any) -> Any:
        if path.name == "out" and path.parent.suffix == ".partial":
            raise SourceError(f"{path}/config.json says nothing")
        return opened(path, settings)

    monkeypatch.setattr(convert_module, "open_checkpoint", fails)
    ran = convert("hf2hf", model("llama"), tmp_path / "out")
    assert ran.code == 6
    assert f"what was written of {model('llama')} does not read back: config.json says nothing" in ran.err
    assert not list(tmp_path.iterdir())
