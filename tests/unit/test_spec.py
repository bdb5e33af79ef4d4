"""Settings: both spellings of transformers, Megatron's args, and what is refused rather than guessed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from formats.deepspeed.neox.yml import to_neox
from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError, VitruvianError, short
from formats.families import FAMILIES, family_of, known
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.huggingface.folder import model_slots
from formats.layout.tensors import BUFFERS
from formats.megatron.args.args import from_megatron, to_megatron
from formats.megatron.args.fields import FIELDS
from formats.megatron.args.flags import flags
from formats.megatron.args.options import Options, namespace
from formats.megatron.args.rope import LLAMA3_SCALING
from formats.model.settings import parse_settings
from formats.model.spec import differences
from formats.model.untabled import describe
from formats.model.values import scaling as checked_scaling
from tests.models import EXPERTS, FEW, FUSED_HERE, IN_MEGATRON, LLAMA3, MODELS, PLAIN_YARN, YARN, settings_of


def config(name: str, **changes) -> dict:
    """A config.json as transformers 5 writes it."""
    settings = settings_of(name, **changes)
    return AutoConfig.for_model(settings.pop("model_type"), **settings).to_dict()


def old_spelling(new: dict) -> dict:
    """The same config as transformers 4 wrote it."""
    old = dict(new)
    family = FAMILIES[new["model_type"]]
    if "rope_parameters" not in new or family.rope_theta is None:  # which version 4 did not have
        return old
    rope = dict(old.pop("rope_parameters"))
    if "full_attention" in rope:
        old["rope_local_base_freq"], rope = rope["sliding_attention"]["rope_theta"], dict(rope["full_attention"])
    old["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rope}
    if (key := family.keys.get("rotary_fraction")) and "partial_rotary_factor" in rope:
        old[key] = rope.pop("partial_rotary_factor")
    old["torch_dtype"] = old.pop("dtype", None)
    return old


@pytest.mark.parametrize("name", MODELS)
def test_both_spellings_of_transformers_mean_the_same(name):
    new = config(name)
    assert from_huggingface(new, {}, "new") == from_huggingface(old_spelling(new), {}, "old")


@pytest.mark.parametrize("name", MODELS)
def test_a_config_that_nothing_changed_comes_back_as_it_was(name):
    for settings in (config(name), old_spelling(config(name))):
        assert to_huggingface(from_huggingface(settings, {}, "one"), settings) == settings


@pytest.mark.parametrize("name", MODELS)
def test_what_we_write_without_a_base_transformers_reads_as_the_same_model(name, tmp_path):
    spec = from_huggingface(config(name), {}, "one")
    (tmp_path / "config.json").write_text(json.dumps(to_huggingface(spec, {})))
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert from_huggingface(again, {}, "again") == spec
    assert again["architectures"] == [FAMILIES[spec.family].architecture]


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_a_table_is_that_of_the_parameters(name):
    """By which the flat tensors of FSDP1 are cut, where nothing else tells."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    slots = model_slots(from_huggingface(settings, {}, "one"), memory=True)
    parameters = [slot for slot in slots if not slot.replica and not BUFFERS & {*slot.rule.pattern.tensors}]
    names = [key for key, _ in model.named_parameters()]
    assert [(set(slot.keys) & set(names) or {""}).pop() for slot in parameters] == names


ROUTER = ("normalized: True", "groups: 1", "top_groups: 1")


@pytest.mark.parametrize("name", IN_MEGATRON)
def test_settings_survive_megatron(name):
    spec = from_huggingface(config(name), {}, "one")
    args = to_megatron(spec)
    assert from_megatron(args, {}, spec, "args") == spec
    alone = from_megatron(args, {}, None, "args")
    # a Phi-3 whose heads rotate as a whole is a Llama, and a Hunyuan 3 a dots.llm1 with the router's choices made, as a
    # Qwen3.5 with experts is a Qwen3-Next
    spellings = (
        "family",
        "rotary_fraction: None | 1.0",
        "biases: None | ['qkv_bias']",
        "dense_layers: [] | None",
        *(f"router_{name} | None" for name in ROUTER),
    )
    assert [line for line in differences(alone, spec) if not line.startswith(spellings)] == []


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("granite", "residual_multiplier", 0.5),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", 20.0),
        ("gemma3", "layer_types", ["full_attention"] * 4),
        ("gemma3", "query_pre_attn_scalar", 64),
    ],
)
def test_what_only_one_family_computes_is_a_difference(name, key, value):
    """Its config keys are settings: two models that differ in one of them are not the same."""
    spec, other = from_huggingface(config(name), {}, "one"), from_huggingface(config(name, **{key: value}), {}, "other")
    assert [line.partition(":")[0] for line in differences(spec, other)] == [key]
    assert other.own[key] == value
    assert FAMILIES[spec.family].only_here


def test_the_second_rotary_base_of_gemma_3_is_a_setting():
    new = config("gemma3")
    spec = from_huggingface(new, {}, "one")
    assert (spec.rope_theta, spec.own["rope_local_base_freq"]) == (1e6, 1e4)
    changed = to_huggingface(from_huggingface(new, {"rope_theta": 5e5}, "one"), new)
    assert changed["rope_parameters"]["sliding_attention"] == new["rope_parameters"]["sliding_attention"]
    assert changed["rope_parameters"]["full_attention"] == {"rope_type": "default", "rope_theta": 5e5}


