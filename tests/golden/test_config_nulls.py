"""Null in a config.json: what is read here is what transformers builds a model of, family by family."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formats.errors import VitruvianError
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
