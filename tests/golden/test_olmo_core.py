"""Checkpoints that real OLMo-core wrote, and what its own export and model make of them (olmo_core/README.md)."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from formats.checkpoint import Settings
from formats.errors import UnsupportedError, short
from formats.fsdp import olmo_core
from formats.model.spec import Spec, differences
from formats.registry import open_checkpoint
from formats.torch_files import dcp
from formats.torch_files.archive_writer import plain
from tests.faults.dcp_tools import refused
from tests.golden.test_megatron_fsdp import tensors
from tests.golden.test_torchtitan import difference, same

HERE = Path(__file__).parent / "olmo_core"
CASES = sorted(path.parent for path in HERE.glob("*/step3"))
TRAINED = HERE / "olmo2_v300"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torch_reads_it(monkeypatch):
    """OLMo-core has copies of two classes of torch, whose names are in its `.metadata`."""
    from torch.distributed.checkpoint import filesystem

    name = "olmo_core.distributed.checkpoint.filesystem"
    monkeypatch.setitem(sys.modules, "olmo_core", SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, filesystem)


def test_there_are_cases():
    assert [case.name for case in CASES] == ["olmo2_v300", "olmo2_v300_tied", "olmo3_v300"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_becomes_what_its_own_export_and_model_say(convert, tmp_path, case):
    """Under a config of Hugging Face; and under one made of its own, whose settings are those of its export."""
    ran = convert("fsdp2hf", case / "step3", tmp_path / "out", "--config", case / "hf")
    assert ran.code == 0, ran.err
    same(tmp_path / "out/model.safetensors", case / "hf/model.safetensors")
    ran = convert("fsdp2hf", case / "step3", tmp_path / "alone", "--set", "max_positions=256")
    assert ran.code == 0, ran.err
    same(tmp_path / "alone/model.safetensors", case / "hf/model.safetensors")
    assert difference(tmp_path / "alone", case) < 1e-5  # its float32 is up to 2e-6 from float64, which way is the CPU's
    before = opened(case / "hf", max_positions=256)
    assert differences(opened(tmp_path / "alone"), before) == []


def opened(folder: Path, **settings: Any) -> Spec:
    return open_checkpoint(folder, Settings(values=settings)).spec


def edited(case: Path, to: Path, file: str, changes: dict[str, Any]) -> Path:
    """A copy of a case with other values under some keys of a file, joined by dots; None takes one out."""
    shutil.copytree(case, to)
    config = json.loads((to / file).read_text())
    for key, value in changes.items():
        *outer, last = key.split(".")
        place = reduce(lambda inner, name: inner.setdefault(name, {}), outer, config)
        place[last] = value
        if value is None:
            del place[last]
    (to / file).write_text(json.dumps(config))
    return to


OLMO2, OLMO3 = HERE / "olmo2_v300", HERE / "olmo3_v300"
MIXER = "model.block.sequence_mixer"
YARN = "rope_parameters.full_attention"


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        (OLMO2, "rope_parameters.rope_theta", 10000, "rope_theta: 500000.0 | 10000.0"),
        (OLMO2, "rms_norm_eps", 1e-5, "norm_epsilon: 1e-06 | 1e-05"),
        (OLMO2, "model_type", "olmo3", "family: olmo2 | olmo3"),
        (OLMO3, "sliding_window", 6, "sliding_window: 5 | 6"),
        (OLMO3, "layer_types", ["full_attention"] + 3 * ["sliding_attention"], "layer_types: ['sliding_att"),
        (OLMO3, "rope_parameters.sliding_attention.rope_theta", 10000, "rope_local_base_freq: 500000 | 10000"),
        (OLMO3, f"{YARN}.factor", 4.0, "rope_scaling: {'rope_type': 'yarn', 'factor': 8.0"),
        (OLMO2, "tie_word_embeddings", True, "tied: False | True"),
    ],
)
def test_a_config_that_contradicts_its_own_is_refused(convert, tmp_path, case, key, value, message):
    """None of these moves a byte of the weights."""
    changed = edited(case, tmp_path / "c", "hf/config.json", {key: value})
    refused(convert("fsdp2hf", case / "step3", tmp_path / "out", "--config", changed / "hf"), 5, message)


def test_other_heads_are_refused(convert, tmp_path):
    """Eight heads of two have the shapes of four of four."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    changed = edited(OLMO2, tmp_path / "c", "hf/config.json", heads)
    ran = convert("fsdp2hf", OLMO2 / "step3", tmp_path / "out", "--config", changed / "hf")
    refused(ran, 5, "heads: 4 | 8; kv_heads: 2 | 4; head_dim: 4 | 2")


