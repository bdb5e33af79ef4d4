"""Pictures and pages that commands draw: what stands in them, and that nothing in them comes from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

PICTURE = Path(__file__).parents[2] / "docs/pictures/qkv.svg"
SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]


def test_the_same_rows_in_three_formats(model, convert, tmp_path):
    """The order within Megatron's rank is group by group, within GPT-NeoX's tensor by tensor."""
    ran = convert("explain", "megatron", "linear_qkv.weight", "--model", model("llama"), "--svg", tmp_path / "qkv.svg")
    assert ran.code == 0, ran.err
    labels = texts(tmp_path / "qkv.svg")
    heads = ["Hugging Face", "Megatron, TP 2", "GPT-NeoX, TP 2"]
    assert [label for label in labels if label in heads] == heads
    for rank, first, bars in (
        ("linear_qkv · rank 1", 2, "q{0} k{0} v{0} q{1} k{1} v{1}"),
        ("query_key_value · rank 1", 2, "q{0} q{1} k{0} k{1} v{0} v{1}"),
        ("k_proj", 0, "k{0} k{1} k{2} k{3}"),
    ):
        expected = re.sub(r"([qkv])(\d)", r"\1 · group \2", bars.format(*range(first, first + 4)))
        after = labels[labels.index(rank) + 1 :]
        assert " ".join(after).startswith(expected), rank
    assert PICTURE.read_text() == (tmp_path / "qkv.svg").read_text(), "make docs/pictures/qkv.svg anew"


def test_a_picture_is_readable_without_colour_and_loads_nothing(model, convert, tmp_path):
    convert("explain", "megatron", "linear_fc1.weight", "--model", model("mixtral"), "--svg", tmp_path / "moe.svg")
    tree = ElementTree.parse(tmp_path / "moe.svg")
    blocks = [rect for rect in tree.iter(f"{SVG}rect") if (rect.get("class") or "").startswith("k ")]
    hatched = {rect.get("fill") for rect in tree.iter(f"{SVG}rect")} - {None}
    assert len(blocks) > 4
    assert hatched == {"url(#h1)"}  # the first tensor is plain
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", (tmp_path / "moe.svg").read_text())


def test_a_legend_of_many_tensors_stays_in_the_picture(model, convert, tmp_path):
    """The kinds of a linear attention's projection, as wide as their names are drawn in the largest usual font."""
    options = ["in_proj.weight", "--model", model("qwen3_next"), "--svg", tmp_path / "delta.svg"]
    assert convert("explain", "megatron", *options).code == 0
    tree = ElementTree.parse(tmp_path / "delta.svg")
    width, height = map(float, (tree.getroot().get("width", ""), tree.getroot().get("height", "")))
    kinds = [label for label in tree.iter(f"{SVG}text") if not label.get("class")]
    assert [label.text for label in kinds] == [
        f"linear_{kind}" for kind in ("query", "key", "value", "gate", "beta", "alpha")
    ]
    assert all(float(label.get("x", "")) + 8 * len(label.text or "") < width for label in kinds)
    assert all(float(label.get("y", "")) < height for label in kinds)


def test_many_blocks_are_counted_and_padding_is_shown(model, convert, tmp_path):
    convert("explain", "huggingface", "embed_tokens", "--model", model("llama"), "--svg", tmp_path / "vocab.svg")
    assert "padding" in texts(tmp_path / "vocab.svg")
    many = model("llama", num_attention_heads=16, num_key_value_heads=16)
    convert("explain", "megatron", "linear_qkv.weight", "--tp", 1, "--model", many, "--svg", tmp_path / "many.svg")
    assert texts(tmp_path / "many.svg").count("… 22 blocks more") == 2  # of 48, in Megatron and in GPT-NeoX


def test_a_picture_that_cannot_be_drawn(model, convert, tmp_path):
    (tmp_path / "there.svg").write_text("mine")
    for argv, code, message in (
        (["megatron", "linear_qkv", "--svg", tmp_path / "there.svg"], 7, "exists"),
        (["megatron", "linear_qkv", "--svg", tmp_path / "no/folder.svg"], 7, "is not a folder"),
        (["megatron", "--svg", tmp_path / "a.svg"], 2, "--svg draws some tensors"),
        (["megatron", "weight", "--svg", tmp_path / "b.svg"], 2, "one picture shows 1 to 6 tensors"),
    ):
        ran = convert("explain", *argv)
        assert (ran.code, message in ran.err) == (code, True), ran.err
    assert (tmp_path / "there.svg").read_text() == "mine"
    options = ["linear_qkv.weight", "--tp", 5, "--model", model("llama"), "--svg", tmp_path / "c.svg"]
    assert convert("explain", "megatron", *options).code == 0
    assert "128 rows do not divide over tp = 5" in " ".join(texts(tmp_path / "c.svg"))


