"""Universal checkpoints of GPT-NeoX: what we write is read back, and what DeepSpeed's script makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_universal import STATES, theirs

pytestmark = pytest.mark.distributed
NEOX = Path(__file__).parent / "neox"
RUNS = {"llama-gqa-pp2-tp2": ["--gqa-layout", "blocked"], "gpt2-pp2-tp2": [], "neox-parallel-tp2": []}
"""Run of GPT-NeoX: what has to be said of it."""


@pytest.mark.parametrize("name", RUNS)
def test_names_of_neox_are_read_back(convert, tmp_path, name):
    """Its yml, vocabulary and order of query, key and value go along, so that nothing has to be said of it."""
    source, out = NEOX / name, tmp_path / "universal"
    said = ["--vocab-size", 101, *RUNS[name]]
    assert convert("zero2universal", source, out, *said).code == 0
    assert "a universal checkpoint of GPT-NeoX, tp 2" in convert("inspect", out).out
    for weights in STATES:
        digests = [
            convert("digest", run, *options, "--weights", weights).out.split()[0]
            for run, options in ((source, said), (out, []))
        ]
        assert digests[0] == digests[1], weights
    with_optimizer = [[source, tmp_path / "one", *said], [out, tmp_path / "two"]]
    if name == "neox-parallel-tp2":  # whose ranks have summands
        assert "each with its CRC-32" in convert("verify", out).out
        for argv in with_optimizer:
            refused(convert("hf2fsdp", *argv, "--with-optimizer"), 4, "is a sum over tensor parallel ranks")
        return
    ran = convert("verify", out)
    assert (ran.code, "equals vitruvian.json" in ran.out) == (0, True), ran.err
    for argv in with_optimizer:
        ran = convert("hf2fsdp", *argv, "--with-optimizer")
        assert ran.code == 0, ran.err
    assert (tmp_path / "one/__0_0.distcp").read_bytes() == (tmp_path / "two/__0_0.distcp").read_bytes()
    shutil.rmtree(out / "global_step6/zero" / ("3.mlp.linear2.weight" if "llama" in name else "3.mlp.linear2.bias"))
    refused(convert("neox2hf", out, tmp_path / "no"), 3, "1 tensor is missing: 3.mlp.linear2.")


@pytest.mark.parametrize("name", ["llama-gqa-tp2", "neox-parallel-tp2", "llama-tp2-dp2"])
def test_what_deepspeed_makes_of_neox_is_read(zero, convert, tmp_path, name):
    """Its script concatenates everything along dimension 0, norms too, for NeoX says nothing of its parameters."""
    import torch

    run = theirs(zero, NEOX / name / "global_step6", tmp_path / "theirs")
    said = ["--vocab-size", 101, "--config", NEOX / name / "global_step6/configs"]
    said += ["--gqa-layout", "blocked"] if "llama" in name else []
    assert torch.load(run / "u/zero/sequential.2.mlp.linear2.weight/fp32.pt")["cat_dim"] == 0

    def compared() -> None:
        for weights in STATES:
            digests = [convert("digest", of, *said, "--weights", weights) for of in (NEOX / name, run)]
            assert digests[0].out.split()[0] == digests[1].out.split()[0], digests[1].err

    compared()
    buffer = "sequential.2.attention.rotary_emb.inv_freq"  # as older code has one, of which the script makes this
    for path in run.glob("u/mp_rank_*"):
        state = torch.load(path, weights_only=False)
        state["module"][buffer] = torch.ones(4)
        torch.save(state, path)
    (run / "u/zero" / buffer).mkdir()
    torch.save({"param": torch.ones(4)}, run / "u/zero" / buffer / "fp32.pt")
    compared()


def test_an_older_order_of_neox_is_not_written(convert, tmp_path):
    """Query, key and value of a head would be parameters of their own, which no training has."""
    argv = ["zero2universal", NEOX / "llama-grouped-tp2", tmp_path / "out", "--gqa-layout", "grouped"]
    refused(convert(*argv, "--vocab-size", 101), 4, "of which a universal checkpoint is not written")


@pytest.mark.parametrize("state", ["fp32", "exp_avg"])
@pytest.mark.parametrize(
    ("parameter", "key"),
    [
        ("sequential.2.mlp.linear1.weight", "param_n_sub_params"),
        ("sequential.2.attention.query_key_value.weight", "sub_param_shape"),
        ("sequential.2.attention.dense.weight", "cat_dim"),
        ("sequential.0.word_embeddings.weight", "vocab_tensor"),
    ],
)
def test_layouts_that_are_not_those_of_the_tables(convert, tmp_path, parameter, key, state):
    """What we write says of each tensor how it is cut; another layout is that of a changed file."""
    import torch

    out = tmp_path / "universal"
    said = ["--vocab-size", 102, "--gqa-layout", "blocked"]
    assert convert("zero2universal", NEOX / "llama-gqa-tp2", out, *said).code == 0
    path = out / f"global_step6/zero/{parameter}/{state}.pt"
    value = torch.load(path, weights_only=False)
    del value[key]
    torch.save(value, path)
    ran = convert("digest", out, "--weights", "fp32-master" if state == "fp32" else state)
    refused(ran, 3, f"{path} says that '{parameter}' is", "after the layout of its model it is", "was changed")


def test_exchanged_parallel_sizes(convert, tmp_path):
    """What we write is cut by its tables: at any size it is the same. DeepSpeed's script takes no pipeline of NeoX."""
    import torch

    name, out = "llama-gqa-pp2-tp2", tmp_path / "universal"
    assert convert("zero2universal", NEOX / name, out, "--vocab-size", 101, *RUNS[name]).code == 0
    before = convert("digest", out).out.split()[0]
    for path in out.glob("global_step*/mp_rank_*"):
        value = torch.load(path, weights_only=False)
        value["args"] = {**(value.get("args") or {}), "model_parallel_size": 1, "pipe_parallel_size": 4}
        torch.save(value, path)
    ran = convert("digest", out)
    assert ran.out.split()[0] == before, ran.err
