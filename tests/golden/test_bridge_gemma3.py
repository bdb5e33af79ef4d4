"""Gemma 3 of Megatron-Bridge, whose modules wrote and computed tests/golden/bridge/gemma3: into it and out of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from formats.families import FAMILIES
from tests.faults.dcp_tools import refused
from tests.golden.test_bridge_lora import adapter_of, contents

REAL = Path(__file__).with_name("bridge") / "gemma3"
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
ACCEPT = ("--accept", "post_layernorm_epsilon")
FIRST = ("--megatron-version", "0.16")
"""For Megatron-Bridge 0.3.1, which runs with no later megatron-core."""
RUNS: dict[str, tuple[str, ...]] = {"gemma3": FIRST, "gemma3_0.6": ()}
"""Runs of 0.3.1 and 0.6.2, and the options that write such a one."""


def difference(folder: Path, golden: Path = REAL, **changes: Any) -> float:
    """How far the logits of transformers are from those of Bridge's modules, with a changed config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text()) | changes
    bridge = np.load(golden / "golden.npz")
    known = AutoConfig.for_model(**config)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, config=known, dtype=torch.float32)
        logits = model(torch.tensor(bridge["ids"])).logits.numpy()
    return float(np.abs(logits - bridge["logits"]).max())


def read(convert: Any, run: Path, folder: Path) -> Path:
    """The Hugging Face folder that is read of a run of Bridge, without a config."""
    ran = convert("megatron2hf", run, folder)
    assert ran.code == 0, ran.err
    return folder


@pytest.fixture
def base(convert, tmp_path) -> Path:
    """The Hugging Face folder that is read of Bridge's run, without a config."""
    return read(convert, REAL, tmp_path / "base")


def fields_of(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(next(run.glob("iter_*/run_config.yaml")).read_text())["model"])