def test_each_changed_setting_reaches_the_config():
    base = config("mistral")
    spec = from_huggingface(base, {}, "base")
    for setting, key, value in [
        ("norm_epsilon", "rms_norm_eps", 1e-3),
        ("vocab", "vocab_size", 300),
        ("tied", "tie_word_embeddings", True),
        ("sliding_window", "sliding_window", 99),
        ("max_positions", "max_position_embeddings", 77),
    ]:
        changed = from_huggingface(base, {setting: value}, "base")
        assert changed != spec
        assert to_huggingface(changed, base)[key] == value
    changed = from_huggingface(
        base, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "base"
    )
    assert to_huggingface(changed, base)["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}


def test_each_head_of_llama_1_has_its_own_key():
    """Its config.json has no num_key_value_heads."""
    from transformers import AutoConfig

    said = {key: value for key, value in config("llama").items() if key != "num_key_value_heads"}
    assert from_huggingface(said, {}, "config.json").kv_heads == AutoConfig.for_model(**said).num_key_value_heads == 8


def test_llama_2_has_no_rope_theta_and_that_is_said():
    old = old_spelling(config("llama"))
    del old["rope_theta"], old["rope_scaling"], old["num_key_value_heads"]
    spec = from_huggingface(old, {}, "config.json")
    assert (spec.rope_theta, spec.kv_heads) == (10000.0, 8)
    assert [note for note in spec.notes if "rope_theta" in note]
    assert [note for note in spec.notes if "num_key_value_heads" in note]


@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "num_hidden_layers", "vocab_size", "max_position_embeddings", "intermediate_size"]
)
def test_what_is_missing_is_named_with_its_flag(key):
    broken = config("llama")
    del broken[key]
    if key == "vocab_size":
        assert from_huggingface(broken, {}, "config.json").vocab is None
        return
    with pytest.raises(SourceError) as raised:
        from_huggingface(broken, {}, "config.json")
    assert "there is no safe default" in str(raised.value)
    assert raised.value.hint.startswith("add --set ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "model type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ({"mlp_bias": 1}, "mlp_bias = 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"head_dim": 7}, "odd"),
    ],
)
def test_what_has_no_layout_is_refused(changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        from_huggingface(config("llama") | changes, {}, "config.json")


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
def test_null_is_neither_true_nor_false(key):
    """transformers 5.23.0 refuses it."""
    with pytest.raises(SourceError, match=f"{key} = null"):
        from_huggingface(config("llama") | {key: None}, {}, "config.json")


ROTARY = {
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip
NO_NUMBERS: list[Any] = ["4", [], True, float("nan"), float("inf"), -4.0]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale"])
def test_rotary_settings_that_are_no_numbers_are_refused(key, value):
    """With these transformers builds no model, or one that computes no numbers."""
    rotary = {**ROTARY["yarn"], "rope_theta": 1e4, key: value}
    said = f"says {key} = {short(value)} in its rotary settings, it should be a finite number"
    with pytest.raises(SourceError, match=re.escape(said)):
        from_huggingface(config("llama") | {"rope_parameters": rotary}, {}, "config.json")
    scaling = json.dumps({name: of for name, of in rotary.items() if name != "rope_theta"})
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_settings([f"rope_scaling={scaling}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [("factor", 0), ("truncate", 1), ("truncate", "no"), ("short_factor", [1.0, float("nan")]), ("short_factor", 1.0),
     ("high_freq_factor", "4"), ("alpha", -1), ("of_no_class", float("inf")), ("rope_type", 3)],
    ids=str,
)  # fmt: skip
def test_other_rotary_settings_that_no_model_has_are_refused(key, value):
    with pytest.raises(SourceError, match=f"{key} = .* should be|rope_scaling = a dict"):
        checked_scaling({"rope_type": "yarn", key: value}, "rope_scaling", "config.json")


def test_rotary_settings_that_may_be_anything_else_may_be_that():
    usual = {"rope_type": "yarn", "factor": None, "beta_fast": 0, "mscale": 0.0, "truncate": False,
             "short_factor": [1, 2.5], "of_no_class": [{}], "mrope_interleaved": True}  # fmt: skip
    assert checked_scaling(usual, "rope_scaling", "config.json") == usual


NULLS = ["rope_theta", "factor", "partial_rotary_factor", "low_freq_factor", "original_max_position_embeddings",
         "beta_fast", "beta_slow"]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "starcoder2", "hy_v3", "glm4_moe", "gemma3"])
