"""HF to torch_dist to the classic format to HF: every file comes back byte for byte, and the digest stays."""

from __future__ import annotations

import pytest

from formats.registry import open_checkpoint
from tests.models import FEW, files


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_every_line_comes_back(model, convert, tmp_path, name):
    """Every family comes back in `test_chain.py`."""
    source = model(name, "bfloat16", shard="100KB")
    dist, classic, back = (tmp_path / step for step in ("dist", "classic", "back"))
    spread = ["--ep", 2, "--etp", 1] if name.startswith("gpt_oss") else []  # experts with biases are whole
    assert convert("hf2megatron", source, dist, "--format", "torch_dist", "--tp", 4, "--pp", 2, *spread).code == 0
    assert convert("reshard", dist, classic, "--format", "torch", "--tp", 2, *spread).code == 0
    assert convert("megatron2hf", classic, back).code == 0
    assert files(back) == files(source)
    digests = {convert("digest", folder).out.split()[0] for folder in (source, dist, classic, back)}
    assert len(digests) == 1
    for start, other, form, tp in ((dist, "classic2", "torch", 2), (classic, "dist2", "torch_dist", 4)):
        options = ["--format", form, "--tp", tp, *spread]
        assert convert("reshard", start, tmp_path / other, *options).code == 0
        assert convert("hf2megatron", source, tmp_path / f"{other} direct", *options).code == 0
        assert files(tmp_path / other) == files(tmp_path / f"{other} direct"), "A to B to C is not A to C"


@pytest.mark.parametrize("options", [[], ["--tp", 2, "--pp", 2], ["--tp", 8], ["--pp", 2, "--vpp", 2]])
def test_every_topology_comes_back(model, convert, tmp_path, options):
    """tp = 8 cuts inside a key/value group. A reshard keeps format, iteration and padding."""
    source = model("qwen2-tied")
    first = ["--format", "torch_dist", "--iteration", 12, "--make-vocab-size-divisible-by", 32]
    assert convert("hf2megatron", source, tmp_path / "one", "--tp", 2, *first).code == 0
    assert convert("reshard", tmp_path / "one", tmp_path / "two", *options).code == 0
    assert convert("hf2megatron", source, tmp_path / "direct", *first, *options).code == 0
    assert files(tmp_path / "two") == files(tmp_path / "direct"), "A to B to C is not A to C"
    assert convert("megatron2hf", tmp_path / "two/iter_0000012", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)
    assert convert("verify", tmp_path / "two").code == 0
    assert convert("verify", tmp_path / "two", source).code == 0
    assert convert("diff", tmp_path / "two", tmp_path / "one").code == 0


def test_a_rank_finds_its_parts_in_a_file_of_its_own(model, convert, tmp_path):
    """Any rank could read any file: nothing but the time that it takes would tell."""
    options = ["--format", "torch_dist", "--tp", 2, "--pp", 2]
    assert convert("hf2megatron", model("llama"), tmp_path / "out", *options).code == 0
    stages: dict[object, set[int]] = {}
    for placed in open_checkpoint(tmp_path / "out").fragments():
        rank = int(placed.fragment.path.name.split("_")[2])
        layer = placed.slot.layer
        stages.setdefault(placed.key.split(".")[0] if layer is None else layer, set()).add(rank // 2)
        if placed.part.shape != placed.slot.shape:
            assert {low // (high - low) % 2 for low, high in placed.part.ranges} >= {rank % 2}, placed.key
    assert stages == {"embedding": {0}, 0: {0}, 1: {0}, 2: {1}, 3: {1}, "decoder": {1}, "output_layer": {1}}


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, ["--tp", 7], "do not divide over tp = 7"),
        ({"intermediate_size": 97}, ["--tp", 2], "194 rows of decoder.layers.0.mlp.linear_fc1.weight do not divide"),
        ({}, ["--pp", 3], "4 layers do not divide over 3 pipeline parts"),
    ],
)
def test_what_does_not_divide_is_refused(model, convert, tmp_path, changes, options, reason):
    ran = convert("hf2megatron", model("llama", **changes), tmp_path / "out", "--format", "torch_dist", *options)
    assert ran.code == 5
    assert reason in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_format_is_for_megatron(model, convert, tmp_path):
    assert convert("hf2megatron", model("granite"), tmp_path / "out", "--format", "torch_dist").code == 4
    assert convert("hf2neox", model("llama"), tmp_path / "neox").code == 0
    ran = convert("reshard", tmp_path / "neox", tmp_path / "out", "--format", "torch_dist")
    assert ran.code == 2
    assert "--format has no effect" in ran.err


def test_a_plan_shows_what_stays_behind(model, convert, tmp_path):
    text = convert("plan", model("llama"), "--to", "megatron_dist", "--tp", 2, "--pp", 2).out
    assert "write  4 files" in text
    assert "release/.metadata" in text
    assert convert("hf2megatron", model("llama"), tmp_path / "m", "--format", "torch_dist", "--norm", "local").code == 0
    text = convert("megatron2hf", tmp_path / "m", tmp_path / "h", "-n").out
    assert "what is no weight of the model is not carried: 16 such as decoder.layers.self_attention.linear_qkv" in text
    assert "linear_fc1.weight_w" in convert("explain", "megatron_dist").out


def test_it_meets_megatron_llm(model, convert, tmp_path):
    source, dist, llm, again = model("llama"), tmp_path / "dist", tmp_path / "llm", tmp_path / "again"
    assert convert("hf2megatron", source, dist, "--format", "torch_dist", "--iteration", 12).code == 0
    assert convert("reshard", dist, llm, "--iteration", 12, "--format", "megatron-llm", "--tp", 2).code == 0
    assert convert("reshard", llm, again, "--format", "torch_dist").code == 0
    assert files(again) == files(dist)
    assert convert("megatron2hf", again, tmp_path / "back", "--iteration", 12).code == 0
    assert files(tmp_path / "back") == files(source)
