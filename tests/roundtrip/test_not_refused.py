"""Configs that say the same as a supported one in other words: the result has the logits of transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2CLS, ACT2FN

from formats.families import FAMILIES, known
from formats.huggingface.config import from_huggingface
from formats.huggingface.require import SYNONYMS

RIGHT = {
    "swish": ("llama", {"hidden_act": "swish"}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biases nowhere": ("seed_oss", {"attention_bias": False}),
    "experts without biases": ("glm4_moe_air", {"attention_bias": False}),
    "a window of later layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 28}),
    "full attention by name": (
        "qwen3",
        {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 4},
    ),
    "a window without a width": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
    "layers without rotation": ("smollm3", {"use_sliding_window": True, "sliding_window": None}),
}
REFUSED = {
    "a window of the last layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "sliding"),
    "a window of all layers": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding window"),
    "biases of attention alone": ("llama", {"attention_bias": True}, "biases on query, key and value alone"),
    "biases of the MLP alone": ("llama", {"mlp_bias": True}, "biases on query, key and value alone"),
    "a bias of the output": ("seed_oss", {"attention_out_bias": True}, "biases on query, key and value alone"),
}


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.arange(3, 35)[None]).logits


@pytest.mark.parametrize("case", RIGHT)
def test_what_computes_the_same_is_converted(model, convert, tmp_path, case):
    name, changes = RIGHT[case]
    source, run, out = model(name, **changes), tmp_path / "run", tmp_path / "out"
    assert convert("hf2megatron", source, run, "--tp", 2).code == 0
    assert convert("megatron2hf", run, out).code == 0
    assert torch.equal(logits(out), logits(source))


@pytest.mark.parametrize("case", REFUSED)
def test_what_megatron_cannot_compute_is_refused(model, convert, tmp_path, case):
    name, changes, reason = REFUSED[case]
    ran = convert("hf2megatron", model(name, **changes), tmp_path / "out")
    assert ran.code in (4, 5)
    assert reason in ran.err


def test_a_list_of_layers_that_qwen3_moe_does_not_read(model, convert, tmp_path):
    """modeling_qwen3_moe.py, 5.23.0: its window holds in every layer, whatever `layer_types` says."""
    source = Path(shutil.copytree(model("qwen3_moe", use_sliding_window=True, sliding_window=8), tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"] * 4}))
    assert convert("hf2megatron", source, tmp_path / "out").code == 4


def test_other_names_of_an_activation_compute_the_same():
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    for name, meant in SYNONYMS.items():
        torch.testing.assert_close(ACT2FN[name](x), ACT2FN[meant](x), rtol=0, atol=1e-12)
    others = sorted(set(ACT2CLS) - set(SYNONYMS) - {"silu", "prelu", "xielu"})
    alike = [name for name in others if torch.allclose(ACT2FN[name](x), ACT2FN["silu"](x), rtol=0, atol=1e-6)]
    assert alike == [], "they are other names of silu too"


@pytest.mark.parametrize("way", [(), ("--dtype", "bf16")])
def test_both_names_of_the_element_type_say_the_same(model, convert, tmp_path, way):
    source = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float16"}))
    assert convert("hf2hf", source, tmp_path / "out", *way).code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {written["dtype"], written["torch_dtype"]} == {"bfloat16" if way else "float32"}


@pytest.mark.parametrize(("meant", "written"), [("swish", "silu"), ("silu", "swish"), ("swish", "swish")])
def test_a_family_of_the_user_may_say_either_name(model, meant, written):
    config = json.loads((model("llama") / "config.json").read_text()) | {"model_type": "own", "hidden_act": written}
    own = replace(FAMILIES["llama"], name="own", requires={"hidden_act": meant})
    with known(own):
        assert from_huggingface(config, {}, "config.json").family == "own"
