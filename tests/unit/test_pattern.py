"""Patterns: what parses, what it means by hand, and what an error points at."""

from __future__ import annotations

import pytest

from formats.errors import RefusedError
from formats.layout.lowering import lower, shape
from formats.layout.pattern import PatternError, parse
from formats.layout.table import rules

SIZES = {"group": 2, "head": 2, "half": 2, "pair": 2, "dim": 4, "hidden": 3, "ffn": 6, "vocab": 5, "padding": 3}


def picture(text: str, rank: int = 0, ranks: int = 1) -> list[str]:
    """The tensor and coordinates at each address, `.` where there is none."""
    pattern, mesh = parse(text), {"tp": (rank, ranks)}
    cells = ["."] * (shape(pattern, SIZES, mesh)[0] if pattern.dims else 1)
    for leaf in lower(pattern, SIZES, mesh):
        points = [("", leaf.base)]
        for span in leaf.spans:
            points = [
                (f"{name}{n}", address + (n - span.start) * span.stride)
                for name, address in points
                for n in range(span.start, span.stop)
            ]
        for name, address in points:
            assert cells[address] == "."
            cells[address] = leaf.tensor[0] + name
    return cells


def test_products_are_row_major():
    assert picture("query: (group pair)") == ["q00", "q01", "q10", "q11"]
    leaf = lower(parse("query: (pair group)"), SIZES, {})[0]
    assert [(span.axis, span.stride) for span in leaf.spans] == [("pair", 2), ("group", 1)]


def test_sums_are_concatenations_and_fill_belongs_to_nobody():
    assert picture("(gate: half | up: half)") == ["g0", "g1", "u0", "u1"]
    assert picture("(embedding: vocab | ~padding)") == ["e0", "e1", "e2", "e3", "e4", ".", ".", "."]


def test_fused_query_key_value_interleaves_by_group():
    assert picture("(group (query: head | key: | value:))") == ["q00", "q01", "k0", "v0", "q10", "q11", "k1", "v1"]


def test_an_even_split_cuts_each_half_of_a_gated_layer_or_the_whole():
    assert picture("(gate: ffn/tp | up: ffn/tp)", 1, 3) == ["g2", "g3", "u2", "u3"]
    assert picture("(gate: ffn | up: ffn)/tp", 1, 3) == ["g4", "g5", "u0", "u1"]


def test_branches_in_turn():
    """So many elements of each at a time, on each rank by itself, and one after another without that size."""
    text = "(gate: ffn/tp | up: ffn/tp)%head"
    assert picture(text) == ["g0", "g1", "u0", "u1", "g2", "g3", "u2", "u3", "g4", "g5", "u4", "u5"]
    assert picture(text, 1, 3) == ["g2", "g3", "u2", "u3"]
    assert picture("(gate: ffn/tp | up: ffn/tp)%interleave", 1, 2) == ["g3", "g4", "g5", "u3", "u4", "u5"]
    with pytest.raises(RefusedError, match="3 rows do not divide into blocks of 2"):
        picture(text, 0, 2)
    with pytest.raises(PatternError, match="only branches can be interleaved"):
        parse("gate: (ffn hidden)%head")


def test_a_split_may_cut_inside_a_group():
    assert picture("(group (query: head | key: | value:))/tp", 1, 4) == ["k0", "v0"]
    assert picture("(embedding: vocab | ~padding)/tp", 1, 2) == ["e4", ".", ".", "."]


def test_strides_are_those_of_the_storage():
    leaf = lower(parse("down: hidden ffn"), SIZES, {}, strides=(1, 3))[0]
    assert [(span.axis, span.stride) for span in leaf.spans] == [("hidden", 1), ("ffn", 3)]


def test_a_split_that_does_not_divide_is_refused():
    with pytest.raises(RefusedError, match="5 rows do not divide over tp = 2"):
        lower(parse("embedding: vocab/tp hidden"), SIZES, {"tp": (0, 2)})


def test_an_address_of_two_tensors_is_refused():
    with pytest.raises(RefusedError, match="one address would belong to gate and query"):
        lower(parse("(query: head | key: head) (gate: ffn | up: ffn)"), SIZES, {})


@pytest.mark.parametrize(
    ("text", "at", "problem"),
    [
        ("query: (group head", 19, "expected ')', found the end"),
        ("query: group head)", 18, "unexpected ')'"),
        ("query: group $ head", 14, "unexpected '$'"),
        ("query: Group", 8, "unexpected 'G'"),
        ("group head", 1, "no label names a logical tensor"),
        ("query: (key: group)", 1, "contradict each other"),
        ("query: group/", 14, "expected a mesh axis"),
        ("(query: group key: half)", 15, "must stand at the start of a branch"),
        ("query: ~", 9, "expected the name of the fill's size"),
    ],
)
def test_errors_point_at_the_character(text, at, problem):
    with pytest.raises(PatternError) as raised:
        parse(text)
    message, line, arrow = str(raised.value).split("\n")
    assert problem.replace("the end", "'the end'") in message
    assert line.strip() == text
    assert arrow.index("^") - 4 == at - 1


@pytest.mark.parametrize(
    "line", ["a.weight  query: group  sometimes", "a.weight  nonsense: group", "a.weight  query: (group"]
)
def test_a_table_with_a_mistake_does_not_load(line):
    with pytest.raises((ValueError, PatternError)):
        rules(line)


def test_spellings_multiply():
    rule = rules("{a|b}.{layer}.{c|d}  final_norm: hidden")[0]
    assert rule.spellings == ("a.{layer}.c", "a.{layer}.d", "b.{layer}.c", "b.{layer}.d")


def test_a_pattern_gives_its_branches_and_the_layout_of_another_tensor():
    gated = parse("(gate: (expert ffn)/etp | up: ffn)%interleave (hidden pair)")
    assert [half.text for half in gated.apart()] == [
        "gate: (expert ffn)/etp (hidden pair)",
        "up: ffn (hidden pair)",
    ]
    assert parse("up: ffn hidden").apart() == (parse("up: ffn hidden"),)
    assert parse("embedding: vocab hidden").renamed("embedding", "head") == parse("head: vocab hidden")
    assert parse("(vocab: vocab | ~padding) hidden").renamed("vocab", "head").text == "(head: vocab | ~padding) hidden"