def browser() -> str:
    """A headless browser on this machine."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no chromium on this machine (apt-get install chromium)")


def seen(page: Path, search: str, profile: Path) -> str:
    """What a browser makes of a page: its document, after its script ran."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    ran = subprocess.run(
        [browser(), *options, f"{page.as_uri()}#{search}"], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stdout


def facts(page: Path) -> dict[str, Any]:
    script = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert script
    return json.loads(script[1])


def test_a_plan_is_a_page(model, convert, tmp_path):
    page = tmp_path / "plan.html"
    argv = ["plan", model("llama"), "--to", "megatron", "--tp", 2, "--pp", 2, "--dtype", "bf16", "--html", page]
    assert convert(*argv).code == 0
    assert not re.findall(r"https?://", page.read_text())
    data = facts(page)
    up = next(kind for kind in data["kinds"] if kind["tensor"] == "up")
    assert (up["layers"], up["count"], up["edges"]) == ("0-3", 4, ["cast F32 to BF16"])
    assert up["keys"] == ["model.layers.*.mlp.up_proj.weight", "model decoder.layers.*.mlp.linear_fc1.weight"]
    to = [[data["target"]["names"][file], key, rank] for file, key, rank, _ in up["jobs"][3]["to"]]
    assert to == [
        [
            f"release/mp_rank_{rank:02}_001/model_optim_rng.pt",
            "model decoder.layers.1.mlp.linear_fc1.weight",
            f"tp {rank} of 2",
        ]
        for rank in (0, 1)
    ]
    assert sum(kind["count"] for kind in data["kinds"]) == data["tensors"] == 39
    assert sum(kind["bytes"] for kind in data["kinds"]) == data["source"]["bytes"]
    assert convert(*argv).code == 7  # a page is not replaced


def test_a_browser_shows_the_page_and_searches_it(model, convert, tmp_path):
    page = tmp_path / "plan.html"
    convert("plan", model("llama"), "--to", "megatron", "--tp", 2, "--html", page)
    document = seen(page, "up_proj", tmp_path / "profile")
    assert "1 of 12 kinds of tensors" in document
    assert document.count('<details hidden="">') == 11
    assert "tp 1 of 2" in document  # the only one that was found is open
    assert "39</b> tensors" in document


