"""Each setting through each format that can stand without the config: it comes back, or it was refused.

`huggingface/`, which travels in a folder of Megatron or GPT-NeoX, is deleted before the folder is read.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from converters.assets.files import config_text
from converters.convert import run
from converters.plan.request import Request
from converters.plan.targets import plan_megatron, plan_neox
from formats.deepspeed.neox import writer as neox_writer
from formats.errors import VitruvianError
from formats.families import family_of
from formats.huggingface.config import from_huggingface, unknown_keys
from formats.megatron import megatron_llm
from formats.megatron.args.options import CORE, DIST, Options
from formats.model.spec import differences
from formats.registry import open_checkpoint
from tests.models import ALTERNATING, HARMLESS, HARMLESS_HERE, LLAMA3, MODELS, PARTIAL, settings_of

LLM = megatron_llm.NAME
FORMATS = {
    CORE: lambda source, request: plan_megatron(source, request, Options(dialect=CORE), None),
    DIST: lambda source, request: plan_megatron(source, request, Options(dialect=DIST), None),
    LLM: lambda source, request: plan_megatron(source, request, Options(dialect=LLM), None),
    "neox": lambda source, request: plan_neox(source, request, neox_writer.Options()),
}
MEGATRON = (CORE, DIST)
EVERYWHERE = (CORE, DIST, LLM, "neox")


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """The change that makes a model's rotary embedding another one."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | parameters}


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "attention_factor": 1.5}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "base": ("llama", rope("default", rope_theta=5e5), EVERYWHERE, ""),
    "base that is not whole": ("llama", rope("default", rope_theta=1234.5), EVERYWHERE, ""),
    "epsilon": ("llama", {"rms_norm_eps": 3e-4}, EVERYWHERE, ""),
    "positions": ("llama", {"max_position_embeddings": 77}, EVERYWHERE, ""),
    "linear": ("llama", rope("linear", factor=4.0), (*MEGATRON, LLM), "of the kind linear"),
    "linear, not whole": ("llama", rope("linear", factor=1.5), (LLM,), "linear with a whole factor|of the kind linear"),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, MEGATRON, "llama3"),
    "llama3 of another factor": (
        "llama",
        {"rope_parameters": {**LLAMA3, "factor": 32.0}},
        (),
        "llama3|rope_scaling_factor",
    ),
    "llama3 of other frequencies": ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 3.0}}, (), "llama3"),
    "yarn": ("llama", rope("yarn", **YARN), (), "yarn"),
    "dynamic": ("llama", rope("dynamic", factor=2.0), (), "dynamic"),
    "longrope": ("llama", rope("longrope", original_max_position_embeddings=64, **LONG), (), "longrope"),
    "longrope of Phi-3": ("phi3", rope("longrope", partial_rotary_factor=1.0, **LONG), (), "longrope"),
    "window": ("mistral", {"sliding_window": 8, "head_dim": 8}, EVERYWHERE, ""),
    "no window": ("mistral", {"sliding_window": None, "head_dim": 8}, EVERYWHERE, ""),
    "wide heads": ("mistral", {"head_dim": 16}, MEGATRON, "hidden / heads"),
    "partial rotary": ("phi3", {"rope_parameters": PARTIAL}, MEGATRON, "has no rotary_fraction|no phi3"),
    "partial rotary of NeoX": (
        "gpt_neox",
        rope("default", partial_rotary_factor=0.5),
        ("neox",),
        "same residual|has a gate",
    ),
    "serial residual": ("gpt_neox", {"use_parallel_residual": False}, (*MEGATRON, "neox"), "has a gate"),
    "gelu_fast": ("gpt_neox", {"hidden_act": "gelu_fast"}, ("neox",), "same residual|activation gelu|has a gate"),
    "gelu_new of NeoX": ("gpt_neox", {"hidden_act": "gelu_new"}, (), "same residual|activation gelu|has a gate"),
    "tied": ("llama-tied", {}, (*MEGATRON, "neox"), "output head"),
    "biases, tied": ("qwen2", {"tie_word_embeddings": True}, MEGATRON, "biases everywhere|no qwen2"),
    "norms on heads": ("qwen3", {"rms_norm_eps": 1e-4}, MEGATRON, "no norms on|hidden / heads"),
    "gelu": ("starcoder2", {"hidden_act": "gelu", "norm_epsilon": 1e-3}, MEGATRON, "has a gate|no starcoder2"),
    "gelu with tanh": ("starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, MEGATRON, "has a gate|no starcoder2"),
    "relu2": ("arcee", {"rms_norm_eps": 1e-3}, MEGATRON, "has a gate|hidden / heads"),
    "gelu without biases": ("arcee-tied", {"hidden_act": "gelu"}, MEGATRON, "has a gate|no arcee"),
    "gelu_new without biases": ("arcee-tied", {"hidden_act": "gelu_new"}, (), "without biases|has a gate|no arcee"),
    "norms less one": ("nemotron", {"norm_eps": 1e-3}, MEGATRON, "has a gate|hidden / heads"),
    "layers that do not rotate": ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, MEGATRON, "in every layer|no smollm3"),
    "windows in some layers": ("cwm", {"layer_types": ALTERNATING}, MEGATRON, "holds for every layer|hidden / heads"),
    "relu": ("starcoder2", {"hidden_act": "relu"}, (), "activation relu|has a gate|no starcoder2"),
    "gelu_new": ("gpt2", {"layer_norm_epsilon": 1e-3, "n_positions": 99}, (*MEGATRON, "neox"), "has a gate"),
    "gelu of GPT-2": ("gpt2-untied", {"activation_function": "gelu"}, (*MEGATRON, "neox"), "has a gate"),
    "gelu_fast of GPT-2": ("gpt2", {"activation_function": "gelu_fast"}, (), "activation gelu|has a gate"),
    "relu of GPT-2": ("gpt2", {"activation_function": "relu"}, (), "activation relu|has a gate"),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 20.0}, (), "caps no logits|hidden / heads"),
    "multipliers": ("granite", {"logits_scaling": 4.0}, (), "multiplies neither|no granite"),
}
"""Setting: model, what is changed of it, the formats that keep it, and why the others refuse."""
SPELLINGS = {"family: llama | mistral", "family: llama | phi3", "rotary_fraction: None | 1.0"}
"""What a format without families does not tell, because it computes the same."""


