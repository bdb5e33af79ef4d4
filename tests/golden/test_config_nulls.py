"""Null in a config.json: what is read here is what transformers builds a model of, family by family."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formats.errors import SourceError, VitruvianError
from formats.huggingface.config import from_huggingface
from formats.huggingface.settings_table import keys_read
from tests.models import MODELS, family_of, settings_of

OFTEN = ("head_dim", "num_key_value_heads", "n_group", "topk_group", "sliding_window", "attention_chunk_size",
         "layer_types", "q_lora_rank", "hidden_act", "intermediate_size")  # fmt: skip
"""Keys that config.json files in use have as null, and two that never may be."""


def _number(value: dict[str, object]) -> object:
    """What transformers writes of infinity."""
    return float(str(value["__float__"])) if value.keys() == {"__float__"} else value


def _builds(kind: str, config: dict[str, object]) -> bool:
    """Whether transformers builds and computes a model of it."""
    try:
        decoded = json.loads(json.dumps(config), object_hook=_number)  # as from_pretrained does
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **decoded))
        model(torch.arange(20)[None], use_cache=False)  # a cache wants layers of attention
    except (TypeError, ValueError, AttributeError, ZeroDivisionError):
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_null_is_read_where_transformers_builds_a_model_of_it(name):
    settings = settings_of(name)
    kind = str(settings.pop("model_type"))
    defaults = json.loads(AutoConfig.for_model(kind, **settings).to_json_string(use_diff=False))
    keys = {*keys_read(family_of(name)), *family_of(name).own}
    for key in keys.intersection(OFTEN):
        config = defaults | {key: None}
        try:
            from_huggingface(config, {}, "config.json")
            read = True
        except VitruvianError:
            read = False
        del config["model_type"]
        assert not read or _builds(kind, config), f"{key} = null: transformers builds no model"


ROTARY = {
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64},
    "yarn": {"factor": 2.0},
}


@pytest.mark.parametrize(("kind", "missing"), [(kind, key) for kind in ROTARY for key in ("", *ROTARY[kind])])
def test_rotary_settings_without_one_that_has_no_default(kind, missing):
    """Where transformers builds a model it is read, and nowhere else."""
    rotary = {"rope_type": kind, "rope_theta": 1e4, **ROTARY[kind]}
    rotary.pop(missing, None)
    config = settings_of("llama", rms_norm_eps=1e-6) | {"rope_parameters": dict(rotary)}
    if missing and missing != "original_max_position_embeddings":
        with pytest.raises(KeyError, match=missing):
            AutoConfig.for_model(**config)
        with pytest.raises(SourceError, match=f"rotary settings of type {kind} without {missing}"):
            from_huggingface(config | {"rope_parameters": rotary}, {}, "config.json")
    else:
        AutoConfig.for_model(**config)
        assert from_huggingface(config | {"rope_parameters": rotary}, {}, "config.json").rope_scaling


def test_an_alpha_of_zero_is_none():
    """Of Hunyuan's `dynamic`; a negative one makes frequencies of complex numbers, and is refused."""
    logits = {}
    for alpha in (0, None, 4.0):
        rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "alpha": alpha}
        config = settings_of("hunyuan_v1_dense", rms_norm_eps=1e-6) | {"rope_parameters": rotary}
        assert from_huggingface(config, {}, "config.json").rope_scaling["alpha"] == alpha
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        logits[alpha] = model(torch.arange(200)[None] % 64).logits
    assert logits[0].equal(logits[None])
    assert not logits[0].equal(logits[4.0])
    with pytest.raises(SourceError, match="a finite number, and not negative"):
        from_huggingface(config | {"rope_parameters": {**rotary, "alpha": -1.0}}, {}, "config.json")
