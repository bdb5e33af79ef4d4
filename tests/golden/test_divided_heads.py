"""Sizes with which a class of transformers builds no model: a hidden size that its heads do not divide."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from formats.checkpoint import ASSETS, MANIFEST
from formats.errors import UnsupportedError
from formats.families import FAMILIES
from formats.huggingface.config import from_huggingface
from formats.megatron.args.args import from_megatron, to_megatron
from tests.models import MODELS, settings_of


def refused_for(kind: str, config: Mapping[str, Any]) -> str:
    """Why transformers builds no config; empty if it does."""
    try:
        AutoConfig.for_model(**{**config, "model_type": kind})
    except StrictDataclassClassValidationError as error:
        return str(error).lower()
    return ""


@pytest.mark.parametrize("name", sorted({name.partition("-")[0] for name in MODELS} & {*FAMILIES}))
def test_families_whose_heads_divide_the_hidden_size(name):
    family = FAMILIES[name]
    config = settings_of(name)
    if family.elsewhere or family.keys.get("head_dim") == "" or {"hidden_size", "num_attention_heads"} - {*config}:
        pytest.skip("its sizes follow from each other, or transformers has no class of it")
    odd = {**config, "hidden_size": config["num_attention_heads"] * 8 + 2}
    assert ("hidden size" in refused_for(family.model_type or name, odd)) is family.divided


def test_a_llama_of_megatron_that_transformers_builds_as_a_mistral(convert, model, tmp_path):
    import torch

    changes = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    source, run, out = model("mistral", sliding_window=None, **changes), tmp_path / "run", tmp_path / "out"
    assert convert("hf2megatron", source, run).code == 0
    for path in run.rglob(MANIFEST):
        path.unlink()
    shutil.rmtree(run / ASSETS)
    assert convert("megatron2hf", run, out).code == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "mistral"
    ids = torch.arange(24)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in (out, source))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_a_model_that_no_other_class_computes():
    args = to_megatron(from_huggingface(settings_of("arcee", rms_norm_eps=1e-6), {}, "config.json"))
    assert from_megatron(args, {}, None, "args").family == "arcee"
    with pytest.raises(UnsupportedError, match="a hidden size of 62 is no multiple of 8 heads"):
        from_megatron({**args, "hidden_size": 62, "kv_channels": 8}, {}, None, "args")