@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_no_table_knows_was_looked_at(name):
    """A new one of transformers has to be put somewhere, before a format drops it."""
    config = AutoConfig.for_model(**settings_of(name)).to_dict()
    harmless = HARMLESS | HARMLESS_HERE.get(family_of(config, name).name, set())
    assert {*unknown_keys(config)} - {*PreTrainedConfig().to_dict()} <= harmless


@pytest.mark.parametrize("case", CASES)
def test_it_comes_back_by_itself_or_was_refused(model, tmp_path, case):
    name, changes, keep, reason = CASES[case]
    source = open_checkpoint(model(name, **changes))
    for form, plan in FORMATS.items():
        request = Request(tmp_path / form, verify=False, quiet=True)
        if form not in keep:
            with pytest.raises(VitruvianError) as raised:
                plan(source, request)
            assert re.search(reason, f"{raised.value} {raised.value.hint}"), raised.value
            continue
        run(plan(source, request), request)
        shutil.rmtree(request.out / "huggingface")
        again = open_checkpoint(request.out)
        written = from_huggingface(json.loads(config_text(again, None)), {}, form)
        for spec in (again.spec, written):
            assert {*differences(spec, source.spec)} <= SPELLINGS


@pytest.mark.parametrize("name", ["gpt2", "starcoder2", "phi3"])
def test_what_a_training_drops_out_goes_on_in_megatron(model, convert, tmp_path, name):
    """Megatron takes it from the checkpoint, and no flag of its can bring it back."""
    keys = {"gpt2": ("attn_pdrop", "resid_pdrop"), "starcoder2": ("attention_dropout", "residual_dropout")}
    changes = dict(zip(keys.get(name, ("attention_dropout", "resid_pdrop")), (0.25, 0.125), strict=True))
    assert convert("hf2megatron", model(name, **changes), tmp_path / "one").code == 0
    assert convert("reshard", tmp_path / "one", tmp_path / "two", "--tp", 2, "--format", "torch_dist").code == 0
    shutil.rmtree(tmp_path / "two/huggingface")
    assert convert("reshard", tmp_path / "two", tmp_path / "three").code == 0
    for folder in ("one", "two", "three"):
        args = open_checkpoint(tmp_path / folder).details.args
        assert (args["attention_dropout"], args["hidden_dropout"]) == (0.25, 0.125)


