"""A slices json from weights."""

from __future__ import annotations

import json

import pytest

from train.data.packs.inputs import read_slices

WEIGHTS = """\
U1: {tokens: 1000, weights: {arxiv: 1, wiki: 2, books: 0.5}}
N: {tokens: 10, weights: {wiki: 1, code: 2}}
"""


def test_tokens_are_divided_by_weights(train, tmp_path):
    (tmp_path / "w.yml").write_text(WEIGHTS)
    out = tmp_path / "slices.json"
    assert train("packs", "weights", tmp_path / "w.yml", out).out == f"{out}: 4 data sets\n"
    content = json.loads(out.read_text())
    assert content["names"] == ["arxiv", "wiki", "books", "code"]
    assert content["U1"]["total"] == [286, 571, 143, 0]  # of 285.7, 571.4 and 142.9
    assert content["N"]["total"] == [0, 3, 0, 7]
    assert content["U2"]["total"] == content["U3"]["total"] == content["Ext"]["total"] == [0] * 4
    names, pools = read_slices(out)
    assert names == ("arxiv", "wiki", "books", "code")
    assert pools["U1"].total == 1000
    assert train("packs", "weights", tmp_path / "w.yml", out).code == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("U4: {tokens: 1, weights: {a: 1}}", "is no mapping of U1, N, U2, U3, Ext"),
        ("U1: {tokens: 1.5e9, weights: {a: 1}}", "and not tokens and weights"),
        ("U1: {tokens: 10, weights: {a: -1}}", "gives 'a' the weight -1"),
    ],
)
def test_weights_that_are_none(train, tmp_path, text, message):
    (tmp_path / "w.yml").write_text(text)
    ran = train("packs", "weights", tmp_path / "w.yml", tmp_path / "slices.json")
    assert ran.code == 3
    assert message in ran.err
