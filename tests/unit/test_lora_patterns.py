"""Expressions in the settings of a LoRA: those whose matching takes no end are refused, and no other ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from formats.errors import UnsupportedError
from formats.huggingface import lora_patterns

ORDINARY = [
    r".*\.(q_proj|v_proj)",
    r"^(?!.*visual).*(q|k|v)_proj$",
    "all-linear",
    r"model\.layers\.(\d+)\.(self_attn|mlp)\..*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp|ffn).*?(?:k_proj|v_proj|q_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    r"model\.(layers\.\d+\.)?.*(attn|mlp)?\.[a-z_]+",
    r"model\.layers\.([0-9]|1[0-9])\..*",
]
HARMLESS = [r"(\w+\.)*q_proj", r"((model|layers|\d+)\.)+self_attn\.(q|k|v)_proj", r"(a.*b)*", r"(x(y|zz))*"]
ENDLESS = [
    r"([a-z_.0-9]+)+!", r"(?=([\w.]+)*!)", r".*.*.*.*.*.*x", r"(.?.?.?.?.?.?.?){9}!", r"(a|l|\w|.)*!",
]  # fmt: skip
MODULES = [f"model.layers.{layer}.self_attn.long_{'name' * 10}_of_q_proj" for layer in range(80)]


@pytest.fixture
def processes(monkeypatch):
    """The processes that were run to the end."""
    ended, run = [], subprocess.run
    monkeypatch.setattr(lora_patterns.subprocess, "run", lambda *a, **k: ended.append(run(*a, **k)) or ended[-1])
    return ended


def test_those_that_end_are_taken(processes):
    """All at once, by the time that all of them take; as names of modules, of layers, and of ranks."""
    texts = ORDINARY + HARMLESS
    config = {"modules_to_save": texts, "layers_pattern": texts, "rank_pattern": dict.fromkeys(texts, 4)}
    lora_patterns.require_bounded(config, config, MODULES, "adapter_config.json")
    for text in (texts[0], HARMLESS[0]):
        lora_patterns.require_bounded({"target_modules": text}, ["target_modules"], MODULES, "adapter_config.json")
    going_back = [text for text in texts if lora_patterns.GOES_BACK.search(text)]
    assert [(ran.returncode, len(ran.stdout)) for ran in processes] == [(0, 3 * len(going_back)), (0, 1), (0, 1)]


def test_a_process_that_cannot_start_is_no_endless_expression(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(subprocess.CalledProcessError):
        lora_patterns.require_bounded({"target_modules": "a+"}, ["target_modules"], ["a"], "adapter_config.json")


@pytest.mark.parametrize("text", ENDLESS)
def test_those_that_do_not_end_are_refused(monkeypatch, text):
    monkeypatch.setattr(lora_patterns, "MAX_SECONDS", 1)
    with pytest.raises(UnsupportedError, match=r"says target_modules = .* does not match it with 80 names of modules"):
        lora_patterns.require_bounded({"target_modules": text}, ["target_modules"], MODULES, "adapter_config.json")


VALUES = {
    "exclude_modules": ENDLESS[0], "modules_to_save": ["lm_head", ENDLESS[0]], "layers_pattern": ENDLESS[0],
    "rank_pattern": {ENDLESS[0]: 4}, "alpha_pattern": {"q_proj": 4, ENDLESS[0]: 4},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_every_setting(monkeypatch, name):
    monkeypatch.setattr(lora_patterns, "MAX_SECONDS", 1)
    with pytest.raises(UnsupportedError, match=f"says {name} = .* does not match it with 80 names of modules"):
        lora_patterns.require_bounded({name: VALUES[name]}, [name], MODULES, "adapter_config.json")


def test_the_one_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(lora_patterns, "MAX_SECONDS", 1)
    config = {"target_modules": r".*\.q_proj", "exclude_modules": r"(.*a)*!", "layers_pattern": "h"}
    with pytest.raises(UnsupportedError, match="says exclude_modules = "):
        lora_patterns.require_bounded(config, lora_patterns.NAMED, ["a" * 60], "adapter_config.json")


def test_a_list_of_names_starts_no_process(processes):
    config = {"target_modules": ["q_proj", "a+"], "modules_to_save": ["lm_head"], "rank_pattern": {"layers.0.q": 4}}
    lora_patterns.require_bounded(config, lora_patterns.NAMED + lora_patterns.RANKS, ["q"], "adapter_config.json")
    assert processes == []