@pytest.mark.parametrize("kind", ROTARY)
def test_null_in_the_rotary_settings_is_read_as_transformers_does(name, kind):
    """What transformers builds no model with is refused, and nothing else but the key that only some classes read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for key in NULLS:
        plain = {name: value for name, value in config(name).items() if name not in ("rope_theta", "rope_scaling")}
        settings = {"rope_theta": 10000.0, **ROTARY[kind]}
        if name == "glm4_moe":
            settings["partial_rotary_factor"] = 0.5
        changed = settings | {key: None}
        for_one = {"full_attention": changed, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        plain["rope_parameters"] = for_one if name == "gemma3" else changed
        try:
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
            built = True
        except (TypeError, KeyError, StrictDataclassClassValidationError):
            built = False
        try:
            from_huggingface(plain, {}, "config.json")
            read = "read"
        except SourceError as error:
            read = f"{key} = null" if f"{key} = null in its rotary settings" in str(error) else str(error)
        ignored = built and key == "partial_rotary_factor"  # by this class and not by others
        assert read == ("read" if built and not ignored else f"{key} = null"), (key, built)


def test_a_base_of_a_window_that_is_null_is_refused():
    rotary = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": None}}
    plain = config("gemma3")
    with pytest.raises(SourceError, match="rope_theta = null"):
        from_huggingface({**plain, "rope_parameters": rotary}, {}, "config.json")


def test_null_is_no_activation():
    with pytest.raises(UnsupportedError, match="hidden_act = None"):
        from_huggingface(config("llama") | {"hidden_act": None}, {}, "config.json")


@pytest.mark.parametrize(("kind", "notes"), [("llama4", 1), ("olmoe", 2)])
def test_fused_experts_are_noted_where_the_hub_has_others(kind, notes):
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 16)}
    spec = describe({"model_type": kind}, shapes, {}, "no table")
    assert len(spec.notes) == notes


@pytest.mark.parametrize(("name", "headless"), [("OPTModel", True), ("OPTForCausalLM", False)])
def test_a_class_without_a_head_is_given_none(name, headless):
    """Where nothing says that it is tied, only a class that has a head can have lost it."""
    embedding = "model.decoder.embed_tokens.weight"
    spec = describe({"model_type": "opt", "architectures": [name]}, {embedding: (8, 4)}, {}, "no table")
    assert (spec.tied, dict(spec.copies)) == ((False, {}) if headless else (True, {"lm_head.weight": embedding}))
    assert len(spec.remarks) == (not headless)


@pytest.mark.parametrize(
    ("names", "embedding", "headed"),
    [
        (["Qwen2ForSequenceClassification"], "model.embed_tokens.weight", False),
        (["LlamaForTokenClassification"], "model.embed_tokens.weight", False),
        (["WhisperForConditionalGeneration"], "model.decoder.embed_tokens.weight", False),
        (["Qwen2VLForConditionalGeneration"], "model.language_model.embed_tokens.weight", True),
        (["Qwen2VLForConditionalGeneration"], "model.embed_tokens.weight", True),  # as in the files of the Hub
        (["MptForCausalLM"], "transformer.wte.weight", True),
        (None, "model.embed_tokens.weight", True),
    ],
)
def test_a_tied_config_makes_no_head(names, embedding, headed):
    """A copy that no file holds is one of a class that has it, or of one that nothing names; one in a file is one."""
    config = {"model_type": "kind", "architectures": names, "tie_word_embeddings": True}
    for held in (False, True):
        shapes = {embedding: (8, 4)} | ({"lm_head.weight": (8, 4)} if held else {})
        spec = describe(config, shapes, {}, "no table")
        assert dict(spec.copies) == ({"lm_head.weight": embedding} if headed or held else {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rotary_percent": 0.5, "add_qkv_bias": True}, "partial rotary embedding"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"layernorm_zero_centered_gamma": True}, "zero_centered"),
        ({"position_embedding_type": "none"}, "position_embedding_type"),
        ({"position_embedding_type": "learned_absolute"}, "no known family has .* learned positions"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_router_pre_softmax": True}, "router_normalized = False"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_router_topk_scaling_factor": 2.0}, "router_scale = 2.0"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 2}, r"dense_layers = \[1, 3\]"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": "([0]*2)"}, "says nothing about 4 layers"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_router_load_balancing_type": ["sinkhorn"]}, "sinkhorn"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_router_score_function": "sigmoid"}, "no known family"),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 64}, "no known family"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "no known family"),
        ({"mtp_num_layers": 1}, "a llama with a layer that predicts further tokens has no table here"),
    ],
)
def test_megatron_settings_without_counterpart_are_refused(changes, reason):
    args = to_megatron(from_huggingface(config("llama"), {}, "config.json"))
    with pytest.raises(UnsupportedError, match=reason):
        from_megatron(args | changes, {}, None, "args")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "deepseek_v3"])
def test_megatron_args_without_the_type_of_positions(name):
    """Older trees have learned positions unless a flag says rotary; a YaRN was read as no scaling."""
    spec = from_huggingface(config(name), {}, "config.json")
    args = to_megatron(spec)
    del args["position_embedding_type"]
    if name == "gpt2":
        assert from_megatron(args, {}, None, "args") == from_megatron(to_megatron(spec), {}, None, "args")
    else:
        with pytest.raises(
            UnsupportedError, match="args says neither position_embedding_type nor use_rotary_"
        ) as raised:
            from_megatron(args, {}, None, "args")
        assert "has learned positions" in str(raised.value)
        assert "'learned_absolute'" not in str(raised.value), "which nobody wrote"
        with pytest.raises(UnsupportedError, match="softmax_scale = 0"):  # what else there is, is said first
            from_megatron({**args, "softmax_scale": 0.3}, {}, None, "args")
    if name == "llama":
        args["use_rotary_position_embeddings"] = True
        assert from_megatron(args, {}, None, "args") == from_megatron(to_megatron(spec), {}, None, "args")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swiglu": True}, "normalization = 'LayerNorm'"),
        ({"add_bias_linear": False}, "add_bias_linear = False"),
        ({"openai_gelu": True}, "openai_gelu = True"),
        ({"bias_gelu_fusion": 1}, "bias_gelu_fusion = 1"),
        ({"add_bias_linear": False, "disable_bias_linear": True}, "no known family has this combination of norms"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p = True and layernorm_zero_centered_gamma = False con"),
        ({"normalization": "RMSNorm"}, "no known family has this combination of norms"),
    ],
)
def test_what_starcoder_2_does_not_compute_is_refused(changes, reason):
    args = to_megatron(from_huggingface(config("starcoder2"), {}, "config.json"))
    with pytest.raises(UnsupportedError, match=reason):
        from_megatron(args | changes, {}, None, "args")


@pytest.mark.parametrize("name", ["arcee", "nemotron", "starcoder2"])
def test_the_square_of_relu_is_an_activation_of_megatron(name):
    spec = from_huggingface(config(name, hidden_act="relu2"), {}, "config.json")
    args = to_megatron(spec)
    assert (args["squared_relu"], args["bias_gelu_fusion"]) == (True, False)
    assert from_megatron(args, {}, None, "args").activation == "relu2"
    with pytest.raises(RefusedError, match=r"activation: gelu \| relu2"):
        from_megatron(args | {"squared_relu": False}, {}, spec, "args")


def test_without_biases_megatron_fuses_no_activation():
    """`validate_args` switches the fusion off, whatever a checkpoint says."""
    spec = from_huggingface(config("arcee", hidden_act="gelu"), {}, "config.json")
    assert from_megatron(to_megatron(spec) | {"bias_gelu_fusion": True}, {}, None, "args").activation == "gelu"
    with pytest.raises(RefusedError, match="no activation gelu_pytorch_tanh without biases, only gelu and relu2"):
        to_megatron(from_huggingface(config("arcee", hidden_act="gelu_pytorch_tanh"), {}, "config.json"))


def test_norms_that_are_stored_less_one_have_two_names_and_a_flag():
    spec = from_huggingface(config("nemotron"), {}, "config.json")
    args = to_megatron(spec)
    for flag in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):  # of which a tree has either
        other = {name: value for name, value in args.items() if name != flag}
        assert from_megatron(other, {}, None, "args").family == "nemotron"
    assert "\n--apply-layernorm-1p\n" in flags(namespace(spec, ["F32"], Options(), 256, {}, None))
    for llama in ({"apply_layernorm_1p": True}, {"layernorm_zero_centered_gamma": True}):
        with pytest.raises(UnsupportedError, match="= True is not supported"):
            from_megatron(to_megatron(from_huggingface(config("llama"), {}, "config.json")) | llama, {}, None, "args")


def test_layers_that_do_not_rotate_have_three_spellings():
    spec = from_huggingface(config("smollm3"), {}, "config.json")
    args = to_megatron(spec)
    assert (spec.nope_layers, args["no_rope_freq"]) == ((3,), [0, 0, 0, 1])
    assert from_megatron(args | {"no_rope_freq": 4}, {}, None, "args") == from_megatron(args, {}, None, "args") == spec
    silent = config("smollm3") | {"no_rope_layers": None}
    assert from_huggingface(silent, {}, "config.json") == spec
    assert "--no-rope-freq '[0,0,0,1]'" in flags(namespace(spec, ["F32"], Options(), 256, {}, None))
    every = from_huggingface(silent | {"no_rope_layer_interval": 5}, {}, "config.json")
    assert (every.nope_layers, to_megatron(every)["no_rope_freq"]) == ((), None)
    assert from_megatron(to_megatron(every), {}, every, "args") == every
    assert from_megatron(to_megatron(every), {}, None, "args").family == "llama"
    with pytest.raises(RefusedError, match=r"describes a model like smollm3, its config a llama"):
        from_megatron(args, {}, from_huggingface(config("llama"), {}, "config.json"), "args")


@pytest.mark.parametrize("value", [3, True, 0, [0, 1], [0, 0, 0, 2], "4", []])
def test_a_pattern_of_rotation_that_does_not_fit_is_refused(value):
    args = to_megatron(from_huggingface(config("smollm3"), {}, "config.json"))
    with pytest.raises(UnsupportedError, match="says nothing about 4 layers"):
        from_megatron(args | {"no_rope_freq": value}, {}, None, "args")


def test_windows_in_some_layers_have_three_spellings():
    spec = from_huggingface(config("ministral"), {}, "config.json")
    args = to_megatron(spec)
    assert (spec.full_layers, args["window_attn_skip_freq"], args["window_size"]) == ((1, 3), [1, 0, 1, 0], (7, 0))
    assert from_megatron(args | {"window_attn_skip_freq": 2}, {}, spec, "args") == spec
    assert "--window-attn-skip-freq '[1,0,1,0]'\n--window" in flags(namespace(spec, ["F32"], Options(), 256, {}, None))
    every = from_huggingface(config("ministral") | {"layer_types": None}, {}, "config.json")
    assert (every.full_layers, to_megatron(every)["window_attn_skip_freq"]) == ((), None)
    assert from_megatron(to_megatron(every), {}, every, "args") == every
    assert from_megatron(to_megatron(every), {}, None, "args").family == "mistral"
    with pytest.raises(RefusedError, match=r"describes a model like cwm or ministral, its config a mistral"):
        from_megatron(args, {}, from_huggingface(config("mistral"), {}, "config.json"), "args")
    none = config("cwm") | {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    whole = from_huggingface(none, {}, "config.json")
    assert to_megatron(whole)["window_size"] is None
    assert from_megatron(to_megatron(whole), {}, whole, "args") == whole
    assert from_megatron(to_megatron(whole), {}, None, "args").family == "llama"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_rope_scaling": True}, r"a phi3 has no rope scaling like use_rope_scaling = True"),
        ({"rotary_seq_len_interpolation_factor": 2}, r"like rotary_seq_len_interpolation_factor = 2"),
    ],
)
def test_a_phi3_whose_config_transformers_would_not_take_is_refused(changes, reason):
    """The configs of Phi-3 take one type of rope scaling, and no run of Megatron has it."""
    whole = config("phi3")
    with pytest.raises(StrictDataclassClassValidationError, match=r"must be one of \['longrope'\]"):
        AutoConfig.for_model(**settings_of("phi3", rope_scaling={"rope_type": "linear", "factor": 2.0}))
    spec = from_huggingface(whole, {}, "config.json")
    args = to_megatron(spec)
    assert from_megatron(args, {}, None, "args").family == "phi3"
    for base in (None, spec):
        with pytest.raises(UnsupportedError, match=reason):
            from_megatron(args | changes, {}, base, "args")
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None}
    with pytest.raises(UnsupportedError, match="a phi3 has no rope scaling linear"):
        from_huggingface({**whole, **linear}, {}, "config.json")


@pytest.mark.parametrize("window", [(7, -1), (-1, 0), (-1, -1), (7, 0)])
def test_a_window_without_a_bound_is_one_of_transformer_engine(window):
    """To the mask of megatron-core's local layers -1 is a number, with which tokens do not see themselves."""
    tokens = torch.arange(12)
    ahead, behind = tokens[None] - tokens[:, None], tokens[:, None] - tokens[None]
    local = (behind <= window[0]) & (ahead <= window[1])
    args = to_megatron(from_huggingface(config("mistral"), {}, "config.json")) | {"window_size": window}
    spec = from_megatron(args | {"transformer_impl": "transformer_engine"}, {}, None, "args")
    assert spec.sliding_window == (8 if window[0] == 7 else None)
    if local.diagonal().all():
        assert from_megatron(args | {"transformer_impl": "local"}, {}, None, "args").sliding_window == 8
        return
    with pytest.raises(UnsupportedError, match=r"window_size = .* with transformer_impl = local"):
        from_megatron(args | {"transformer_impl": "local"}, {}, None, "args")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]},
        {"layer_types": "sliding_attention"},
        {"layer_types": []},
        {"sliding_window": None},
        {"layer_types": None},
    ],
)
def test_windows_of_which_a_config_says_too_little_are_refused(changes):
    with pytest.raises(SourceError, match=r"layer_types|full_layers|does not say how wide"):
        from_huggingface(config("cwm") | changes, {}, "config.json")