OF_SEVERAL = ("dots1", "starcoder2", "qwen3_next", "ministral", "seed_oss", "gpt_oss")
"""Families whose args other families fit too, or that spell a default out."""


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_the_manifest_tells_the_family_where_the_config_is_gone(model, convert, tmp_path, name):
    """The args of Megatron name none; what the manifest says has to be what they say."""
    assert convert("hf2megatron", model(name), tmp_path / "run").code == 0
    shutil.rmtree(tmp_path / "run/huggingface")
    ran = convert("megatron2hf", tmp_path / "run", tmp_path / "back")
    assert ran.code == 0, ran.err
    source = open_checkpoint(model(name)).spec
    assert differences(from_huggingface(json.loads((tmp_path / "back/config.json").read_text()), {}, ""), source) == []
    (manifest,) = tmp_path.glob("run/*/vitruvian.json")
    whole = json.loads(manifest.read_text())
    others = {"family": "llama", "max_positions": 4, "norm_epsilon": 0.5}
    for key, other in others.items():
        manifest.write_text(json.dumps(whole | {"settings": whole["settings"] | {key: other}}))
        ran = convert("megatron2hf", tmp_path / "run", tmp_path / "no", "--set", f"vocab={source.vocab}")
        assert (ran.code, f"{key}: " in ran.err) == (6, True), (key, ran.err)


def test_so_does_what_the_yml_of_neox_drops_out(model, convert, tmp_path):
    assert convert("hf2neox", model(), tmp_path / "neox").code == 0
    (yml,) = tmp_path.glob("neox/*/configs/*.yml")
    yml.write_text(f"{yml.read_text()}attention-dropout: 0.25\nhidden_dropout: 0.125\n")
    assert convert("hf2megatron", tmp_path / "neox", tmp_path / "run").code == 0
    args = open_checkpoint(tmp_path / "run").details.args
    assert (args["attention_dropout"], args["hidden_dropout"]) == (0.25, 0.125)


@pytest.mark.parametrize("command", ["megatron2hf", "reshard"])
def test_a_window_that_the_user_sets_is_in_the_layers_that_the_args_name(model, convert, tmp_path, command):
    """All of them without `window_attn_skip_freq`; the layers without a window are not those of args without one."""
    run = tmp_path / "run"
    assert convert("hf2megatron", model("llama"), run).code == 0
    shutil.rmtree(run / "huggingface")
    (run / "release/vitruvian.json").unlink()
    known = ["--set", "vocab=211", "--set", "sliding_window=8"]
    ran = convert(command, run, tmp_path / "out", *known)
    assert ran.code == 0, ran.err
    if command == "megatron2hf":
        spec = open_checkpoint(tmp_path / "out").spec
        assert (spec.family, spec.sliding_window, spec.full_layers) == ("mistral", 8, None)
    else:
        flags = (tmp_path / "out/megatron_flags.txt").read_text()
        assert ("--window-size 7,0" in flags, "--window-attn-skip-freq" in flags) == (True, False)
    ran = convert(command, run, tmp_path / "none", *known[:2], "--set", "full_layers=[0]")
    assert (ran.code, "--set full_layers would have no effect on" in ran.err) == (4, True), ran.err


