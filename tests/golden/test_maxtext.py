"""MaxText: what it saved has its own logits, and what its converter made of a model is that model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from formats.huggingface.maxtext.tables import TABLES
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.golden.test_coverage import lines, used

HERE = Path(__file__).with_name("maxtext")
CASES = (
    "llama_state", "llama31_zarr2", "mistral_files", "qwen2_tied", "qwen3_files_zarr2", "mixtral",
    "qwen3_moe", "qwen3_state", "gemma2", "gemma2_unscanned", "gemma3", "gemma3_unscanned",
)  # fmt: skip


def with_its_head(model: Any) -> Any:
    """A model whose head, where it is tied, is the embedding rounded to BF16, as in MaxText (`attend_on_embedding`)."""
    import torch

    if model.config.tie_word_embeddings:
        root = model.config.hidden_size**0.5 if model.config.model_type.startswith("gemma") else 1.0

        def rounded(head: Any, values: tuple[Any], _: Any) -> Any:
            return torch.nn.functional.linear(values[0], (head.weight * root).bfloat16().float() / root)

        model.lm_head.register_forward_hook(rounded)
    return model


@pytest.mark.parametrize("name", CASES)
def test_its_logits(convert, tmp_path, name):
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    out, golden = tmp_path / "out", np.load(HERE / name / "logits.npz")
    ran = convert("maxtext2hf", HERE / name / "checkpoint", out, "--config", HERE / name)
    assert ran.code == 0, ran.err
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
        with_its_head(model)
        logits = model(torch.tensor(golden["ids"])).logits
    scale = np.abs(golden["logits"]).max()
    assert np.abs(logits.numpy() - golden["logits"]).max() < 1e-5 * max(1, scale)
    assert scale > 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 32.0),
        ("low_freq_factor", 2.0),
        ("high_freq_factor", 8.0),
        ("original_max_position_embeddings", 1024),
    ],
)
def test_a_scaling_that_its_decoder_does_not_compute_is_asked_for(convert, tmp_path, key, value):
    """Each number is a constant of MaxText: what it computed, or what a changed MaxText did, is what the hint sets."""
    config, out = json.loads((HERE / "llama31_zarr2/config.json").read_text()), tmp_path / "out"
    stock = config["rope_scaling"]
    other = stock | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": other}))
    words = ["maxtext2hf", HERE / "llama31_zarr2/checkpoint", out, "--config", tmp_path]
    ran = convert(*words)
    refused(ran, 5, f"llama3 scaling with {key} = {value}, and MaxText has {stock[key]:g} whatever a config says")
    assert not out.exists()
    ways = re.findall(r"--set '(rope_scaling=.*?)' \(", ran.err)
    assert len(ways) == 2
    for way, scaling in zip(ways, (stock, other), strict=True):
        ran = convert(*words, "--set", way, "--force")
        assert ran.code == 0, ran.err
        assert open_checkpoint(out).spec.rope_scaling == scaling


@pytest.mark.parametrize("config", [{"norm_topk_prob": False}, {}])
def test_weights_of_experts_that_do_not_add_up_to_one(convert, tmp_path, config):
    """MaxText's do, whatever a config says (layers/moe.py `get_topk`); false is the default of the class."""
    base = json.loads((HERE / "qwen3_moe/config.json").read_text())
    base.pop("norm_topk_prob")
    (tmp_path / "config.json").write_text(json.dumps(base | config))
    words = ["maxtext2hf", HERE / "qwen3_moe/checkpoint", tmp_path / "out", "--config", tmp_path]
    refused(convert(*words), 4, "norm_topk_prob = false", "--set router_normalized=true")
    ran = convert(*words, "--set", "router_normalized=true")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["norm_topk_prob"] is True


@pytest.mark.parametrize("name", ["converted_llama31", "converted_qwen3_moe"])
def test_what_its_converter_made_of_a_model_is_that_model(convert, name):
    """Bit for bit; and no logits tell whether a root is in a query that has a norm."""
    source, hf = HERE / name / "checkpoint", HERE / name / "hf"
    ran = convert("diff", hf, source, "--config", hf)
    assert ran.code == 0, ran.err


def test_every_line_was_written_by_maxtext():
    """Each row in some table; and each pattern of a rotated or rooted row that differs between the tables."""
    seen = set().union(*(used(HERE / name / "checkpoint", HERE / name) for name in CASES))
    keys = {key for table in TABLES.values() for key, _ in lines(table)}
    assert keys - {key for key, _ in seen} == set()
    halves, neighbours = lines(TABLES["maxtext (halves)"]), lines(TABLES["maxtext (neighbours)"])
    turned = {key.rpartition(".")[0].rpartition(".")[2] for key, pattern in neighbours - seen if "pair" in pattern}
    assert halves - seen == set()
    assert turned == {"query", "key", "query_norm", "key_norm"}, "biases and norms of heads whose neighbours rotate"


def test_into_every_other_format_and_the_same_from_each(convert, tmp_path):
    source, config = HERE / "llama_sharded/checkpoint", HERE / "llama_sharded"
    for command, options in {
        "hf2megatron": ["--tp", 2, "--pp", 3],
        "hf2fsdp": ["--ranks", 3],
        "hf2neox": ["--tp", 2],
        "hf2nanotron": [],
    }.items():
        out = tmp_path / command
        ran = convert(command, source, out, "--config", config, *options)
        assert ran.code == 0, ran.err
        assert convert("diff", source, out, "--config", config).code == 0, command


def test_what_is_said_of_it(convert):
    ran = convert("inspect", HERE / "llama_state/checkpoint", "--config", HERE / "llama_state", "--json")
    record = json.loads(ran.out)
    assert record["format"] == "maxtext"
    assert any("halves of a head rotate" in note for note in record["notes"])
    assert any("not opt_state" in note for note in record["notes"])
    source = HERE / "llama_sharded/checkpoint"
    items = convert("inspect", HERE / "llama_state/checkpoint/items", "--config", HERE / "llama_state", "--json")
    assert json.loads(items.out)["parameters"] == record["parameters"]
    planned = convert("plan", "--to", "huggingface", source, "--config", source.parent)
    assert "multiply by the root by which attention scores are divided" in planned.out, planned.err