def test_names_in_a_page_are_no_markup(model, convert, tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>"
    source = shutil.copytree(model("llama"), tmp_path / "hf")
    place = tmp_path / hostile.replace("/", "_")
    source.rename(place)
    assert convert("plan", place, "--to", "fsdp", "--html", tmp_path / "plan.html").code == 0
    assert "<img" not in (tmp_path / "plan.html").read_text()
    assert facts(tmp_path / "plan.html")["source"]["path"] == str(place)


def test_a_plan_of_very_many_pieces_lists_the_first_layer_of_each_kind(model, convert, tmp_path, monkeypatch):
    monkeypatch.setattr("converters.commands.pages.plan.MOST_PARTS", 10)
    monkeypatch.setattr("converters.commands.pages.plan.MOST_OF_ONE", 1)
    convert("plan", model("llama"), "--to", "megatron", "--tp", 2, "--html", tmp_path / "plan.html")
    data = facts(tmp_path / "plan.html")
    assert data["brief"]
    assert {len(kind["jobs"]) for kind in data["kinds"]} == {1}
    assert data["kinds"][1]["jobs"][0]["to"][-1] == [-1, "1 more", "", 0]
    assert sum(kind["count"] for kind in data["kinds"]) == 39


@pytest.fixture
def changed(model, tmp_path):
    """A model, and a copy of it in which one query head and one number of the embedding are others."""
    from safetensors.numpy import load_file, save_file

    other = shutil.copytree(model("llama"), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    query = tensors["model.layers.2.self_attn.q_proj.weight"]
    query[16:20] += 0.25  # the first half of the third head, which has 8 rows
    tensors["model.embed_tokens.weight"][7, 5] = float("nan")
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return model("llama"), other


def test_a_comparison_is_a_page_that_says_where_and_how(changed, convert, tmp_path):
    first, second = changed
    ran = convert("diff", first, second, "--html", tmp_path / "diff.html")
    assert (ran.code, "2 tensors" in ran.err) == (6, True)
    data = facts(tmp_path / "diff.html")
    assert not re.findall(r"https?://", (tmp_path / "diff.html").read_text())
    kinds = {kind["name"]: kind["tensors"] for kind in data["kinds"]}
    assert [each["layer"] for each in kinds["query"]] == ["2"]
    distances = kinds["query"][0]["distances"]
    query, axes = kinds["query"][0], {axis["name"]: axis for axis in distances["axes"]}
    assert query["count"] == sum(size[2] for size in distances["sizes"]) == 4 * axes["hidden"]["length"]
    assert [size[:2] for size in distances["sizes"]] == [["1e-1", "1e0"]]
    for axis in ("group", "head", "half"):
        assert sum(map(bool, axes[axis]["counts"])) == 1, axis
    assert all(axes["hidden"]["counts"])
    assert distances["rms"] == pytest.approx(0.25 * (query["count"] / distances["elements"]) ** 0.5, rel=1e-5)
    element = kinds["embedding"][0]["distances"]
    assert [(place, two, apart) for place, _, two, apart in element["farthest"]] == [([7, 5], "nan", None)]
    assert convert("diff", first, second, "--html", tmp_path / "diff.html").code == 7  # a page is not replaced


def test_a_comparison_of_a_model_that_a_table_describes_with_one_that_none_does(model, convert, tmp_path):
    other, page = shutil.copytree(model("mixtral"), tmp_path / "other"), tmp_path / "diff.html"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    ran = convert("diff", model("mixtral"), other, "--html", page)
    assert (ran.code, "one is described by a table, the other is not" in ran.out) == (6, True), ran.err
    query = "model.layers.2.self_attn.q_proj.weight"
    assert re.search(rf"{re.escape(query)} +only in the second", ran.out)
    kinds = {kind["name"]: kind for kind in facts(page)["kinds"]}
    assert kinds["query"]["key"] == query.replace(".2.", ".0-3.")
    assert [each["layer"] for each in kinds["query"]["tensors"]] == ["0", "1", "2", "3"]
    ((layer, text),) = ((each["layer"], each["text"]) for each in kinds[query]["tensors"])
    assert (layer, text) == (None, f"{query}, only in the second")


def test_distances_are_those_of_numpy_whatever_the_tiles():
    import numpy as np

    from converters.prove.distances import FARTHEST, Distances

    shape = (5, 6, 7)
    first, second = (np.random.default_rng(seed).standard_normal(shape) for seed in (1, 2))
    second[1:4] = first[1:4]
    apart = np.abs(first - second)
    distances = Distances(("a", "b", "c"), shape)
    for start in range(0, 5, 2):
        part = slice(start, start + 2)
        tile = apart[part]
        distances.add((start, 0, 0), tile.shape, first[part].ravel(), second[part].ravel(), tile.ravel())
    for axis in range(3):
        others = tuple({0, 1, 2} - {axis})
        assert np.array_equal(distances.counts[axis], (apart != 0).sum(axis=others))
        assert np.array_equal(distances.largest[axis], apart.max(axis=others))
    assert distances.rms == pytest.approx(float(np.sqrt(np.mean(apart**2))))
    assert [element[0] for element in distances.farthest] == sorted(apart.ravel(), reverse=True)[:FARTHEST]
    assert all(apart[place] == distance for distance, place, _, _ in distances.farthest)


def test_a_checkpoint_is_a_page(model, convert, tmp_path):
    assert convert("hf2megatron", model("llama"), tmp_path / "run", "--tp", 2, "--pp", 2).code == 0
    page = tmp_path / "run.html"
    assert convert("inspect", tmp_path / "run", "--html", page).code == 0
    data = facts(page)
    assert ["layers", "4"] in data["rows"]
    assert sum(file[1] for file in data["files"]) == sum(kind["bytes"] for kind in data["kinds"]) == data["bytes"]
    kind = next(kind for kind in data["kinds"] if "linear_fc1.weight" in kind["key"])
    assert (kind["count"], "gate" in kind["holds"]) == (8, True)
    assert {place[2] for place in kind["places"]} == {"tp 0 of 2", "tp 1 of 2"}
    ran = convert("inspect", tmp_path, "--html", tmp_path / "none.html")
    assert ran.code
    assert not (tmp_path / "none.html").exists()


def test_a_browser_shows_a_comparison_and_a_checkpoint(changed, convert, tmp_path):
    convert("diff", *changed, "--html", tmp_path / "diff.html")
    document = seen(tmp_path / "diff.html", "q_proj", tmp_path / "profile")
    assert "1 of 2 kinds of tensors" in document
    assert "1 of 2 differ" in document  # the half of a head
    convert("inspect", changed[0], "--html", tmp_path / "hf.html")
    document = seen(tmp_path / "hf.html", "q_proj", tmp_path / "profile")
    assert "1 of 12 kinds of tensors" in document
    assert "model.layers.3.self_attn.q_proj.weight" in document


def test_tables_are_in_colour_on_a_terminal_alone(monkeypatch):
    from converters.common.progress import table

    rows = [("format", "megatron"), ("layers", 4)]
    plain = table(rows)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.sub(r"\x1b\[\d+m", "", table(rows)) == plain != table(rows)
    monkeypatch.setenv("NO_COLOR", "1")
    assert table(rows) == plain