@pytest.mark.parametrize("value", ["8", [], True, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "old_context_len", "attention_rescale_factor"])
def test_a_scaling_by_no_number_is_refused(convert, tmp_path, key, value):
    """transformers could build no model with it, or one that computes no numbers."""
    scaling = "model.block_overrides.3.sequence_mixer.rope.scaling"
    changed = edited(OLMO3, tmp_path / "c", "step3/config.json", {f"{scaling}.{key}": value})
    ran = convert("fsdp2hf", changed / "step3", tmp_path / "out", "--set", "max_positions=64")
    refused(ran, 3, f"rope.scaling.{key} = {short(value)} in layer 3, it should be a finite number")


@pytest.mark.parametrize("value", [0, -1.0])
@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "old_context_len"])
def test_a_scaling_by_nothing_or_less_is_refused(convert, tmp_path, key, value):
    changed = edited(
        OLMO3,
        tmp_path / "c",
        "step3/config.json",
        {f"model.block_overrides.3.sequence_mixer.rope.scaling.{key}": value},
    )
    ran = convert("fsdp2hf", changed / "step3", tmp_path / "out", "--set", "max_positions=64")
    refused(ran, 3, f"{key} = {value}", "which is no YaRNRoPEScalingConfig")


def test_yarn_that_ends_elsewhere_in_transformers_is_refused(convert, tmp_path):
    """The frequencies of ai2-olmo-core 3.0.0 (`compute_scaled_inv_freq`) and of transformers, which end elsewhere."""
    import torch
    from transformers import Olmo3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def in_olmo_core(theta: float, dim: int, old: int, fast: float, slow: float) -> Any:
        plain = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
        low, high = (dim * math.log(old / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (fast, slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim // 2 - 1)
        ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return plain / 8 * ramp + plain * (1 - ramp)

    scaling, said = "model.block_overrides.3.sequence_mixer.rope.scaling", set()
    for theta, dim, old, fast, slow in itertools.product((500, 1e4, 5e5), (8, 64), (64, 8192, 65536), (32, 1), (1, 32)):
        values = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": old,
                  "beta_fast": float(fast), "beta_slow": float(slow), "rope_theta": theta}  # fmt: skip
        config = Olmo3Config(head_dim=dim, hidden_size=dim, num_attention_heads=1, rope_parameters=values)
        config.rope_parameters = values
        theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        same = torch.allclose(theirs, in_olmo_core(theta, dim, old, fast, slow), rtol=1e-5)
        settings = {"rope_scaling": values, "rope_theta": theta, "head_dim": dim}
        said.add(same)
        with nullcontext() if same else pytest.raises(UnsupportedError, match="YaRN from frequency"):
            olmo_core._require_same_ramp(settings, "config.json")
    assert said == {True, False}
    changed = edited(OLMO3, tmp_path / "c", "step3/config.json", {f"{scaling}.old_context_len": 140_000})
    ran = convert("fsdp2hf", changed / "step3", tmp_path / "out", "--set", "max_positions=64")
    refused(ran, 4, "YaRN from frequency", "is not that of transformers")


@pytest.mark.parametrize("proportion", [1, 1.5])
def test_a_stepwise_scaling_of_more_than_all_is_refused(convert, tmp_path, proportion):
    stepwise = {"_CLASS_": "olmo_core.nn.rope.StepwiseRoPEScalingConfig", "factor": 8.0, "old_context_len": 32,
                "low_freq_proportion": proportion, "high_freq_proportion": 0.25}  # fmt: skip
    changed = edited(OLMO2, tmp_path / "c", "step3/config.json", {f"{MIXER}.rope.scaling": stepwise})
    ran = convert("fsdp2hf", changed / "step3", tmp_path / "out", "--config", OLMO2 / "hf")
    refused(ran, 3, "low_freq_proportion = ", "which is no StepwiseRoPEScalingConfig")


def test_what_transformers_assumes_counts_as_said(tmp_path):
    left_out = dict.fromkeys(["layer_types", f"{YARN}.beta_fast", f"{YARN}.beta_slow", f"{YARN}.attention_factor"])
    changed = edited(OLMO3, tmp_path / "c", "hf/config.json", left_out)
    assert open_checkpoint(OLMO3 / "step3", Settings(config=changed / "hf")).spec.own["layer_types"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.block.name": "default"}, "model.block.name = 'default' is not supported"),
        ({"model.lm_head.layer_norm.name": None}, "model.lm_head.layer_norm.name = 'default' is not supported"),
        ({f"{MIXER}.rope.name": "complex"}, "rope.name = 'complex' is not supported"),
        ({f"{MIXER}.rope": None}, "attention without rotary embeddings"),
        ({f"{MIXER}.clip_qkv": 8.0}, "sequence_mixer.clip_qkv = 8.0 is not supported"),
        ({f"{MIXER}.dropout": 0.1}, "sequence_mixer.dropout = 0.1 is not supported"),
        ({"model.block.dropout": 0.1}, "model.block.dropout = 0.1 is not supported"),
        ({f"{MIXER}.qk_norm.eps": 1e-5}, "norm.eps = 1e-06 and model.block.sequence_mixer.qk_norm.eps = 1e-05"),
        ({"model.embed_scale": 4.0}, "model.embed_scale = 4.0 is not supported"),
        ({"model.block_overrides": [1]}, "model.block_overrides = [1] is not supported"),
        ({"model.block_overrides": {"0": {"name": "default"}}}, "in layer 0 and"),
        ({f"{MIXER}.rope.scaling": {"_CLASS_": "olmo_core.nn.rope.ABFRoPEScalingConfig"}}, "ABFRoPEScalingConfig"),
    ],
)
def test_what_its_tensors_do_not_tell_is_refused(convert, tmp_path, changes, message):
    """With or without a config of Hugging Face, which has no key for it."""
    changed = edited(OLMO2, tmp_path / "c", "step3/config.json", changes)
    for options in (("--config", OLMO2 / "hf"), ()):
        refused(convert("fsdp2hf", changed / "step3", tmp_path / "out", *options), 4, message)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            {"_CLASS_": "olmo_core.nn.rope.PIRoPEScalingConfig", "attention_rescale_factor": 1.0, "factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "_CLASS_": "olmo_core.nn.rope.StepwiseRoPEScalingConfig", "attention_rescale_factor": 1.0,
                "factor": 32.0, "low_freq_proportion": 0.0, "high_freq_proportion": 0.25, "old_context_len": 8192,
            },
            {
                "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
        ),
    ],
)  # fmt: skip
def test_scaled_rotary_embeddings_are_those_of_its_export(tmp_path, own, expected):
    """As its `to_hf_config` gives them."""
    changed = edited(OLMO2, tmp_path / "c", "step3/config.json", {f"{MIXER}.rope.scaling": own})
    assert opened(changed / "step3", max_positions=32).rope_scaling == expected


