"""Megatron-FSDP: what 0.19.2 saved as fsdp_dtensor is read bit for bit, with its optimizer; torch reads both sides.

Its logits, and that every command reads it: test_megatron_0192.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import Settings
from formats.megatron import fsdp_dtensor, optimizer_reader, torch_dist
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.models import files

RUN = Path(__file__).with_name("megatron_0192") / "fsdp_dtensor"
VOCAB = ("--vocab-size", 60)
LAYER = "decoder.layers.0."
STATE = "optimizer.state.module.module.module."
PARAMETERS = {
    "embedding.word_embeddings.weight": (60, 24), "output_layer.weight": (60, 24),
    "decoder.final_layernorm.weight": (24,), f"{LAYER}input_layernorm.weight": (24,),
    f"{LAYER}pre_mlp_layernorm.weight": (24,), f"{LAYER}self_attention.linear_qkv.weight": (48, 24),
    f"{LAYER}self_attention.linear_proj.weight": (24, 24), f"{LAYER}mlp.linear_fc1.weight_w": (48, 24),
    f"{LAYER}mlp.linear_fc1.weight_v": (48, 24), f"{LAYER}mlp.linear_fc2.weight": (24, 48),
}  # fmt: skip
"""Names and shapes, those of the vocabulary without its padding."""
pytestmark = pytest.mark.filterwarnings("ignore")


def tensors(folder: Path) -> dict[str, Any]:
    """The tensors of a DCP, as torch's own reader gives them."""
    import torch
    import torch.distributed.checkpoint as dcp

    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in about.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_its_optimizer_in_torch_dist_and_back(convert, tmp_path, dtype):
    """The weights are the master weights, and what is rounded has them beside it.

    Megatron-LM#2805 asks for this conversion, #5895 (open) proposes one: what two ranks saved is whole here.
    """
    import torch

    there, back = tmp_path / "there", tmp_path / "back"
    cast = [] if dtype == "fp32" else ["--dtype", dtype]
    ran = convert("reshard", RUN, there, "--format", "torch_dist", "--with-optimizer", *cast, *VOCAB)
    assert ran.code == 0, ran.err
    theirs, ours = tensors(RUN / "iter_0000003"), tensors(there / "iter_0000003")
    for name, shape in PARAMETERS.items():
        whole = name.replace("weight_w", "weight").replace("weight_v", "weight")
        expected = {"param": theirs[f"model.module.{name}"]}
        expected |= {moment: theirs[f"{STATE}{name}.{moment}"] for moment in ("exp_avg", "exp_avg_sq")}
        for moment, tensor in expected.items():
            stacked = whole.replace(LAYER, "decoder.layers.")
            stacked = stacked.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
            stacked = stacked.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
            stored = ours[f"optimizer.state.{moment}.{stacked}"]
            stored = stored[0] if name.startswith(LAYER) else stored
            stored = stored[48:] if name.endswith("_v") else stored[: shape[0]]
            assert stored.equal(tensor[: shape[0]]), f"{moment} of {name}"
            assert stored.any()
    weight = ours["decoder.layers.mlp.linear_fc2.weight"][0]
    master = theirs[f"model.module.{LAYER}mlp.linear_fc2.weight"]
    assert weight.equal(master.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]))
    ran = convert("reshard", there, back, "--format", "fsdp_dtensor", "--with-optimizer", "--norm", "local", *VOCAB)
    if dtype == "fp32":
        refused(ran, 5, "trains in float32", "--dtype bf16")
        return
    assert ran.code == 0, ran.err
    returned = tensors(back / "iter_0000003")
    for name, tensor in theirs.items():
        if not name.startswith("rng_state"):
            assert returned[name].equal(tensor), name


def test_settings_come_back(convert, tmp_path):
    """What torch's Adam and the fused one ask for, of each parameter; the schedule; and the arguments."""
    from formats.torch_files import dcp

    out = tmp_path / "out"
    assert convert("reshard", RUN, out, "--with-optimizer", "--dtype", "bf16", *VOCAB).code == 0

    def settings(run: Path) -> dict[str, Any]:
        names = dcp.contents(run / "iter_0000003")[1]
        return {name: entry.value for name, entry in dcp.read_objects(run / "iter_0000003", names).items()}

    theirs, ours = settings(RUN), settings(out)
    kept = {name: value for name, value in theirs.items() if not name.startswith(("rng_state", "args"))}
    assert {name: ours[name] for name in kept} == kept
    assert {name.rsplit(".", 1)[1] for name in ours.keys() - kept.keys() - {"args"}} == {"step", "bias_correction"}
    assert vars(ours["args"])["bf16"] is True
    assert vars(ours["args"])["use_megatron_fsdp"] is True
    flags = (out / "megatron_flags.txt").read_text()
    local = ("--no-rope-fusion", "--no-persist-layer-norm")
    options = ("--ckpt-format fsdp_dtensor", "--use-megatron-fsdp", *local, "--bf16", "--use-distributed-optimizer")
    assert "\n".join([*options, "--no-load-rng"]) in flags