@pytest.mark.parametrize("name", ["smollm3", "cwm"])
def test_some_layers_can_be_set_by_hand(name):
    setting = {"smollm3": "nope_layers", "cwm": "full_layers"}[name]
    spec = from_huggingface(config(name), {setting: [0, 2]}, "config.json")
    again = to_huggingface(spec, config(name))
    assert from_huggingface(again, {}, "again") == spec
    with pytest.raises(SourceError, match=f"{setting} = .*, these are no layers of 4"):
        from_huggingface(config(name), {setting: [4]}, "config.json")
    with pytest.raises(UnsupportedError, match=f"{setting} is fixed for llama"):
        from_huggingface(config("llama"), {setting: [0]}, "config.json")


def test_the_scaling_that_transformers_assumes_of_cwm():
    settings = {key: value for key, value in config("cwm").items() if key != "rope_parameters"}
    spec = from_huggingface(settings, {}, "config.json")
    assert differences(from_huggingface(AutoConfig.for_model(**settings).to_dict(), {}, "one"), spec) == []
    assert (spec.rope_theta, to_megatron(spec)["rope_scaling_factor"]) == (1e6, 16.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"no_rope_layers": [1, 1, 0]},
        {"no_rope_layers": [1, 1, 0, 2]},
        {"no_rope_layers": 4},
        {"no_rope_layers": []},
        {"no_rope_layers": None, "no_rope_layer_interval": 0},
        {"no_rope_layers": None, "no_rope_layer_interval": "4"},
    ],
)
def test_a_config_that_says_nothing_of_some_layers_is_refused(changes):
    with pytest.raises(SourceError, match="no_rope_layer"):
        from_huggingface(config("smollm3") | changes, {}, "config.json")


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_configs_of_lfm2_have_another_name_for_a_tied_head(tied):
    from transformers import AutoConfig

    said = {key: value for key, value in config("lfm2").items() if key != "tie_word_embeddings"} | {
        "tie_embedding": tied
    }
    theirs = AutoConfig.for_model(**said).tie_word_embeddings
    assert from_huggingface(said, {}, "config.json").tied == theirs == tied


@pytest.mark.parametrize("name", ["seed_oss", "ernie4_5"])
def test_a_width_of_heads_that_is_null_is_that_of_all_others(name):
    """What a family assumes without the key is another."""
    base = config(name)
    assert from_huggingface(base | {"head_dim": None}, {}, "config.json").head_dim == 8
    assert from_huggingface({key: base[key] for key in base if key != "head_dim"}, {}, "one").head_dim in (64, 128)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}),
        ("smollm3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
        ("smollm3", {"partial_rotary_factor": 0.5}),
        ("ernie4_5", {"use_bias": True}),
        ("ernie4_5", {"hidden_act": "gelu"}),
        ("ernie4_5", {"partial_rotary_factor": 0.5}),
        ("helium", {"hidden_act": "gelu"}),
        ("helium", {"head_dim": 16}),
        ("nemotron", {"attention_bias": True}),
        ("nemotron", {"mlp_bias": True}),
        ("arcee", {"mlp_bias": True}),
        ("arcee", {"partial_rotary_factor": 0.5}),
    ],
)
def test_a_config_of_another_computation_is_refused(name, changes):
    base = config(name)
    base |= {"rope_parameters": base["rope_parameters"] | changes} if "partial_rotary_factor" in changes else changes
    with pytest.raises(UnsupportedError, match="not supported for"):
        from_huggingface(base, {}, "config.json")


def test_the_activation_of_starcoder_2_is_a_fusion_of_megatron():
    for activation, fused, lines in (("gelu_pytorch_tanh", True, 0), ("gelu", False, 1)):
        args = to_megatron(from_huggingface(config("starcoder2", hidden_act=activation), {}, "config.json"))
        assert args["bias_gelu_fusion"] is fused
        written = namespace(from_megatron(args, {}, None, "args"), ["F32"], Options(), 256, {}, None)
        assert flags(written).count("--no-bias-gelu-fusion") == lines
    with pytest.raises(RefusedError, match="Megatron has no activation relu"):
        to_megatron(from_huggingface(config("starcoder2", hidden_act="relu"), {}, "config.json"))


@pytest.mark.parametrize(
    "name", ["num_layers", "rotary_base", "untie_embeddings_and_output_weights", "ffn_hidden_size"]
)
def test_megatron_settings_that_are_missing_are_named(name):
    args = to_megatron(from_huggingface(config("llama"), {}, "config.json"))
    del args[name]
    with pytest.raises(SourceError, match="no safe default"):
        from_megatron(args, {}, None, "args")


def test_older_spellings_of_megatron():
    args = to_megatron(from_huggingface(config("llama"), {}, "config.json"))
    del args["layernorm_epsilon"]
    assert from_megatron(args, {}, None, "args").norm_epsilon == 1e-6
    mha = to_megatron(from_huggingface(config("llama-mha"), {}, "config.json"))
    assert mha["group_query_attention"] is False
    assert from_megatron(mha | {"num_query_groups": 1}, {}, None, "args").kv_heads == 8


@pytest.mark.parametrize(
    "scaling",
    [
        {**LLAMA3, "low_freq_factor": 2.0},
        {**LLAMA3, "original_max_position_embeddings": 4096},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.5},
        {**YARN, "attention_factor": 1.2},
        {**YARN, "factor": 1.0},
        {**YARN, "original_max_position_embeddings": 1024.5},
    ],
)
def test_rotary_scalings_that_megatron_lacks_are_refused(scaling):
    spec = from_huggingface(config("llama") | {"rope_parameters": scaling}, {}, "config.json")
    with pytest.raises(RefusedError, match="Megatron has no rope scaling"):
        to_megatron(spec)