def test_rotary_embeddings_that_are_scaled_in_one_layer_alone(convert, tmp_path):
    block = json.loads((OLMO2 / "step3/config.json").read_text())["model"]["block"]
    scaling = {"_CLASS_": "olmo_core.nn.rope.PIRoPEScalingConfig", "attention_rescale_factor": 1.0, "factor": 2.0}
    block["sequence_mixer"]["rope"]["scaling"] = scaling
    changes = {"model.n_layers": 2, "model.block_overrides": {"1": block}}
    changed = edited(OLMO2, tmp_path / "c", "step3/config.json", changes)
    ran = convert("fsdp2hf", changed / "step3", tmp_path / "out", "--set", "max_positions=32")
    refused(ran, 4, "rope.scaling differs between layers")


def test_a_run_says_how_long_a_sequence_is_and_older_versions_say_attention(tmp_path):
    block = json.loads((OLMO2 / "step3/config.json").read_text())["model"]["block"]
    changes = {"train_module.max_sequence_length": 32, "model.block.attention": block["sequence_mixer"], MIXER: None}
    changed = edited(OLMO2, tmp_path / "c", "step3/config.json", changes)
    assert differences(opened(changed / "step3/model_and_optim"), opened(OLMO2 / "hf")) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_written_is_what_it_wrote(convert, tmp_path, torch_reads_it, case):
    """Under the same names, bit for bit; so it loads them as it loads its own."""
    ran = convert("hf2fsdp", case / "hf", tmp_path / "out", "--names", "olmo-core", "--ranks", 2)
    assert ran.code == 0, ran.err
    assert "load_trainer_state=False" in ran.out
    ours, theirs = tensors(tmp_path / "out"), tensors(case / "step3/model_and_optim")
    theirs = {name: tensor for name, tensor in theirs.items() if name.startswith("model.")}
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
    assert convert("diff", tmp_path / "out", case / "hf").code == 0