OTHERS = ("llama", "llama-tied", "qwen3", "mixtral", "qwen2_moe", "gpt2", "nemotron", "deepseek_v3")


@pytest.mark.parametrize("name", OTHERS)
def test_to_it_and_back(model, convert, tmp_path, name):
    """Weights of other families, with names of Transformer Engine and of the local layers, by any number of ranks."""
    source = model(name)
    for number, options in enumerate((["--tp", 2], ["--norm", "local"])):
        run, back = tmp_path / f"run{number}", tmp_path / f"back{number}"
        ran = convert("hf2megatron", source, run, "--format", "fsdp_dtensor", *options)
        assert ran.code == 0, ran.err
        assert "starts no training in half precision from the weights of fsdp_dtensor alone" in ran.err
        assert convert("megatron2hf", run, back).code == 0
        assert files(back) == files(source)


def test_other_frameworks_resume_from_it(convert, tmp_path):
    """Adam goes into FSDP and DeepSpeed, and from there back: the same master weights, moments, step and settings."""
    fsdp, back = tmp_path / "fsdp", tmp_path / "back"
    assert convert("hf2fsdp", RUN, fsdp, "--with-optimizer", *VOCAB).code == 0
    assert convert("zero2universal", RUN, tmp_path / "universal", *VOCAB).code == 0
    options = ("--format", "fsdp_dtensor", "--with-optimizer", "--dtype", "bf16", "--norm", "local")
    ran = convert("hf2megatron", fsdp, back, *options)
    assert ran.code == 0, ran.err
    assert "0.00413176 and 0, whatever --lr and --min-lr say" in ran.err
    assert "starts no training" not in ran.err
    theirs, ours = tensors(RUN / "iter_0000003"), tensors(back / "iter_0000003")
    for name, tensor in theirs.items():
        if not name.startswith("rng_state"):
            rows = 60 if tensor.shape[:1] == (64,) else None
            assert ours[name][:rows].equal(tensor[:rows]) if tensor.shape else ours[name].equal(tensor), name


@pytest.mark.parametrize("command", ["hf2megatron", "reshard"])
def test_what_is_written_equals_its_manifest(convert, tmp_path, command):
    """The master weights are the weights there, and are compared as such: a byte that changed is found, and once."""
    fsdp, out = tmp_path / "fsdp", tmp_path / "out"
    assert convert("hf2fsdp", RUN, fsdp, "--with-optimizer", *VOCAB).code == 0
    options = ("--format", "fsdp_dtensor", "--with-optimizer", "--dtype", "bf16")
    source, vocab = (fsdp, ()) if command == "hf2megatron" else (RUN, VOCAB)
    ran = convert(command, source, out, *options, *vocab)
    assert ran.code == 0, ran.err
    ran = convert("verify", out)
    assert (ran.code, "equals vitruvian.json: 36 tensors" in ran.out) == (0, True), ran.err + ran.out
    keys = ("model.module.decoder.final_layernorm.weight", f"{STATE}decoder.final_layernorm.weight.exp_avg")
    for key, name in zip(keys, ("final_norm", "exp_avg.final_norm"), strict=True):
        file, at = place_of(next(out.glob("iter_*")), key)
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)
        refused(convert("verify", out), 6, "1 of 36 tensors", f"differ from vitruvian.json: {name}")
        content[at] ^= 1
        file.write_bytes(content)


def place_of(folder: Path, key: str) -> tuple[Path, int]:
    """The file of a tensor in a DCP, and the place of a byte of it there."""
    import torch.distributed.checkpoint as dcp

    storage = dcp.FileSystemReader(folder).read_metadata().storage_data
    info = next(info for index, info in storage.items() if index.fqn == key)
    return folder / info.relative_path, info.offset + info.length // 2


def test_the_table_is_the_classic_one():
    """Each row has one key in a classic checkpoint, and gate and up, one after the other there, are apart."""
    from formats.megatron.torch_dist import MODEL as ROWS

    keys = [rule.key for rule in fsdp_dtensor.TABLE]
    halves = [key for key in keys if re.search(r"_[wv](?=[|}]|$)", key)]
    assert len(halves) == 20, "in layers that predict further tokens too"
    assert len(keys) == len(ROWS) + 10
    assert {rule.pattern.text for rule in fsdp_dtensor.TABLE if rule.key.endswith("mlp.linear_fc1.weight_v")} == {
        "up: ffn/tp hidden"
    }
    expert = "{linear_fc1.weight{expert}_w|local_experts.{expert}.linear_fc1.weight_w}"
    assert f"decoder.layers.{{layer}}.mlp.experts.{expert}" in keys


def test_a_native_optimizer_is_the_distributed_one():
    source = open_checkpoint(RUN, Settings(vocab_size=60))
    optimizer = optimizer_reader.read(source)
    assert optimizer.distributed
    assert [group["step"] for group in optimizer.groups] == [3.0, 3.0]
    assert [group["wd_mult"] for group in optimizer.groups] == [1.0, 0.0]
    assert optimizer.head["opt_param_scheduler"]["num_steps"] == 12
    assert not torch_dist.detect(RUN.parent / "deepspeed")
