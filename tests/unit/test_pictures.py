"""Pictures and pages that commands draw: what stands in them, and that nothing in them comes from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

PICTURE = Path(__file__).parents[2] / "docs/pictures/qkv.svg"
SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]


def test_the_same_rows_in_three_formats(model, convert, tmp_path):
    """The order within Megatron's rank is group by group, within GPT-NeoX's tensor by tensor."""
    ran = convert("explain", "megatron", "linear_qkv.weight", "--model", model("llama"), "--svg", tmp_path / "qkv.svg")
    assert ran.code == 0, ran.err
    told = texts(tmp_path / "qkv.svg")
    heads = ["Hugging Face", "Megatron, TP 2", "GPT-NeoX, TP 2"]
    assert [one for one in told if one in heads] == heads
    for rank, first, bars in (
        ("linear_qkv · rank 1", 2, "q{0} k{0} v{0} q{1} k{1} v{1}"),
        ("query_key_value · rank 1", 2, "q{0} q{1} k{0} k{1} v{0} v{1}"),
        ("k_proj", 0, "k{0} k{1} k{2} k{3}"),
    ):
        wanted = re.sub(r"([qkv])(\d)", r"\1 · group \2", bars.format(*range(first, first + 4)))
        after = told[told.index(rank) + 1 :]
        assert " ".join(after).startswith(wanted), rank
    assert PICTURE.read_text() == (tmp_path / "qkv.svg").read_text(), "make docs/pictures/qkv.svg anew"


def test_a_picture_is_readable_without_colour_and_loads_nothing(model, convert, tmp_path):
    convert("explain", "megatron", "linear_fc1.weight", "--model", model("mixtral"), "--svg", tmp_path / "moe.svg")
    tree = ElementTree.parse(tmp_path / "moe.svg")
    blocks = [one for one in tree.iter(f"{SVG}rect") if (one.get("class") or "").startswith("k ")]
    hatched = {one.get("fill") for one in tree.iter(f"{SVG}rect")} - {None}
    assert len(blocks) > 4
    assert hatched == {"url(#h1)"}  # the first tensor is plain
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", (tmp_path / "moe.svg").read_text())


def test_many_blocks_are_counted_and_padding_is_shown(model, convert, tmp_path):
    convert("explain", "huggingface", "embed_tokens", "--model", model("llama"), "--svg", tmp_path / "vocab.svg")
    assert "padding" in texts(tmp_path / "vocab.svg")
    many = model("llama", num_attention_heads=16, num_key_value_heads=16)
    convert("explain", "megatron", "linear_qkv.weight", "--tp", 1, "--model", many, "--svg", tmp_path / "many.svg")
    assert texts(tmp_path / "many.svg").count("… 22 blocks more") == 2  # of 48, in Megatron and in GPT-NeoX


def test_a_picture_that_cannot_be_drawn(model, convert, tmp_path):
    (tmp_path / "there.svg").write_text("mine")
    for words, code, said in (
        (["megatron", "linear_qkv", "--svg", tmp_path / "there.svg"], 7, "exists"),
        (["megatron", "linear_qkv", "--svg", tmp_path / "no/folder.svg"], 7, "is no folder"),
        (["megatron", "--svg", tmp_path / "a.svg"], 2, "--svg draws some tensors"),
        (["megatron", "weight", "--svg", tmp_path / "b.svg"], 2, "one picture shows 1 to 6 tensors"),
    ):
        ran = convert("explain", *words)
        assert (ran.code, said in ran.err) == (code, True), ran.err
    assert (tmp_path / "there.svg").read_text() == "mine"
    words = ["linear_qkv.weight", "--tp", 5, "--model", model("llama"), "--svg", tmp_path / "c.svg"]
    assert convert("explain", "megatron", *words).code == 0
    assert "128 rows do not divide over tp = 5" in " ".join(texts(tmp_path / "c.svg"))
