"""Runs of stock Megatron-LM 0.19.2, which keeps its arguments in the DCP, torch_dist and fsdp_dtensor: every command
reads them. Here the optimizer of torch_dist too; that of Megatron-FSDP is in test_megatron_fsdp.py.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.dcp_tools import refused


class Saved(NamedTuple):
    """A run: its folder, what `inspect` calls it, its true vocabulary, its logits and how near ours have to be."""

    run: Path
    name: str
    vocab: int
    logits: str
    near: float
    resharded: str


HERE = Path(__file__).with_name("megatron_0192")
RUN = HERE / "dp_reshardable"
VOCAB = ("--vocab-size", 28)
MUON = Saved(HERE / "muon", "megatron_dist, ranks 2", 60, "muon_logits.npz", 2e-6, "torch")
DIST = Saved(RUN, "megatron_dist, ranks 1", 28, "logits.npz", 1e-5, "torch_dist")
FSDP = Saved(HERE / "fsdp_dtensor", "megatron_fsdp, ranks 2", 60, "fsdp_logits.npz", 2e-6, "torch")
of_all = pytest.mark.parametrize("saved", [DIST, FSDP, MUON], ids=["torch_dist", "fsdp_dtensor", "muon"])
of_each = pytest.mark.parametrize("saved", [DIST, FSDP], ids=["torch_dist", "fsdp_dtensor"])


@of_all
@pytest.mark.parametrize("inside", ["", "iter_0000003"], ids=["run", "iteration"])
def test_its_logits(convert, tmp_path, saved, inside):
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    out, golden = tmp_path / "out", np.load(HERE / saved.logits)
    assert convert("megatron2hf", saved.run / inside, out, "--vocab-size", saved.vocab).code == 0
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        logits = model(torch.tensor(golden["ids"])).logits.numpy()
    assert np.abs(logits - golden["logits"][..., : saved.vocab]).max() < saved.near < np.abs(logits).max()


@pytest.mark.parametrize("saved", [FSDP, MUON], ids=["fsdp_dtensor", "torch_dist"])
def test_a_vocabulary_that_its_padding_excludes(convert, tmp_path, saved):
    """Of 64 rows, which are padded to multiples of 8 for each tensor parallel rank."""
    ran = convert("megatron2hf", saved.run, tmp_path / "out", "--vocab-size", 30)
    refused(ran, 5, "a vocabulary of 30 would have been padded to 32 rows", "holds 64: rows of tokens", "vocab=30")
    assert convert("megatron2hf", saved.run, tmp_path / "out", "--vocab-size", 59).code == 0
    assert convert("megatron2hf", saved.run, tmp_path / "out", "--set", "vocab=30", "--force").code == 0


@of_each
def test_every_command_reads_it(convert, tmp_path, saved):
    out, resharded, run, options = tmp_path / "out", tmp_path / "again", saved.run, ("--vocab-size", saved.vocab)
    output = convert("inspect", run, *options).out
    assert f"{saved.name}, iter_0000003" in output
    assert "fp32, exp_avg, exp_avg_sq (distributed optimizer)" in output
    assert convert("verify", run).code == 0, "its own checksums"
    assert convert("megatron2hf", run, out, *options).code == 0
    assert convert("verify", out, run, *options).code == 0
    assert convert("reshard", run, resharded, "--tp", 2, "--format", saved.resharded, *options).code == 0
    assert convert("diff", run, resharded, *options).code == 0
    digests = {
        convert("digest", place, *options).out.split()[0] for place in (run, run / "iter_0000003", out, resharded)
    }
    assert len(digests) == 1


def flat(run: Path, name: str) -> Any:
    """A tensor of a DCP, as torch's own reader gives it."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = run / "iter_0000003"
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[name]
    state = {name: torch.empty(about.size, dtype=about.properties.dtype)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[name]


@pytest.mark.filterwarnings("ignore")
def test_its_optimizer(convert, tmp_path):
    """A bucket has the parameters in reverse order, each from a multiple of 64 elements on. torch reads both sides."""
    out = tmp_path / "out"
    assert convert("reshard", RUN, out, "--format", "torch_dist", "--with-optimizer", *VOCAB).code == 0
    assert convert("verify", out).code == 0
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
    layer, begin = "decoder.layers.", 0
    order = [
        ("output_layer.weight", (32, 16)), ("decoder.final_layernorm.weight", (16,)),
        (f"{layer}mlp.linear_fc2.weight", (16, 24)), (f"{layer}mlp.linear_fc1.weight", (48, 16)),
        (f"{layer}mlp.linear_fc1.layer_norm_weight", (16,)), (f"{layer}self_attention.linear_qkv.weight", (32, 16)),
        (f"{layer}self_attention.linear_proj.weight", (16, 16)),
        (f"{layer}self_attention.linear_qkv.layer_norm_weight", (16,)), ("embedding.word_embeddings.weight", (32, 16)),
    ]  # fmt: skip
    for name, shape in order:
        size = 1
        for n in shape:
            size *= n
        for state in ("param", "exp_avg", "exp_avg_sq"):
            theirs = flat(RUN, bucket + state)[begin : begin + size].reshape(shape)
            ours = flat(out, f"optimizer.state.{state}.{name}")
            ours = ours[0] if name.startswith(layer) else ours
            rows = 28 if shape[0] == 32 and not name.startswith(layer) else shape[0]
            assert theirs[:rows].equal(ours[:rows]), f"{state} of {name}"
            assert theirs[:rows].any()
        begin += -(-size // 64) * 64


def test_a_universal_checkpoint_has_a_manifest(convert, tmp_path):
    """Of weights and moments; `verify` reads both, and a conversion out of it compares them."""
    base, out = tmp_path / "base", tmp_path / "universal"
    assert convert("megatron2hf", RUN, base, *VOCAB).code == 0
    assert convert("zero2universal", RUN, out, "--config", base).code == 0
    assert convert("verify", out).code == 0
    path = next(out.glob("global_step*/zero/model.norm.weight/exp_avg.pt"))
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data/0"))
        content, numbers = path.read_bytes(), archive.read(name)
    place = content.index(numbers)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    ran = convert("verify", out)
    assert (ran.code, "exp_avg.final_norm" in ran.err) == (6, True), ran.err


@pytest.mark.filterwarnings("ignore")
def test_muon(convert, tmp_path):
    """Its momentum and its FP32 master weights, and Adam's moments of all else; torch reads both sides."""
    import numpy as np
    from safetensors.numpy import load_file

    run, options = MUON.run, ("--vocab-size", MUON.vocab)
    output = convert("inspect", run, *options).out
    assert "fp32, exp_avg, exp_avg_sq, momentum_buffer (plain, Muon beside Adam)" in output
    ran = convert("reshard", run, tmp_path / "no", "--with-optimizer", "--format", "torch", *options)
    assert (ran.code, "momentum_buffer is written to torch_dist alone" in ran.err) == (4, True), ran.err
    ran = convert("hf2fsdp", run, tmp_path / "no", "--with-optimizer", *options)
    assert (ran.code, "muon_coefficient_type = 'quintic', for which torch's Muon has" in ran.err) == (4, True), ran.err
    ran = convert("reshard", run, tmp_path / "moved", "--with-optimizer", "--format", "torch_dist", *options)
    assert ran.code == 0, ran.err
    layer = "decoder.layers."
    for chain, states, names in (
        (0, ("momentum_buffer", "fp32_param"), ("self_attention.linear_qkv", "self_attention.linear_proj",
         "mlp.linear_fc1", "mlp.linear_fc2")),
        (1, ("exp_avg", "exp_avg_sq", "fp32_param"), ("self_attention.linear_qkv.layer_norm",)),
    ):  # fmt: skip
        for state, name in ((state, name) for state in states for name in names):
            key = f"optimizer.state.{state}.{layer}{name}{'_' if 'norm' in name else '.'}weight"
            theirs, ours = flat(run, f"chained_{chain}.{key}"), flat(tmp_path / "moved", key)
            assert theirs.equal(ours), key
            assert theirs.any()
    assert convert("reshard", run, tmp_path / "tp2", "--tp", 2, "--format", "torch", *options).code == 0
    assert convert("diff", run, tmp_path / "tp2", *options).code == 0
    again = shutil.copytree(run, tmp_path / "again")
    ran = convert("average", run, again, tmp_path / "mean", "--dtype", "fp32", *options)
    assert ran.code == 0, ran.err
    mean = load_file(tmp_path / "mean/model.safetensors")
    place = "optimizer.state.fp32_param."
    proj = flat(run, f"chained_0.{place}decoder.layers.self_attention.linear_proj.weight").numpy()
    norm = flat(run, f"chained_1.{place}decoder.final_layernorm.weight").numpy()
    head = flat(run, f"chained_1.{place}output_layer.weight").numpy()
    for layer in range(2):
        assert np.array_equal(mean[f"model.layers.{layer}.self_attn.o_proj.weight"], proj[layer])
    assert np.array_equal(mean["model.norm.weight"], norm)
    assert np.array_equal(mean["lm_head.weight"], head[: MUON.vocab])
    assert (head.astype("<f4").view("<u4") & 0xFFFF).any(), "no bf16"


def test_a_momentum_that_is_missing(convert, tmp_path):
    """Its entries have another name."""
    run = shutil.copytree(MUON.run, tmp_path / "run")
    metadata = run / "iter_0000003/.metadata"
    options = ["--format", "torch_dist", "--with-optimizer", "--vocab-size", MUON.vocab]
    for old, new, code, message in (
        (b"momentum_buffer", b"momentum_buffex", 4, "the optimizer keeps momentum_buffex"),
        (
            b"state.momentum",
            b"other.momentum",
            3,
            "holds no momentum_buffer: its optimizer is not Muon's beside Adam's",
        ),
    ):
        metadata.write_bytes(metadata.read_bytes().replace(old, new))
        ran = convert("reshard", run, tmp_path / "out", *options)
        assert (ran.code, message in ran.err) == (code, True), ran.err


def test_master_weights_beside_an_optimizer_that_is_not_read():
    """Lion in the place of Adam: the FP32 master weights alone, and the rest is named."""
    from dataclasses import replace

    from formats.checkpoint import Settings
    from formats.megatron import portable_optimizer, torch_dist
    from formats.megatron.details import Megatron

    source = torch_dist.read(MUON.run, Settings(vocab_size=MUON.vocab))
    details = source.details_of(Megatron)
    lion = replace(details, args={**details.args, "muon_scalar_optimizer": "lion"})
    states, report = portable_optimizer.states(replace(source, details=lion))
    assert ([*states], report["left"]) == (["fp32"], ["exp_avg", "exp_avg_sq", "momentum_buffer"])


def test_what_we_write_says_what_it_did(convert, tmp_path):
    """One way to write, which 0.16 to 0.19 load: the file that the older ones have."""
    out = shutil.copytree(RUN, tmp_path / "run")
    assert convert("reshard", out, tmp_path / "out", "--format", "torch_dist", *VOCAB).code == 0
    folder = tmp_path / "out/iter_0000003"
    assert (folder / "common.pt").is_file()
    assert b"common_state" not in (folder / ".metadata").read_bytes()
    assert json.loads((folder / "metadata.json").read_text())["common_backend"] == "torch"


def test_a_state_that_adam_has_not(convert, tmp_path):
    """Buckets of another name, as those of AMSGrad would have."""
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    metadata = run / "iter_0000003/.metadata"
    content = metadata.read_bytes()
    assert b"bucket_idx_0.exp_avg_sq" in content
    metadata.write_bytes(content.replace(b"bucket_idx_0.exp_avg_sq", b"bucket_idx_0.exp_avg_sx"))
    ran = convert("reshard", run, tmp_path / "out", "--format", "torch_dist", "--with-optimizer", *VOCAB)
    assert (ran.code, "the optimizer keeps exp_avg_sx, and Adam does not" in ran.err) == (4, True), ran.err