def with_fields(at: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Bridge's run with other fields."""
    run = shutil.copytree(REAL, at)
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    change(document["model"])
    path.write_text(yaml.safe_dump(document))
    return run


WRONG = {
    "the window of Bridge's own import": {"sliding_window": 9},
    "a window one token shorter": {"sliding_window": 7},
    "windows in other layers": {"layer_types": None, "sliding_window_pattern": 2},
    "no scaling": {"rope_scaling": None},
    "a base for all": {"rope_local_base_freq": 200000.0},
    "another epsilon": {"rms_norm_eps": 1e-6},
    "scores by the size of a head": {"query_pre_attn_scalar": 6},
    "another gelu": {"hidden_activation": "gelu"},
}


@pytest.mark.parametrize("name", RUNS)
def test_its_logits(convert, tmp_path, name):
    """What Bridge's modules compute, transformers does of what is read; and each setting shows in the logits."""
    run = REAL.with_name(name)
    base = read(convert, run, tmp_path / "base")
    assert difference(base, run) < 1e-5
    for why, changes in WRONG.items():
        assert difference(base, run, **changes) > 2e-5, why


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("topology", [(), ("--tp", 2), ("--pp", 2), ("--tp", 2, "--pp", 2), ("--archive",)])
def test_what_it_loads(convert, tmp_path, name, topology):
    """Every tensor that Bridge saves, and every state that it asks for; the fields as it has written them.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    real, run = REAL.with_name(name), tmp_path / "run"
    base = read(convert, real, tmp_path / "base")
    ran = convert("hf2megatron", base, run, *BRIDGE, *RUNS[name], *topology)
    assert ran.code == 0, ran.err
    assert "for Megatron-Bridge's Gemma3ModelProvider alone" in ran.err
    assert f"for its {'release 0.3.1' if RUNS[name] else 'releases from 0.4.0 on'}" in ran.err
    assert "Megatron-Bridge with checkpoint.pretrained_checkpoint=" in ran.out
    ours, theirs = contents(run / "iter_0000000"), contents(real / ITERATION)
    theirs = {key: tensor for key, tensor in theirs.items() if not key.startswith("common_state")}
    assert all("_extra_state" in key for key in ours.keys() - theirs.keys())
    assert all(tensor is None or np.array_equal(tensor, ours[key]) for key, tensor in theirs.items())
    written, known = fields_of(run), fields_of(real)
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    assert {name for name in written if written[name] != known[name]} <= sizes
    assert not (run / "megatron_flags.txt").exists()  # nobody else computes it
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert convert("reshard", run, tmp_path / "again", "--for", "bridge", "--tp", 2).code == 0
    assert convert("digest", tmp_path / "again").out.split()[0] == convert("digest", base).out.split()[0]


@pytest.mark.parametrize("name", ["gemma3", "gemma3-untied"])
@pytest.mark.parametrize("changes", [{}, {"layer_types": ["full_attention"] * 4, "sliding_window": None}])
@pytest.mark.parametrize("options", RUNS.values())
def test_there_and_back(convert, model, tmp_path, name, changes, options):
    """With windows by turns, in all layers and in none, tied and untied; the config that travels says it as before."""
    source, run = model(name, "bfloat16", rms_norm_eps=1e-5, vocab_size=64, **changes), tmp_path / "run"
    assert convert("hf2megatron", source, run, *BRIDGE, *options, "--tp", 2, "--pp", 2).code == 0
    for number, words in enumerate(((), ("--config", source))):
        out = tmp_path / f"out{number}"
        ran = convert("megatron2hf", run, out, *words)
        assert ran.code == 0, ran.err
        assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for path in run.glob("huggingface/*"):
        path.unlink()
    ran = convert("megatron2hf", run, tmp_path / "alone")
    assert ran.code == 0, ran.err
    assert convert("diff", tmp_path / "alone", source).code == 0


def test_two_epsilons(convert, model, tmp_path):
    """Stock Bridge has 1e-5 in the norms that it adds, whatever the model says: only by name."""
    source, run = model("gemma3", vocab_size=64), tmp_path / "run"
    ran = convert("hf2megatron", source, run, *BRIDGE)
    refused(ran, 5, "1e-05 and the others of 1e-06", ACCEPT[1], "TENorm(config, output_size, config.layernorm_epsilon)")
    ran = convert("hf2megatron", source, run, *BRIDGE, *ACCEPT)
    assert ran.code == 0, ran.err
    assert fields_of(run)["layernorm_epsilon"] == 1e-6
    refused(convert("megatron2hf", run, tmp_path / "out"), 5, "1e-05 and the others of 1e-06", ACCEPT[1])
    ran = convert("megatron2hf", run, tmp_path / "out", *ACCEPT)
    assert ran.code == 0, ran.err
    assert "they are taken as one" in ran.err
    assert convert("diff", tmp_path / "out", source).code == 0


def test_fields_that_are_not_there(convert, base, tmp_path):
    """The defaults of its classes: what a file leaves out is read as they are."""
    usual = {"normalization": "RMSNorm", "add_bias_linear": False, "activation_func": None, "gated_linear_unit": True}
    for name in (*usual, "transformer_layer_spec", "is_vision_language", "num_moe_experts", "attention_backend"):
        usual[name] = None

    def without(model: dict[str, Any]) -> None:
        for name in usual:
            model.pop(name)

    assert convert("megatron2hf", with_fields(tmp_path / "run", without), tmp_path / "out").code == 0
    assert convert("diff", tmp_path / "out", base).code == 0

    def sized(model: dict[str, Any]) -> None:
        model["_target_"] += "1B"
        for name in ("window_size", "rope_scaling_factor", "rotary_base", "interleaved_attn_pattern", "softmax_scale"):
            model.pop(name)

    assert convert("megatron2hf", with_fields(tmp_path / "1B", sized), tmp_path / "sized").code == 0
    config = json.loads((tmp_path / "sized/config.json").read_text())
    expected = {"sliding_window": 513, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256}
    assert {name: config.get(name, FAMILIES["gemma3_text"].own.get(name)) for name in expected} == expected
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.get("rope_scaling") is None


def test_what_it_does_not_compute(convert, model, tmp_path):
    """By its names on demand alone, and refused where its class has no field for it."""
    source = model("gemma3", rms_norm_eps=1e-5, vocab_size=64)
    only = FAMILIES["gemma3_text"].only_here
    for options in ((), ("--format", "torch_dist"), ("--format", "fsdp_dtensor")):
        refused(convert("hf2megatron", source, tmp_path / "no", *options), 4, only, "--format torch_dist --for bridge")
    uneven = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    yarn = {"rope_type": "yarn", "factor": 4.0}
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"layer_types": uneven}, "of each so many layers the last has no window"),
        ({"hidden_activation": "silu"}, "its activation is gelu_pytorch_tanh"),
        ({"final_logit_softcapping": 30.0}, "caps no logits"),
        ({"use_bidirectional_attention": True}, "sees what is before a token alone"),
        ({"rope_scaling": yarn, "rope_parameters": None}, "scaled by a factor alone"),
        ({"query_pre_attn_scalar": 0}, "its query_pre_attn_scalar is 0"),
        ({"sliding_window_pattern": 0, "layer_types": None}, "its sliding_window_pattern is 0"),
        (
            {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 0},
            "its rotary bases are [0, 1000000.0]",
        ),
    )
    for number, (changes, message) in enumerate(refusals):
        folder = shutil.copytree(source, tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        refused(convert("hf2megatron", folder, tmp_path / "no", *BRIDGE), 5, message)
    refused(convert("hf2megatron", source, tmp_path / "no", *BRIDGE, "--tp", 3), 5, "do not divide")
    odd = model("gemma3", rms_norm_eps=1e-5, vocab_size=63)
    refused(convert("hf2megatron", odd, tmp_path / "no", *BRIDGE, "--tp", 2), 5, "63 tokens", "pads none")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "exaone4", "falcon_h1", "olmo2"])
def test_other_families(convert, model, tmp_path, name):
    """Which part is missing, and that no release of Bridge has it, or what it computes instead."""
    ran = convert("hf2megatron", model(name), tmp_path / "no", *BRIDGE)
    family = FAMILIES[name]
    lacking = (
        "in the second layer and every other one" if name == "gemma2" else "no release of Megatron-Bridge known here"
    )
    refused(ran, 4, family.only_here, lacking)


def test_what_the_fields_say_that_no_config_can(convert, tmp_path):
    changes: dict[str, Any] = {
        "is_vision_language = True": {"is_vision_language": True},
        "add_qkv_bias = True": {"add_qkv_bias": True},
        "normalization = 'LayerNorm'": {"normalization": "LayerNorm"},
        "num_moe_experts = 4": {"num_moe_experts": 4},
        "seq_len_interpolation_factor = 2.0": {"seq_len_interpolation_factor": 2.0},
        "window_attn_skip_freq = 2": {"window_attn_skip_freq": 2},
        "no_rope_freq = 2": {"no_rope_freq": 2},
        "layernorm_zero_centered_gamma = False": {"layernorm_zero_centered_gamma": False},
        "transformer_layer_spec": {"transformer_layer_spec": {"_target_": "mine.spec", "_call_": False}},
        "activation_func": {"activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}},
        "window_size = [7, 0] is no number": {"window_size": [7, 0]},
        "rotary_base = 10000 is no pair": {"rotary_base": 10000},
        "interleaved_attn_pattern": {"interleaved_attn_pattern": [0, 0]},
        "softmax_scale = 0.3 is the root": {"softmax_scale": 0.3},
        "rotary_interleaved = True": {"rotary_interleaved": True},
        "own_field": {"own_field": 3},
        "is not known to compute": {"_target_": "megatron.bridge.models.gemma.gemma3_provider.Gemma3ModelProvider2B"},
        "Gemma2ModelProvider has its windows": {
            "_target_": "megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider2B"
        },
    }
    for number, (message, change) in enumerate(changes.items()):
        run = with_fields(tmp_path / str(number), lambda model, change=change: model.update(change))
        refused(convert("inspect", run), 4, message)


@pytest.mark.parametrize("epsilon", ["1e-5", [1e-5], None])
def test_an_epsilon_that_is_no_number(convert, tmp_path, epsilon):
    run = with_fields(tmp_path / "run", lambda model: model.update(layernorm_epsilon=epsilon))
    for options in ((), ACCEPT):
        refused(convert("megatron2hf", run, tmp_path / "no", *options), 3, "norm_epsilon")


def test_fields_without_a_number_of_layers(convert, tmp_path):
    run = with_fields(tmp_path / "run", lambda fields: fields.pop("num_layers"))
    refused(convert("megatron2hf", run, tmp_path / "no"), 4, "there is no num_layers")


def test_a_window_of_a_later_release(convert, base, tmp_path):
    """From 0.4.0 on Bridge takes one off the field itself: a file of such a release has fields that 0.3.1 has not."""
    later = dict.fromkeys(("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_mscale"))
    run = with_fields(tmp_path / "run", lambda model: model.update(later))
    window = fields_of(REAL)["window_size"]
    for number, (folder, tokens) in enumerate(((run, window), (REAL, window + 1))):
        out = read(convert, folder, tmp_path / str(number))
        assert json.loads((out / "config.json").read_text())["sliding_window"] == tokens
    for options, field in (((), window + 1), (FIRST, window)):
        out = tmp_path / f"run{field}"
        assert convert("hf2megatron", base, out, *BRIDGE, *options).code == 0
        assert fields_of(out)["window_size"] == field
    refused(
        convert(
            "megatron2hf",
            with_fields(tmp_path / "none", lambda model: model.update(later, window_size=0)),
            tmp_path / "no",
        ),
        4,
        "window_size = 0 is no number",
    )


def test_a_config_that_says_another_window(convert, base, tmp_path):
    """Bridge's import makes a window of 8 tokens one of 9; what was trained is not what the base says."""
    run = with_fields(tmp_path / "run", lambda model: model.update(window_size=8))
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", base)
    refused(ran, 5, "sliding_window: 9 | 8", "--set NAME=VALUE")
    assert convert("megatron2hf", run, tmp_path / "out", "--config", base, "--set", "sliding_window=9").code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["sliding_window"] == 9


def test_no_adapter_of_it(convert, base, tmp_path):
    """LoRA adds to what the norm gives in Bridge, and in PEFT to what it gets."""
    refused(convert("megatron2hf", REAL, tmp_path / "no", "--adapter", "only"), 4, "a norm is between a layer")
    adapter = adapter_of(base, tmp_path / "adapter", ["o_proj"])
    refused(convert("peft2megatron", base, adapter, tmp_path / "no"), 4, "a norm is between a layer")


def test_gemma_2_has_its_windows_in_the_other_layers():
    """Bridge's Gemma2ModelProvider with a window of 8, where transformers has 8 tokens in the first layer.

    With windows in the second layer, and of 9 tokens, it computes the same: so a Gemma 2 is refused.
    """
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    stored = dict(np.load(REAL.with_name("gemma2.npz")))
    ids, wanted = torch.tensor(stored.pop("ids")), stored.pop("logits")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 60}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "query_pre_attn_scalar": 24}

    def far(window: int, kinds: list[str] | None) -> float:
        config = Gemma2Config(**sizes, sliding_window=window, layer_types=kinds, rms_norm_eps=1e-5)
        model = Gemma2ForCausalLM(config).eval()
        weights = {name: torch.tensor(array) for name, array in stored.items()}
        model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        with torch.no_grad():
            return float(np.abs(model(ids).logits.numpy() - wanted).max())

    other = ["full_attention", "sliding_attention"]
    assert far(9, other) < 1e-5
    assert min(far(8, None), far(9, None), far(8, other)) > 0.05