STOCK = "olmo-core's own models of this kind is "
YARN = {"rope_type": "yarn", "rope_theta": 77.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({}, []),
        ({"rms_norm_eps": 0.1}, [f"norm_epsilon = 0.1: that of {STOCK}1e-06"]),
        (
            {"rope_parameters": {**YARN, "attention_factor": 1.0}},
            [f"rope_theta = 77.0: that of {STOCK}500000.0", "rope_scaling = yarn (attention_factor=1.0, factor=4.0, "],
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0}}, ["rope_scaling = dynamic "]),
    ],
)
def test_what_its_own_config_would_have_to_say_is_named(convert, tmp_path, fields, notes):
    """What is written has no config of OLMo-core, and no model of it computes the third and the fourth."""
    hf = tmp_path / "hf"
    shutil.copytree(OLMO2 / "hf", hf)
    config = json.loads((hf / "config.json").read_text())
    usual = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (hf / "config.json").write_text(json.dumps(config | usual | fields))
    ran = convert("hf2fsdp", hf, tmp_path / "out", "--names", "olmo-core")
    assert (ran.code, ran.err.count(STOCK)) == (0, len(notes)), ran.err
    assert all(note in ran.err for note in notes), ran.err
    ran = convert("fsdp2hf", tmp_path / "out", tmp_path / "back")
    assert (ran.code, ran.err.count(STOCK)) == (0, len(notes)), ran.err


def test_the_setting_that_no_table_describes_is_named(convert, tmp_path):
    hf = tmp_path / "hf"
    shutil.copytree(OLMO2 / "hf", hf)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    ran = convert("hf2fsdp", hf, tmp_path / "out", "--names", "olmo-core")
    refused(ran, 4, "no table describes this olmo2 with the names of olmo-core", "hidden_act = 'relu' is not supported")