@pytest.mark.parametrize(
    ("scaling", "message", "hint"),
    [
        ({**YARN, "attn_factor": 0.88, "finetuned": True}, "yarn with these settings: attn_factor", "it knows llama3"),
        ({**YARN, "factor": 1.0}, "yarn with these settings: factor, beta_fast, ", "a factor above 1"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic", "--set rope_scaling=none .* up to 128 tokens"),
    ],
)
def test_a_refusal_names_what_megatron_lacks(scaling, message, hint):
    spec = from_huggingface(config("llama") | {"rope_parameters": scaling}, {}, "config.json")
    with pytest.raises(RefusedError, match=message) as raised:
        to_megatron(spec)
    assert re.search(hint, raised.value.hint)
    assert "finetuned" not in str(raised.value)


def test_the_longrope_of_phi_3_is_kept_whole_and_stays_out_of_megatron():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    new = config("phi3-tied", rope_parameters=rope, original_max_position_embeddings=64)
    spec = from_huggingface(new, {}, "config.json")
    assert spec.rope_scaling == {"rope_type": "longrope", **factors, "original_max_position_embeddings": 64}
    first = old_spelling(new)
    assert from_huggingface(first, {}, "config.json") == spec
    first["rope_scaling"]["rope_type"] = "su"
    assert from_huggingface(first, {}, "config.json") == spec
    with pytest.raises(RefusedError, match="Megatron has no rope scaling longrope"):
        to_megatron(spec)


def test_an_original_length_that_the_class_of_phi_3_has():
    """It is 4096 where config.json has none beside the rotary settings; we took the longest text."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    silent = config("phi3-tied", rope_parameters=rope)
    silent.pop("original_max_position_embeddings", None)
    spec = from_huggingface(silent, {}, "config.json")
    for settings in (silent, to_huggingface(spec, {})):
        theirs = AutoConfig.for_model(**deepcopy(settings))
        scalings = (spec.rope_scaling, theirs.rope_parameters)
        assert [scaling["original_max_position_embeddings"] for scaling in scalings] == [4096, 4096]
    inside = silent | {"rope_parameters": rope | {"original_max_position_embeddings": 64}}
    with pytest.raises(SourceError, match="original_max_position_embeddings = 4096, and 64 in its rotary settings"):
        from_huggingface(inside, {}, "config.json")


@pytest.mark.parametrize("rope", [LLAMA3, PLAIN_YARN])
def test_an_original_length_beside_the_rotary_settings_is_that_of_transformers(rope):
    """transformers takes it before the one within them: two that differ are no model that somebody meant."""
    within = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    outer = config("llama") | {"rope_parameters": within, "original_max_position_embeddings": 64}
    theirs = AutoConfig.for_model(**deepcopy(outer))
    theirs.standardize_rope_params()  # as it does before it computes
    scaling = from_huggingface(outer, {}, "config.json").rope_scaling
    assert [settings["original_max_position_embeddings"] for settings in (scaling, theirs.rope_parameters)] == [64, 64]
    with pytest.raises(SourceError, match=r"contradicts itself: original_max_position_embeddings = 64, and \d+ in its"):
        from_huggingface(outer | {"rope_parameters": rope}, {}, "config.json")


@pytest.mark.parametrize("rope", [LLAMA3, PLAIN_YARN])
def test_an_original_length_that_no_key_says_is_the_longest_text(rope):
    """As transformers fills it in; with another longest text it stays what it was."""
    within = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    silent = config("llama") | {"rope_parameters": within, "max_position_embeddings": 64}

    def original(settings):
        theirs = AutoConfig.for_model(**deepcopy(settings))
        theirs.standardize_rope_params()
        return theirs.rope_parameters["original_max_position_embeddings"]

    spec = from_huggingface(silent, {}, "config.json")
    assert spec.rope_scaling["original_max_position_embeddings"] == original(silent) == 64
    said = silent | {"rope_parameters": {**within, "original_max_position_embeddings": 64}}
    assert from_huggingface(said, {}, "config.json") == spec
    longer = to_huggingface(from_huggingface(silent, {"max_positions": 256}, "config.json"), silent)
    assert (longer["max_position_embeddings"], original(longer)) == (256, 64)
    beside = silent | {"original_max_position_embeddings": 32}
    assert original(to_huggingface(replace(spec, max_positions=256), beside)) == 64


def test_rotary_scalings_that_megatron_has():
    spec = from_huggingface(config("llama3"), {}, "config.json")
    args = to_megatron(spec)
    assert (args["use_rope_scaling"], args["rope_scaling_factor"]) == (True, 8.0)
    assert dict(spec.rope_scaling or {}) == {"rope_type": "llama3", "factor": 8.0, **LLAMA3_SCALING}


@pytest.mark.parametrize(
    "scale",
    [
        {},
        {"mscale": 0.0, "mscale_all_dim": 1.0},
        {"mscale": None},
        {"attention_factor": 0.1 * math.log(4) + 1},
        {"finetuned": True},
    ],
)
def test_yarn_is_the_same_whatever_its_config_leaves_out(scale):
    """What a config leaves out is what transformers assumes; with the config at hand it is not a difference."""
    short = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 32}
    computed = [
        ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model("llama", rope_parameters=rope), "cpu")
        for rope in (dict(short), {**short, **scale})
    ]
    assert computed[0][0].equal(computed[1][0])
    assert computed[0][1] == computed[1][1]
    spec = from_huggingface(config("llama", rope_parameters={**short, **scale}), {}, "config.json")
    args = to_megatron(spec)
    assert (args["position_embedding_type"], args["yarn_beta_fast"], args["mscale"]) == ("yarn", 32.0, 1.0)
    assert "--yarn-correction-range-round-to-int\n" in flags(namespace(spec, ["F32"], Options(), 256, {}, None))
    assert from_megatron(args, {}, spec, "args") == spec
    alone = from_megatron(args, {}, None, "args").rope_scaling
    expected = {key: value for key, value in short.items() if key != "rope_theta"}
    assert alone == expected | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rotary_scaling_factor": 1.0}, r"YaRN with factor = 1.0, .*mscale = 1.0.* has no counterpart"),
        ({"rotary_percent": 0.5}, "YaRN with rotary_percent = 0.5"),
        ({"mscale": 0.5}, "has no counterpart in transformers"),
        ({"mscale": 0.5, "mscale_all_dim": None}, "YaRN without mscale_all_dim and with mscale = 0.5"),
        ({"mscale": None, "mscale_all_dim": 0.5}, "YaRN without mscale and with mscale = 1.0, mscale_all_dim = 0.5"),
        ({"yarn_original_max_position_embeddings": "x"}, "has no counterpart in transformers"),
        ({"softmax_type": "off-by-one"}, "glu_linear_offset = 1.0"),
        ({"softmax_type": "vanilla"}, "glu_linear_offset = 1.0"),
        ({"glu_linear_offset": 0.0}, "glu_linear_offset = 0.0"),
        ({"quick_geglu": False}, "quick_geglu = False"),
        ({"swiglu": True}, "swiglu = True"),
        ({"add_bias_linear": False}, "add_bias_linear = False"),
        ({"window_attn_skip_freq": [1, 0]}, "says nothing about 4 layers"),
        ({"window_attn_skip_freq": True}, "says nothing about 4 layers"),
        ({"window_size": (7, 7)}, "window_size"),
        ({"window_size": (-1, 7)}, "window_size"),
        ({"enable_gpt_oss": True}, "enable_gpt_oss = True"),
    ],
)
def test_what_gpt_oss_does_not_compute_is_refused(changes, reason):
    args = to_megatron(from_huggingface(config("gpt_oss-tied"), {}, "config.json"))
    with pytest.raises(UnsupportedError, match=reason):
        from_megatron(args | changes, {}, None, "args")


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt_oss-tied", "glu_linear_offset"), ("gpt_oss-tied", "quick_geglu"), ("qwen3_next", "attention_output_gate")],
)
def test_an_argument_without_which_megatron_computes_another_model_has_to_be_there(family, name):
    args = dict(to_megatron(from_huggingface(config(family), {}, "config.json")))
    del args[name]
    with pytest.raises(UnsupportedError, match=f"{name} is not there"):
        from_megatron(args, {}, None, "args")


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
"""As it is on the Hub, as far as it says something of the model; its quantization apart."""


def test_the_config_of_deepseek_v3():
    spec = from_huggingface(DEEPSEEK_V3, {}, "config.json")
    assert (spec.query_rank, spec.latent_rank, spec.nope_dim, spec.rope_dim, spec.head_dim) == (1536, 512, 128, 64, 128)
    assert (spec.dense_layers, spec.shared_ffn, spec.router_groups, spec.notes) == ((0, 1, 2), 2048, 8, ())
    assert to_huggingface(spec, DEEPSEEK_V3) == DEEPSEEK_V3
    args = to_megatron(spec)
    assert (args["rope_type"], args["rotary_scaling_factor"], args["mscale_all_dim"]) == ("yarn", 40, 1.0)
    assert from_megatron(args, {}, spec, "args") == spec
    silent = ("original_max_position_embeddings", "beta_fast", "beta_slow")  # which are no arguments at 0.16.1
    older = {name: value for name, value in args.items() if name not in silent}
    assert from_megatron(older, {}, spec, "args") == spec
    sizes = sum(np.prod(shape) for _, _, shape in spec.boxes())
    assert round(sizes / 1e9) == 671


@pytest.mark.parametrize(
    "name", ["first_k_dense_replace", "n_shared_experts", "n_group", "v_head_dim", "moe_intermediate_size"]
)
def test_what_transformers_assumes_of_deepseek_v3(name):
    settings = {key: value for key, value in DEEPSEEK_V3.items() if key != name}
    expected = from_huggingface(AutoConfig.for_model(**settings).to_dict(), {}, "config.json")
    assert differences(from_huggingface(settings, {}, "config.json"), expected) == []


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"rope_type": "rope", "mscale_all_dim": 1.0}, UnsupportedError, "mscale_all_dim = 1.0"),
        ({"rope_type": "mrope"}, UnsupportedError, "rope_type = 'mrope'"),
        ({"qk_layernorm": False}, UnsupportedError, "qk_layernorm = False"),
        (
            {"norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5},
            UnsupportedError,
            "layernorm_epsilon = 1e-05 is not supported with latents",
        ),
        ({"group_query_attention": True, "num_query_groups": 4}, UnsupportedError, "8 heads in 4 groups"),
        ({"qk_pos_emb_head_dim": 7}, UnsupportedError, "of which 7 elements rotate"),
        ({"kv_lora_rank": None}, SourceError, "does not say latent_rank"),
        ({"q_lora_rank": -1}, SourceError, "query_rank = -1"),
        ({"position_embedding_type": "yarn"}, UnsupportedError, "position_embedding_type = 'yarn'"),
        ({"add_qkv_bias": True}, UnsupportedError, "no known family"),
    ],
)
def test_latents_that_transformers_lacks_are_refused(changes, error, reason):
    args = to_megatron(from_huggingface(config("deepseek_v3"), {}, "config.json"))
    with pytest.raises(error, match=reason):
        from_megatron(args | changes, {}, None, "args")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rms_norm_eps": 1e-5}, "its norms have an epsilon of 1e-05, those of its latents 1e-06"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "no rope scaling with latents"),
        ({"rope_parameters": {**YARN, "mscale": 0}}, "no rope scaling with latents like this: .*mscale = 0"),
        ({"rope_parameters": LLAMA3}, "no rope scaling with latents"),
    ],
)
def test_latents_that_megatron_lacks_are_refused(changes, reason):
    with pytest.raises(RefusedError, match=reason):
        to_megatron(from_huggingface(config("deepseek_v3") | changes, {}, "config.json"))


def test_the_windows_of_gpt_oss_have_three_spellings():
    spec = from_huggingface(config("gpt_oss"), {}, "config.json")
    args = to_megatron(spec)
    assert args["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert from_megatron(args | {"window_attn_skip_freq": 2}, {}, None, "args").own == spec.own
    silent = from_huggingface(config("gpt_oss", layer_types=None) | {"layer_types": None}, {}, "config.json")
    assert (to_megatron(silent), from_megatron(args, {}, silent, "args")) == (args, silent)
    for frequency, full in ((None, 0), (4, 1), ([0] * 4, 4)):
        kinds = from_megatron(args | {"window_attn_skip_freq": frequency}, {}, None, "args").own["layer_types"]
        assert kinds.count("full_attention") == full
    assert "--window-attn-skip-freq '[1,0,1,0]'" in flags(namespace(spec, ["F32"], Options(), 256, {}, None))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swiglu_alpha": 1.5}, "the gain of its activation is 1.702"),
        ({"swiglu_limit": 0.0}, "its clamp is a number"),
        ({"layer_types": ["chunked_attention"] * 4}, "each is sliding_attention or full_attention"),
    ],
)
def test_a_gpt_oss_that_megatron_cannot_compute_is_refused(changes, reason):
    with pytest.raises(RefusedError, match=reason):
        to_megatron(from_huggingface(config("gpt_oss") | changes, {}, "config.json"))


@pytest.mark.parametrize("setting", ["nothing=1", "layers", "layers=many", 'family="llama"'])
def test_settings_that_make_no_sense_are_usage_errors(setting):
    with pytest.raises(UsageError):
        parse_settings([setting])


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (["heads=4", "heads=8"], "--set heads is given twice: 4, then 8", "give it once"),
        (["layers=-1"], "--set layers=-1: layers is a natural number above 0, as of a model, not -1", ""),
        (["tied=1"], "--set tied=1: tied is true or false, not 1", ""),
        (["norm_epsilon=NaN"], "norm_epsilon is a finite number above 0, not nan", ""),
        (["dense_layers=3"], "dense_layers is a list of layers, from 0, not 3", ""),
        (
            ['rope_scaling={"factor": 2}'],
            "rope_scaling is a map of rotary settings with a rope_type, or none",
            """--set 'rope_scaling={"rope_type": "linear", "factor": 2.0}'""",
        ),
        (
            ['rope_scaling={"type": "yarn", "factor": 4}'],
            "a map of rotary settings with a rope_type, or none, not a dict",
            """--set 'rope_scaling={"rope_type": "yarn", "factor": 4}'""",
        ),
        (['rope_scaling={"rope_type": "linear", "foo": 1}'], "no rotary embedding has 'foo'", "known: alpha, "),
        (['rope_scaling={"rope_type": "yarn", "rope_theta": 5}'], "has 'rope_theta'", "--set rope_theta=5"),
    ],
)
def test_what_was_set_wrongly_is_said_of_the_option(settings, message, hint):
    with pytest.raises(UsageError) as raised:
        parse_settings(settings)
    assert message in str(raised.value)
    assert hint in raised.value.hint


def test_what_was_set_is_named_where_it_makes_no_model():
    with pytest.raises(SourceError, match=r"config.json with --set heads=3: 3 heads do not divide into 4 key/value"):
        from_huggingface(config("llama", num_key_value_heads=4), {"heads": 3}, "config.json")


def test_settings_are_json_or_none():
    parsed = parse_settings(["rope_theta=5e5", "tied=True", "rope_scaling=none", "sliding_window=None"])
    assert parsed == {"rope_theta": 5e5, "tied": True, "rope_scaling": None, "sliding_window": None}


MANY = [
    None,
    True,
    False,
    0,
    -1,
    2**40,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    "8",
    [],
    [[1]],
    [0, 1, 0, 1],
    {},
    (),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERTS if name in FEW])
def test_arguments_of_experts_of_any_type_are_read_or_refused(name):
    """The rows are those of Megatron, whatever the family."""
    args = to_megatron(from_huggingface(config(name), {}, "config.json"))
    names = ["num_experts", "num_layers", *(field for field in FIELDS if field.startswith("moe_"))]
    for key, value in product(names, MANY):
        try:
            spec = from_megatron(args | {key: value}, {}, None, "args")
        except VitruvianError:
            continue
        assert len(list(spec.boxes(256))) < 1000
        to_megatron(spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPERTS, *FUSED_HERE, "llama4_text"])
def test_a_config_of_experts_of_any_type_is_read_or_refused(name):
    base = config(name)
    keys = {key for keys in FAMILIES[base["model_type"]].keys.values() for key in keys.split() if key in base}
    beside = {"decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_end_index", "moe_layer_interval"}
    keys |= {*beside, "max_window_layers", "rotary_dim"}.intersection(base)
    for key, value in product(keys, MANY):
        with suppress(VitruvianError):
            spec = from_huggingface(base | {key: value}, {}, "config.json")
            assert len(list(spec.boxes(256))) < 1000
            to_huggingface(spec, base | {key: value})


def test_a_deep_model_has_full_attention_in_every_layer_without_a_config_too():
    """From the arguments of Megatron a Hunyuan 3 is a dots.llm1, whose layers behind the 62nd may have a window."""
    spec = from_huggingface(config("hy_v3", num_hidden_layers=80), {}, "config.json")
    alone = from_megatron(to_megatron(spec), {}, None, "args")
    written = to_huggingface(alone, {})
    assert alone.family == "dots1"
    assert from_huggingface(written, {}, "written") == alone
    assert set(AutoConfig.for_model(**written).layer_types) == {"full_attention"}


def test_a_family_that_fixes_another_value_is_no_candidate():
    """A Solar Open has the same tensors as a GLM-4.5-Air without biases, and no dense layer."""
    changes = {"attention_bias": False, "partial_rotary_factor": 1.0}
    args = to_megatron(from_huggingface(config("glm4_moe_air", **changes), {}, "config.json"))
    alone = from_megatron(args, {}, None, "args")
    assert (alone.family, alone.dense_layers) == ("glm4_moe_air", (0, 1))
    assert from_megatron(args | {"moe_layer_freq": 1}, {}, None, "args").family == "solar_open"


def test_a_model_of_no_family_but_one_that_requires_another_value_is_refused():
    """The router of a DeepSeek-V2 heeds no norm_topk_prob: its config would say what is not computed."""
    args = to_megatron(from_huggingface(config("deepseek_v2"), {}, "config.json")) | {"moe_router_pre_softmax": False}
    with pytest.raises(
        UnsupportedError, match="args: norm_topk_prob = True is not supported for deepseek_v2, only False"
    ):
        from_megatron(args, {}, None, "args")


def test_a_family_whose_config_cannot_say_which_layers_are_dense_is_no_candidate():
    dots = FAMILIES["dots1"]
    fixed = {**dots.requires, "first_k_dense_replace": 1}
    args = to_megatron(from_huggingface(config("dots1"), {}, "config.json"))
    with known(replace(dots, name="own", file=Path("own.toml"), requires=fixed)):
        for flags_of_experts, family in (([0, 1, 1, 1], "own"), ([0, 0, 1, 1], "dots1"), ([1, 0, 1, 1], "dots1")):
            assert from_megatron(args | {"moe_layer_freq": flags_of_experts}, {}, None, "args").family == family


def test_a_setting_that_a_format_has_no_row_for_is_refused():
    llama = from_huggingface(config("llama"), {}, "config.json")
    with pytest.raises(RefusedError, match="megatron-core has no parallel_residual = True"):
        to_megatron(replace(llama, parallel_residual=True))
    with pytest.raises(UnsupportedError, match=r"GPT-NeoX has no nope_layers = \[1\]"):
        to_neox(replace(llama, nope_layers=(1,)), 1, 0, 128, {})


def test_groups_that_transformers_ranks_otherwise_are_refused():
    args = to_megatron(from_huggingface(config("dots1-tied"), {}, "config.json"))
    assert (args["moe_router_num_groups"], args["moe_router_group_topk"], args["moe_router_topk"]) == (4, 2, 4)
    for top_k in (2, 6):
        with pytest.raises(UnsupportedError, match="moe_router_group_topk = 2 is not supported"):
            from_megatron(args | {"moe_router_topk": top_k}, {}, None, "args")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"moe_router_num_groups": None}, "moe_router_group_topk = 2, and no moe_router_num_groups"),
        ({"moe_router_num_groups": 8}, "8 experts in 8 groups are no router"),
        ({"moe_router_group_topk": 1, "moe_router_topk": 2, "num_experts": 4}, "4 experts in 4 groups are no router"),
        ({"moe_router_group_topk": 3, "moe_router_topk": 7}, "a token's 7 experts are not in 3 of 4 groups of 8"),
    ],
)
def test_groups_that_hold_no_router_are_refused(changed, sentence):
    """Megatron and transformers fail at the first token, or choose among experts that they have masked."""
    args = to_megatron(from_huggingface(config("dots1-tied"), {}, "config.json"))
    with pytest.raises(SourceError, match=sentence):
        from_megatron(args | changed, {}, None, "args")


@pytest.mark.parametrize("name", ["mixtral", "dots1-tied"])
def test_one_group_of_experts_is_none(name):
    """Its one group is the best of one."""
    spec = from_huggingface(config(name, **({"n_group": 1, "topk_group": 1} if name != "mixtral" else {})), {}, "c")
    args = to_megatron(spec) | {"moe_router_num_groups": 1, "moe_router_group_topk": 1}
    assert from_megatron(args, {}, None, "args") == from_megatron(to_megatron(spec), {}, None, "args")
    with pytest.raises((SourceError, UnsupportedError), match=r"2 of 1 groups|router_top_groups = 2"):
        from_megatron(args | {"moe_router_group_topk": 2}, {}, None, "args")
    with pytest.raises(UnsupportedError, match="moe_router_group_topk = 1 is not supported"):
        from_megatron(args | {"moe_router_num_groups": 2, "moe_router_topk": 4}, {}, None, "args")


def test_the_weight_of_a_single_expert_after_a_sigmoid_is_its_score():
    """megatron-core normalizes none there, nor does transformers without norm_topk_prob."""
    changes = {"num_experts_per_tok": 1, "norm_topk_prob": False}
    spec = from_huggingface(config("dots1", **changes), {}, "config.json")
    assert from_megatron(to_megatron(spec), {}, None, "args").router_normalized is False
    with pytest.raises(RefusedError, match="of a single expert"):
        to_megatron(from_huggingface(config("dots1", num_experts_per_tok=1), {}, "config.json"))


def test_rotary_settings_in_two_places_have_to_agree():
    """transformers 5 heeds `rope_scaling` where both are there."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    settings = config("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert from_huggingface(settings | {"rope_scaling": None}, {}, "one").rope_scaling is None
    with pytest.raises(SourceError, match="rope_parameters and a rope_scaling that differs"):
        from_huggingface(settings | {"rope_scaling": yarn}, {}, "one")
    assert from_huggingface(settings | {"rope_theta": 1e4}, {}, "one").rope_theta == 1e4
    with pytest.raises(SourceError, match=r"contradicts itself: rope_theta = 5\.0 and 10000\.0"):
        from_huggingface(settings | {"rope_theta": 5.0}, {}, "one")
    partial = config("glm4_moe")
    assert partial["rope_parameters"]["partial_rotary_factor"] == 0.5
    with pytest.raises(SourceError, match=r"contradicts itself: partial_rotary_factor = 0\.25 and 0\.5"):
        from_huggingface(partial | {"partial_rotary_factor": 0.25}, {}, "one")
    both = {"rope_parameters": yarn, "rope_scaling": yarn}
    assert from_huggingface(settings | both, {}, "one").rope_scaling == yarn


@pytest.mark.parametrize(
    ("model", "setting", "relative"),
    [
        ("smollm3", {"layers": 8}, "nope_layers"),
        ("dots1", {"expert_ffn": 32}, "shared_ffn"),
        ("minimax_m2", {"head_dim": 32}, "rotary_fraction"),
    ],
)
def test_what_a_config_spells_in_terms_of_a_corrected_setting_stays(model, setting, relative):
    """Layers by their distance, widths by a number of experts: the same words mean something else then."""
    config = {**settings_of(model), "no_rope_layers": None, "rms_norm_eps": 1e-6}
    spec = from_huggingface(config, setting, "config.json")
    again = from_huggingface(to_huggingface(spec, config), {}, "config.json")
    assert getattr(again, relative) == getattr(spec, relative)
    assert again == spec


def test_a_config_is_the_same_file_each_time():
    """Whatever the order that this process gives to sets."""
    code = (
        "import json, sys\nfrom formats.huggingface.config import from_huggingface, to_huggingface\n"
        "for config in json.loads(sys.argv[1]):\n"
        "    print(json.dumps(to_huggingface(from_huggingface(config, {}, ''), {})))"
    )
    configs = [{**settings_of(name), "rms_norm_eps": 1e-6} for name in ("dots1", "glm4_moe", "deepseek_v3")]
    texts = {
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(configs)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in range(4)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("value", [False, None])
def test_a_model_whose_tokens_see_those_after_them_has_no_table(value):
    """transformers reads the key of every model: null is as good as false."""
    for name in MODELS:
        with pytest.raises(UnsupportedError, match=f"is_causal = {value} is not supported"):
            from_huggingface(config(name) | {"is_causal": value}, {}, "config.json")


def test_a_null_that_a_class_takes_for_false_is_not_its_default():
    """Falcon-H1's norm after the gate, which is before it where the config lacks the key."""
    plain = config("falcon_h1_normed")
    silent = {key: value for key, value in plain.items() if key != "mamba_norm_before_gate"}
    said = from_huggingface(silent | {"mamba_norm_before_gate": True}, {}, "config.json")
    assert from_huggingface(silent, {}, "config.json") == said
    with pytest.raises(SourceError, match="mamba_norm_before_gate = null"):
        from_huggingface(silent | {"mamba_norm_before_gate": None}, {}, "config.json")


STRAY = {"sliding_window": 8, "attention_chunk_size": 8, "kv_sharing_modes": ["reuse"] * 100}
OWN_WINDOW = {key: [] for key in STRAY} | {
    "sliding_window": [name for name in MODELS if family_of(MODELS[name], name).window == "sliding_window"],
    "attention_chunk_size": [name for name in MODELS if "attention_chunk_size" in family_of(MODELS[name], name).own],
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("key", STRAY)
def test_a_key_by_which_only_generation_forgets_tokens_is_refused(name, key):
    """The masks of a family without a window ignore the key, and the cache of `generate` reads it."""
    plain, stray = config(name), config(name) | {key: STRAY[key]}
    if name in OWN_WINDOW[key]:
        return
    try:
        from_huggingface(stray, {}, "config.json")
    except UnsupportedError:
        return
    with_key, without = (str(get_layer_types_and_kwargs(AutoConfig.for_model(**each))) for each in (stray, plain))
    assert with_key == without


@pytest.mark.parametrize("value", [0, 8, 4096])
def test_a_window_of_a_family_without_one_is_refused(value):
    for name in ("llama", "deepseek_v3", "gpt_neox", "nemotron", "glm4_moe", "gpt2"):
        with pytest.raises(UnsupportedError, match=f"sliding_window = {value} is not supported for {name}: its"):
            from_huggingface(config(name) | {"sliding_window": value}, {}, "config.json")
        assert from_huggingface(config(name) | {"sliding_window": None}, {}, "config.json")


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"])
def test_a_window_that_the_class_turns_off_is_none(name):
    off = {"sliding_window": 32768, "use_sliding_window": False}
    assert from_huggingface(config(name) | off, {}, "config.json") == from_huggingface(config(name), {}, "config.json")


@pytest.mark.parametrize("window", [None, 8])
def test_a_window_that_is_on_is_refused_of_qwen2_moe(window):
    """Also without a size: its class makes layers with a window then."""
    on = {"sliding_window": window, "use_sliding_window": True}
    with pytest.raises(UnsupportedError, match="use_sliding_window = True is not supported for qwen2_moe"):
        from_huggingface(config("qwen2_moe") | on, {}, "config.json")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "nemotron_h", "mamba2"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rotary_scaling_of_a_model_without_rotation_is_refused(name, key):
    """transformers 5.23 builds some of them, with settings that it does not use."""
    for kind in ("rope_type", "type"):
        with pytest.raises(UnsupportedError, match=f"{key} of type 'yarn' is not supported for {name}, which"):
            from_huggingface(config(name) | {key: {kind: "yarn", "factor": 4.0}}, {}, "config.json")
    assert from_huggingface(config(name) | {key: {"rope_type": "default"}}, {}, "config.json")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "glm4_moe"])
def test_settings_of_single_layers_have_no_table(name):
    """transformers 5.23 takes the key of every model, whose own config it is then for one layer."""
    with pytest.raises(UnsupportedError, match="per_layer_config, settings of single layers, is not supported"):
        from_huggingface(config(name) | {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, {}, "config.json")
    assert from_huggingface(config(name) | {"per_layer_config": {}}, {}, "config.json")


@pytest.mark.parametrize("name", ["glm4_moe", "phi3", "nemotron", "qwen3_next", "gpt_neox"])
def test_a_rotary_fraction_of_nothing_is_no_missing_one(name):
    """transformers turns no element of a head with it; the default of the class was taken, exit code 0."""
    changes = {"partial_rotary_factor": 0.0, "rotary_pct": 0.0, "rope_parameters": None, "rope_scaling": None}
    with pytest.raises(VitruvianError, match=r"rotary_fraction = 0\.0|partial_rotary_factor = 0\.0|rotary_pct = 0\.0"):
        from_huggingface({**config(name), **changes, "rope_theta": 1e4}, {}, "config.json")


def test_the_fraction_that_bamba_does_not_take():
    """Its class sets the key to 0.5 and takes another only in `rope_parameters`; the key was written, and ignored."""
    old = {key: value for key, value in config("bamba").items() if key != "rope_parameters"}
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor = 1\.0 is not supported for bamba, only 0\.5"):
        from_huggingface(old | {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, {}, "config.json")
    inside = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}
    assert from_huggingface(old | {"rope_parameters": inside}, {}, "config.json").rotary_fraction == 1.0
