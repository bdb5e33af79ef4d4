"""A key that a config.json leaves out: what is assumed here is what the class of transformers assumes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from formats.errors import VitruvianError
from formats.huggingface.config import from_huggingface
from formats.huggingface.settings_table import keys_read
from formats.model.spec import ModelSpec, differences
from tests.models import MODELS, family_of, settings_of

NEEDED = {
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads",
    "intermediate_size", "intermediate_size_mlp", "shared_expert_intermediate_size", "max_position_embeddings",
    "n_positions", "layer_types", "layers_block_type", "rms_norm_eps",
}  # fmt: skip
"""Keys without which a config may be refused: mostly sizes, of which a class assumes those of one model."""
UNKNOWN = "max_position_embeddings"
"""A key that Ministral 3's class has in its rotary settings, and uses for nothing there."""


def said(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A whole config.json, in which transformers fills in what `settings` leave out."""
    config: dict[str, Any] = json.loads(AutoConfig.for_model(kind, **settings).to_json_string(use_diff=False))
    config.get("rope_parameters", {}).pop(UNKNOWN, None)
    config.pop("time_step_limit", None)  # an infinity that JSON cannot have
    return config


def read(config: dict[str, Any]) -> ModelSpec | None:
    """The settings of a config, None if it is refused."""
    try:
        return from_huggingface(config, {}, "config.json")
    except VitruvianError:
        return None


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("opensci")])  # its class is our own
def test_a_key_that_is_left_out_is_what_the_class_assumes(name):
    settings = settings_of(name)
    kind = settings.pop("model_type")
    whole = said(kind, settings)
    for key in keys_read(family_of(name)) & whole.keys() - {"model_type"}:
        less = {other: value for other, value in whole.items() if other != key}
        try:
            filled = said(kind, {other: value for other, value in less.items() if other != "model_type"})
        except (TypeError, ValueError, ZeroDivisionError, StrictDataclassError):  # the class cannot do without
            continue
        ours, theirs = read(less), read(filled)
        assert ours is not None or theirs is None or key in NEEDED, f"without {key} it is refused"
        if filled.get(key) is not None:
            assert ours is None or theirs is not None, f"without {key} it is what the class assumes, and is refused"
        if ours is not None and theirs is not None:
            # the weights tell the vocabulary, and a key that no other format has stays absent
            assert differences(replace(ours, vocab=theirs.vocab, own=theirs.own), theirs) == [], key
