"""HF to torch_dist to the classic format to HF: every file comes back byte for byte, and the digest stays."""

from __future__ import annotations

import pytest

from tests.models import GATED, files


@pytest.mark.parametrize("name", GATED)
def test_every_family_comes_back(model, convert, tmp_path, name):
    source = model(name, "bfloat16", shard="100KB")
    dist, classic, back = (tmp_path / step for step in ("dist", "classic", "back"))
    assert convert("hf2megatron", source, dist, "--format", "torch_dist", "--tp", 4, "--pp", 2).code == 0
    assert convert("reshard", dist, classic, "--format", "torch", "--tp", 2).code == 0
    assert convert("megatron2hf", classic, back).code == 0
    assert files(back) == files(source)
    digests = {convert("digest", folder).out.split()[0] for folder in (source, dist, classic, back)}
    assert len(digests) == 1
    assert convert("hf2megatron", source, tmp_path / "direct", "--tp", 2).code == 0
    assert files(classic) == files(tmp_path / "direct"), "A to B to C is not A to C"


@pytest.mark.parametrize("words", [[], ["--tp", 2, "--pp", 2], ["--tp", 8], ["--pp", 2, "--vpp", 2]])
def test_every_topology_comes_back(model, convert, tmp_path, words):
    """tp = 8 cuts inside a key/value group. A reshard keeps format, iteration and padding."""
    source = model("qwen2-tied")
    first = ["--format", "torch_dist", "--iteration", 12, "--make-vocab-size-divisible-by", 32]
    assert convert("hf2megatron", source, tmp_path / "one", "--tp", 2, *first).code == 0
    assert convert("reshard", tmp_path / "one", tmp_path / "two", *words).code == 0
    assert convert("hf2megatron", source, tmp_path / "direct", *first, *words).code == 0
    assert files(tmp_path / "two") == files(tmp_path / "direct"), "A to B to C is not A to C"
    assert convert("megatron2hf", tmp_path / "two/iter_0000012", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)
    assert convert("verify", tmp_path / "two").code == 0
    assert convert("verify", tmp_path / "two", source).code == 0
    assert convert("diff", tmp_path / "two", tmp_path / "one").code == 0


@pytest.mark.parametrize(
    ("changes", "words", "reason"),
    [
        ({}, ["--tp", 7], "do not divide over tp = 7"),
        ({"intermediate_size": 97}, ["--tp", 2], "194 rows of decoder.layers.0.mlp.linear_fc1.weight do not divide"),
        ({}, ["--pp", 3], "4 layers do not divide over 3 pipeline parts"),
    ],
)
def test_what_does_not_divide_is_refused(model, convert, tmp_path, changes, words, reason):
    ran = convert("hf2megatron", model("llama", **changes), tmp_path / "out", "--format", "torch_dist", *words)
    assert ran.code == 5
    assert reason in ran.err
    assert list(tmp_path.iterdir()) == []
