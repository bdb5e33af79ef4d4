"""Checkpoints of Megatron-FSDP that are incomplete, damaged, mixed or of more than a model: refused with a sentence."""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.torch_files import dcp
from formats.torch_files.pickle_values import Dtype, is_plain
from tests.faults.dcp_tools import edit, places, refused, save

REAL = Path(__file__).parents[1] / "golden/megatron_0192/fsdp_dtensor"
MODEL, LAYER = "model.module.", "decoder.layers.0."
STATE, GROUP = "optimizer.state.module.module.module.", "optimizer.param_to_group_meta.module.module.module."
HEAD = "output_layer.weight"
FC1 = f"{LAYER}mlp.linear_fc1.weight"
VOCAB = ("--vocab-size", 60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(REAL, tmp_path / "run")


def objects(folder: Path) -> dict[str, Any]:
    """What is no tensor, but random states; of the arguments what is plain."""
    names = [name for name in dcp.contents(folder)[1] if not name.startswith("rng_state")]
    values = {name: file.value for name, file in dcp.read_objects(folder, names).items()}
    args = {
        name: value for name, value in vars(values["args"]).items() if is_plain(value) and not isinstance(value, Dtype)
    }
    return values | {"args": argparse.Namespace(**args)}


def resaved(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Read with torch, change tensors and objects, and write with torch, in one file."""
    from tests.golden.test_megatron_fsdp import tensors

    folder = run / "iter_0000003"
    state = tensors(folder) | objects(folder)
    change(state)
    shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(folder, state)
    return run


def test_saved_again_by_torch_it_is_the_same(convert, run):
    resaved(run, lambda state: None)
    assert convert("diff", run, REAL, *VOCAB).code == 0


@pytest.mark.parametrize("missing", ["__0_0.distcp", "__1_0.distcp"])
def test_a_rank_without_its_file(convert, run, missing):
    (run / "iter_0000003" / missing).unlink()
    rank = missing[2]
    refused(convert("megatron2hf", run, run / "out", *VOCAB), 3, missing, f"ranks {rank}")


def test_a_file_that_is_cut_off(convert, run):
    path = run / "iter_0000003/__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    refused(convert("inspect", run), 3, "is cut off")


def test_metadata_that_is_cut_off(convert, run):
    path = run / "iter_0000003/.metadata"
    path.write_bytes(path.read_bytes()[:-9])
    assert convert("inspect", run).code == 3


@pytest.mark.parametrize("name", [f"{MODEL}{FC1}_v", f"{STATE}{FC1}_v.exp_avg"])
def test_a_flipped_bit(convert, run, tmp_path, name):
    folder, items = run / "iter_0000003", []
    edit(folder, lambda metadata: items.extend(places(metadata, name)))
    ((_, about),) = items
    path = folder / about.relative_path
    content = bytearray(path.read_bytes())
    content[about.offset + about.length // 2] ^= 1
    path.write_bytes(content)
    ran = convert("reshard", run, tmp_path / "out", "--format", "torch_dist", "--with-optimizer", *VOCAB)
    refused(ran, 3, "CRC-32")
    assert not (tmp_path / "out").exists()


def gone(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: [state.pop(name) for name in names]


def put(name: str, value: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.update({name: value(state)})


def said(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: setattr(state["args"], name, value)


def zeros(*shape: int) -> Callable[[dict[str, Any]], Any]:
    import torch

    return lambda _: torch.zeros(shape)


WEIGHTS = {
    "no up": (gone(f"{MODEL}{FC1}_v"), 3, f"{FC1}_v [48, 24]"),
    "no layer": (gone(f"{MODEL}{LAYER}input_layernorm.weight"), 3, "1 tensor is missing"),
    "no embedding": (gone(f"{MODEL}embedding.word_embeddings.weight"), 3, "holds no embedding.word_embeddings.weight"),
    "an unknown key": (put(f"{MODEL}{LAYER}mlp.gate.weight", zeros(2)), 3, "has no place in this model"),
    "a gate in one": (put(f"{MODEL}{FC1}", zeros(96, 24)), 3, f"{FC1} in"),
    "another shape": (put(f"{MODEL}{FC1}_w", zeros(47, 24)), 3, "has shape [47, 24]"),
    "half a head": (put(f"{MODEL}{HEAD}", zeros(32, 24)), 3, f"{HEAD} has shape [32, 24]"),
    "another model": (put("ema.embedding.weight", zeros(64, 24)), 5, "holds ema.embedding.weight beside its model"),
    "chunks": (put("model1.module.decoder.final_layernorm.weight", zeros(24)), 4, "virtual pipeline chunks"),
    "stages": (said("pipeline_model_parallel_size", 2), 4, "2 pipeline stages"),
    "an old version": (put("checkpoint_version", lambda _: 1.0), 4, "before 2.0"),
    "an iteration": (put("iteration", lambda _: "third"), 3, "its iteration is 'third'"),
}
"""What is changed of the weights, and how it is refused.

Megatron-LM#4888: the head came out of Megatron-Bridge#3512 with the rows of one tensor rank.
"""


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights(convert, run, tmp_path, kind):
    change, code, message = WEIGHTS[kind]
    refused(convert("megatron2hf", resaved(run, change), tmp_path / "out", *VOCAB), code, message)
    assert not (tmp_path / "out").exists()


NORM = "decoder.final_layernorm.weight"
OPTIMIZER = {
    "no moment": (gone(f"{STATE}{FC1}_w.exp_avg"), 3, "exp_avg of its optimizer", f"{FC1}_w"),
    "half a moment": (put(f"{STATE}{HEAD}.exp_avg", zeros(32, 24)), 3, "exp_avg of its", f"{HEAD} has shape [32, 24]"),
    "no step": (gone(f"{STATE}{NORM}.step"), 3, f"no step of {NORM}"),
    "other steps": (put(f"{STATE}{NORM}.step", lambda state: state[f"{STATE}{FC1}_w.step"] + 1), 4, "numbers of steps"),
    "another state": (put(f"{STATE}{NORM}.momentum_buffer", zeros(24)), 4, "keeps momentum_buffer, and Adam does not"),
    "another model": (put(f"{STATE}decoder.layers.7.mlp.x.exp_avg", zeros(24)), 3, "decoder.layers.7.mlp.x"),
    "no settings": (
        lambda state: [state.pop(name) for name in [*state] if name.startswith(f"{GROUP}{NORM}.")], 3, NORM,
    ),
    "another rate": (put(f"{GROUP}{FC1}.lr", lambda _: 0.5), 4, "lr = 0.5"),
    "decay of a norm": (put(f"{GROUP}{NORM}.wd_mult", lambda _: 1.0), 4, f"the weight decay of {NORM}"),
    "amsgrad": (
        lambda state: state.update({name: True for name in state if name.endswith(".amsgrad")}), 4, "max_exp_avg_sq",
    ),
    "muon": (said("optimizer", "muon"), 4, "its optimizer is 'muon'"),
    "none": (lambda state: [state.pop(name) for name in [*state] if name.startswith("optimizer.")], 3, "no optimizer"),
}  # fmt: skip
"""The same of the optimizer; the weights alone are converted."""


@pytest.mark.parametrize("kind", OPTIMIZER)
def test_optimizer(convert, run, tmp_path, kind):
    change, code, *parts = OPTIMIZER[kind]
    argv = [resaved(run, change), tmp_path / "out", "--format", "torch_dist", *VOCAB]
    refused(convert("reshard", *argv, "--with-optimizer"), code, *parts)
    assert not (tmp_path / "out").exists()
    assert convert("reshard", *argv).code == 0


def test_topologies_that_it_has_not(model, convert, tmp_path):
    argv = (model("llama"), tmp_path / "out", "--format", "fsdp_dtensor")
    refused(convert("hf2megatron", *argv, "--pp", 2), 5, "no pipeline stages")
    refused(convert("hf2megatron", model("mixtral"), *argv[1:], "--glu-interleave", 4), 4, "not gate and up")
    refused(
        convert("hf2megatron", *argv, "--with-optimizer", "--optimizer", "plain"), 2, "the distributed optimizer alone"
    )
    refused(convert("hf2megatron", model("gpt_oss"), *argv[1:], "--ep", 2), 4, "biases of experts on 2 ranks")
    refused(convert("hf2megatron", model("qwen3_next"), *argv[1:]), 4, "linear attention is not supported")
    refused(convert("reshard", REAL, tmp_path / "out", "--with-optimizer", *VOCAB), 5, "--dtype bf16")