@pytest.mark.parametrize(
    ("write", "name", "read", "setting", "why"),
    [
        ("hf2megatron", "gpt_oss", "megatron2hf", "full_layers=[0,2]", "layer_types of a gpt_oss says"),
        ("hf2megatron", "gpt_oss", "reshard", "full_layers=[]", "layer_types of a gpt_oss says"),
        ("hf2nanotron", "llama", "nanotron2hf", "rotary_fraction=0.5", "rotary_fraction is fixed for llama"),
        ("hf2nanotron", "llama", "nanotron2hf", "top_k=2", "top_k is fixed for llama"),
        ("hf2neox", "llama", "neox2hf", "router_scale=2.0", "router_scale is fixed for llama"),
        ("hf2megatron", "gpt_oss", "megatron2hf", "ffn=2", "ffn of this gpt_oss is"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(model, convert, tmp_path, write, name, read, setting, why):
    run = tmp_path / "run"
    assert convert(write, model(name), run).code == 0
    shutil.rmtree(run / "huggingface", ignore_errors=True)
    vocab = [] if read == "nanotron2hf" else ["--set", "vocab=211"]
    ran = convert(read, run, tmp_path / "out", *vocab, "--set", setting)
    assert (ran.code, why in ran.err) == (4, True), ran.err


@pytest.mark.parametrize("command", ["hf2hf", "hf2megatron", "hf2fsdp"])
def test_a_setting_that_a_class_fixes_is_refused_before_anything_is_written(model, convert, tmp_path, command):
    ran = convert(command, model("deepseek_v2"), tmp_path / "out", "-n", "--set", "router_normalized=true")
    assert (ran.code, "norm_topk_prob = True is not supported for deepseek_v2, only False" in ran.err) == (4, True), (
        ran.err
    )


def test_a_list_of_layers_is_a_setting_in_any_order(model, convert, tmp_path):
    """Without a layer that has no rotary embedding a SmolLM3 is a Llama."""
    out, listed = tmp_path / "out", tmp_path / "listed"
    for folder, layers in ((out, "[2,1]"), (listed, "[1,2]")):
        assert convert("hf2hf", model("smollm3"), folder, "--set", f"nope_layers={layers}").code == 0
    assert (out / "config.json").read_text() == (listed / "config.json").read_text()
    run = tmp_path / "run"
    assert convert("hf2megatron", model("smollm3"), run).code == 0
    shutil.rmtree(run / "huggingface")
    (run / "release/vitruvian.json").unlink()
    ran = convert("megatron2hf", run, tmp_path / "llama", "--set", "vocab=211", "--set", "nope_layers=[]")
    assert (ran.code, open_checkpoint(tmp_path / "llama").spec.family) == (0, "llama"), ran.err


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('{"rope_type":"lineer","factor":4.0}', "says rope_type = 'lineer' in its rotary settings"),
        ('{"rope_type":"longrope","factor":4.0}', "no longrope without short_factor"),
        ('{"rope_type":"default"}', "says rope_type = 'default' in its rotary settings"),
    ],
)
def test_a_scaling_that_no_class_computes(model, convert, tmp_path, value, why):
    """transformers loads no model with it; embeddings that are not scaled are `none`."""
    for command in ("hf2hf", "hf2fsdp"):
        ran = convert(command, model("llama"), tmp_path / "out", "--set", f"rope_scaling={value}")
        assert (ran.code, why in ran.err) == (2, True), ran.err
    parsed = json.loads(value)
    if parsed["rope_type"] != "default":
        folder = shutil.copytree(model("llama"), tmp_path / "hf")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 1e4, **parsed}}))
        ran = convert("hf2hf", folder, tmp_path / "out")
        assert (ran.code, parsed["rope_type"] in ran.err) == (3, True), ran.err
