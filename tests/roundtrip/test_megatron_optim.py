"""Optimizers of Megatron runs through topologies and formats: each state stays with its weight."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from formats.megatron.chained_optimizer import Parameter
from formats.megatron.optimizer import in_order
from tests.models import LINEAR
from tests.optimizers import add_optimizer, check

CASES = {
    "fp32": ("llama", "float32", "plain", "--tp 2", ["--pp 2", "--format torch_dist --tp 2 --pp 2", "--tp 4"]),
    "biases": ("starcoder2", "float32", "plain", "--pp 2", ["--tp 2", "--format torch_dist"]),
    "masters": ("qwen3", "bfloat16", "plain", "--tp 2 --pp 2", ["--pp 2 --vpp 2", "--format torch_dist --tp 2"]),
    "tied": ("llama-tied", "bfloat16", "plain", "--pp 4", ["--tp 2", "--pp 2 --norm te", "--format torch_dist"]),
    "distributed": ("mistral", "bfloat16", "distributed", "--tp 2", ["--pp 2", "--format torch_dist --pp 2"]),
    "chunks": ("llama-tied", "float32", "distributed", "--pp 2 --vpp 2", ["--tp 2", "--format torch_dist"]),
    "experts": ("mixtral", "float32", "plain", "--ep 2", ["--pp 2", "--format torch_dist --ep 4", "--tp 2 --ep 2"]),
    "apart": ("dots1", "bfloat16", "plain", "--tp 2 --ep 2 --etp 1", ["--ep 4 --experts te", "--format torch_dist"]),
    "mixed": ("qwen3_moe-tied", "bfloat16", "plain", "--pp 4 --ep 2", ["--tp 2", "--format torch_dist --tp 4 --ep 2"]),
    "linear": ("qwen3_next", "bfloat16", "plain", "--tp 2 --pp 2", ["--tp 4", "--format torch_dist --tp 2"]),
    "chained": (
        "qwen2_moe",
        "bfloat16",
        "distributed",
        "--tp 2 --ep 2",
        ["--pp 2", "--format torch_dist --ep 4", "--tp 2 --ep 2 --etp 1 --pp 2 --vpp 2 --experts te"],
    ),
}
KINDS = {
    "fp32": ("llama", "float32", "--tp 2", "--pp 2"),
    "masters": ("llama-tied", "bfloat16", "--pp 2", "--format torch_dist --tp 2"),
    "experts": ("mixtral", "float32", "--ep 2", "--format torch_dist --ep 4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_states_stay_with_their_weights(model, convert, tmp_path, name):
    family, dtype, how, topology, targets = CASES[name]
    source, run, norm = model(family, dtype), tmp_path / "run", "te" if family in LINEAR else "local"
    options = ["--norm", norm, "--iteration", 3, "--make-vocab-size-divisible-by", 16]
    assert convert("hf2megatron", source, run, *topology.split(), *options).code == 0
    add_optimizer(run, how)
    plain = convert("digest", run).out.split()[0]
    for number, target in enumerate(targets):
        out, again = tmp_path / f"out{number}", tmp_path / f"again{number}"
        ran = convert("reshard", run, out, *target.split(), "--with-optimizer")
        assert ran.code == 0, ran.err
        assert f"digest {plain}" in ran.out, "that of the weights"
        assert "rng_state is not carried" in ran.err
        assert "only weights" not in ran.err
        check(out, how, 13)
        options = ["--format", "torch", *topology.split(), "--norm", norm, "--with-optimizer"]
        ran = convert("reshard", out, again, *options)
        assert ran.code == 0, ran.err
        check(again, how, 13)
        assert convert("verify", again).out == convert("verify", out).out.replace(str(out), str(again))
        flags = (out / "megatron_flags.txt").read_text()
        assert ("--no-load-optim" in flags, "--no-load-rng" in flags) == (False, True)
        assert ("--use-distributed-optimizer" in flags) == (how == "distributed")


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_optimizer_becomes_a_distributed_one_and_back(model, convert, tmp_path, name):
    family, dtype, topology, target = KINDS[name]
    run, out, back = tmp_path / "run", tmp_path / "out", tmp_path / "back"
    options = ["--norm", "local", "--experts", "local", "--iteration", 3, "--make-vocab-size-divisible-by", 16]
    assert convert("hf2megatron", model(family, dtype), run, *topology.split(), *options).code == 0
    add_optimizer(run, "plain")
    ran = convert("reshard", run, out, *target.split(), "--with-optimizer", "--optimizer", "distributed")
    assert ran.code == 0, ran.err
    check(out, "distributed", 13)
    assert "--use-distributed-optimizer" in (out / "megatron_flags.txt").read_text()
    options = ["--format", "torch", *topology.split(), "--with-optimizer", "--optimizer", "plain"]
    ran = convert("reshard", out, back, *options)
    assert ran.code == 0, ran.err
    check(back, "plain", 13)
    assert "--use-distributed-optimizer" not in (back / "megatron_flags.txt").read_text()


def test_experts_are_numbered_as_their_modules_hold_them():
    """A parameter's number in a plain optimizer, and its place in a distributed one, follow from this."""
    slot: Any = None
    local = [
        f"local_experts.{n}.linear_fc{m}.{what}" for n in (0, 1, 10) for m in (1, 2) for what in ("weight", "bias")
    ]
    te = [f"linear_fc{m}.{what}{n}" for m in (1, 2) for n in (0, 1, 10) for what in ("weight", "bias")]
    for names in (local, te):
        keys = [
            f"decoder.layers.0.mlp.{name}" for name in ("router.weight", *(f"experts.{suffix}" for suffix in names))
        ]
        keys += ["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"]
        by_rule = sorted(keys, key=lambda key: re.sub(r"\d+(?=\.linear|$)", "", key).replace("weight", "a"))
        assert by_rule != keys
        assert [parameter.key for parameter in in_order(Parameter("model", key, slot) for key in by_rule)] == keys


def test_inspect_names_the_states(model, convert, tmp_path):
    run = tmp_path / "run"
    convert("hf2megatron", model("llama", "bfloat16"), run, "--iteration", 3)
    assert json.loads(convert("inspect", run, "--json").out)["optimizer"] is None
    add_optimizer(run, "plain")
    assert "fp32, exp_avg, exp_avg_sq (plain)" in convert("inspect", run).out
    out = convert("reshard", run, tmp_path / "out", "--with-optimizer", "-n").out
    assert "check  39 FP32 master weights" in out
    assert "rows of vocabulary padding" not in out


def test_a_larger_vocabulary_is_padded_and_a_smaller_one_says_what_it_lost(model, convert, tmp_path):
    run = tmp_path / "run"
    options = ["--norm", "local", "--iteration", 3, "--make-vocab-size-divisible-by", 32]
    convert("hf2megatron", model("llama"), run, "--tp", 2, *options)  # 256 rows
    add_optimizer(run, "plain")
    ran = convert("reshard", run, tmp_path / "one", "--with-optimizer")  # 224 rows
    assert "32 rows of vocabulary padding have no place" in ran.err
    check(tmp_path / "one", "plain", 13)
    assert convert("reshard", tmp_path / "one", tmp_path / "two", "--with-optimizer", "--tp", 2).code == 0
    check(tmp_path / "two", "plain", 13)