def test_its_optimizer_goes_along(convert, tmp_path, torch_reads_it):
    """Under Hugging Face's names; and back under its own, where all is as it wrote it (olmo_core/README.md)."""
    config = ("--config", TRAINED / "hf")
    ran = convert("hf2fsdp", TRAINED / "step3", tmp_path / "out", "--with-optimizer", *config)
    assert ran.code == 0, ran.err
    ours, theirs = tensors(tmp_path / "out"), tensors(TRAINED / "step3/model_and_optim")
    hub = "model.layers.0.mlp.up_proj.weight"
    for state in ("exp_avg", "exp_avg_sq", "step"):
        assert ours[f"optim.state.{hub}.{state}"].equal(theirs[f"optim.state.blocks.0.feed_forward.w3.weight.{state}"])
    ran = convert("hf2fsdp", tmp_path / "out", tmp_path / "own", "--names", "olmo-core", "--with-optimizer")
    assert ran.code == 0, ran.err
    ours = tensors(tmp_path / "own")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
    settings = settings_of(TRAINED / "step3/model_and_optim")
    assert (settings_of(tmp_path / "own"), len(settings)) == (settings, 14 * 12)
    argv = ("hf2fsdp", tmp_path / "out", tmp_path / "other", "--names", "torchtitan", "--with-optimizer")
    refused(convert(*argv), 2, "--names torchtitan is for weights alone")


def settings_of(folder: Path) -> dict[str, Any]:
    """What is no tensor, by name."""
    _, names = dcp.contents(folder)
    return {name: plain(file, file.value, name) for name, file in dcp.read_objects(folder, names).items()}


def test_its_adamw_that_leaves_steps_out_is_known_by_its_config(convert, tmp_path, torch_reads_it):
    """Its groups have less than those of torch's, and could be another optimizer's."""
    skip, options = HERE / "skip_step_v300", ("--names", "olmo-core", "--with-optimizer")
    ran = convert("hf2fsdp", skip, tmp_path / "out", *options)
    assert ran.code == 0, ran.err
    ours, theirs = tensors(tmp_path / "out"), tensors(skip / "model_and_optim")
    assert (ours.keys(), len(ours)) == (theirs.keys(), 14 * 4)
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
    settings = settings_of(skip / "model_and_optim")
    assert (len(settings), settings.items() <= settings_of(tmp_path / "out").items()) == (14 * 5, True)
    for name in ("Lion", None):
        changes = {"train_module.optim._CLASS_": name and f"olmo_core.optim.{name}Config"}
        changed = edited(skip, tmp_path / str(name), "config.json", changes)
        refused(convert("hf2fsdp", changed, tmp_path / "none", *options), 4, "its optimizer is of an unknown kind")


def test_its_own_config_says_all_but_how_long_a_sequence_may_be(convert, tmp_path):
    for place in (TRAINED / "step3", TRAINED / "step3/model_and_optim"):
        refused(
            convert("fsdp2hf", place, tmp_path / "out"), 3, "how long a sequence may be", "add --set max_positions=N"
        )
        ran = convert("inspect", place)
        assert (ran.code, "containers   model 14, optim 42" in ran.out) == (0, True), ran.out


def test_a_family_without_a_table_is_refused(model, convert, tmp_path):
    ran = convert("fsdp2hf", TRAINED / "step3", tmp_path / "out", "--config", model("llama"))
    refused(ran, 4, "a name of olmo-core, whose llama has no table", "olmo2, olmo3")
    ran = convert("hf2fsdp", model("llama"), tmp_path / "out", "--names", "olmo-core")
    refused(ran, 4, "whose llama has no table")


@pytest.mark.parametrize(
    ("first", "windows"),
    [(True, [None, 4, 8, None, 4, 8, None, None]), (False, [4, 8, None, 4, 8, None, 4, None])],
)
def test_windows_come_in_turn_over_the_layers(first, windows):
    """`SlidingWindowAttentionConfig.get_window_size`: the pattern begins after a first layer without a window."""
    said = {"pattern": [4, 8, -1], "force_full_attention_on_first_layer": first}
    block = {f"{olmo_core.WINDOW}.{key}": value for key, value in said.items()}
    context = SimpleNamespace(file={olmo_core.EACH: [block] * 8}, where="config.json")
    assert olmo_core._windows(context) == windows
