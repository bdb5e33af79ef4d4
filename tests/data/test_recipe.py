"""Recipes: what they may say, what they may not, and that nothing in them is run."""

from __future__ import annotations

import datetime
import re

import pytest

from formats.errors import UsageError
from train.data.fetch.filters import TESTS, Condition, template
from train.data.fetch.recipe_yaml import KEYS, LARGEST, load, override, parse, shipped
from train.data.tokens.records import Malformed

PAIR = "source: a/b\nuser: q\nassistant: a\n"


def read(text: str):
    return parse(text.encode(), "r", "r.yml")


def test_a_recipe_says_what_it_says():
    recipe = read(
        PAIR + "config: [x, y]\nsplits: train\nrevision: v1\nwhere: {l: no, n: {min: 3, max: 9.5}, d: 2024-01-01}\n"
        "system: s\nkeep: [id]\ndedup: prompt\nsample: 10\nseed: 3\nas: control-text\nabout: One line\n"
    )
    assert recipe.config == ("x", "y")
    assert recipe.where == (
        Condition("l", "is", "no"),  # Norwegian, which YAML 1.1 calls false
        Condition("n", "min", 3),
        Condition("n", "max", 9.5),
        Condition("d", "is", "2024-01-01"),
    )
    assert [role for role, _ in recipe.speakers] == ["system", "user", "assistant"]
    assert recipe.fields == ("l", "n", "d", "s", "q", "a", "id")
    assert (recipe.form, recipe.dedup, recipe.sample, recipe.seed) == ("control-text", True, 10, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PAIR + "asistant: b\n", "'asistant' is no key of a recipe: did you mean assistant?"),
        (PAIR + "source: c/d\n", "'source' is given twice in line 4"),
        ("user: q\nassistant: a\n", "it has no source"),
        ("source: a/b\n", "it takes nothing from a record"),
        (PAIR + "text: t\n", "it takes text and also user and assistant"),
        ("source: a/b\nuser: q\n", "lacks user or assistant"),
        (PAIR + "as: text\n", "cannot be written as text"),
        (PAIR + "as: conversation\n", "as is 'conversation': did you mean conversations?"),
        (PAIR + "turns: {role: from}\n", "turns belongs to conversations"),
        (PAIR + "where: {l: {lik: x}}\n", "'lik' is no condition: did you mean like?"),
        (PAIR + "where: {l: {in: x}}\n", "in cannot be 'x': it takes a list"),
        (PAIR + "where: {l: {min: true}}\n", "min cannot be True"),
        (PAIR + "where: [l]\n", "where is ['l']"),
        (PAIR + "where: {l: {}}\n", "where l says nothing"),
        (PAIR + "sample: 0\n", "sample is 0"),
        (PAIR + "sample: many\n", "sample is 'many'"),
        (PAIR + "sample: true\n", "sample is True"),
        (PAIR + "seed: 3\n", "it has a seed and no sample"),
        (PAIR + "dedup: all\n", "dedup is 'all'"),
        (PAIR + "keep: conversations\n", "keep names conversations"),
        (PAIR + "quotes: true\n", "quotes is for local tables"),
        ("source: a b\nuser: q\nassistant: a\n", "is not a valid name on the Hub"),
        ("source: [a/b, c/d]\nuser: q\nassistant: a\n", "source names a/b and c/d"),
        ("source: x.csv\nsplits: train\nuser: q\nassistant: a\n", "splits has no meaning for x.csv"),
        ("source: ./x\nrevision: main\nuser: q\nassistant: a\n", "revision has no meaning for ./x"),
        ('source: a/b\nuser: "{q"\nassistant: a\n', "has a { without a partner"),
        ('source: a/b\nuser: "{{q}}"\nassistant: a\n', "names no field"),
        ('source: a/b\nuser: "\\ud800 {q}"\nassistant: a\n', "half of a surrogate pair"),
        ("source: a/b\nconversations: c\nroles: {gpt: 'a|b'}\n", "which is no role"),
        ("source: a/b\nconversations: c\nturns: {rle: from}\n", "turns names 'rle': did you mean role?"),
        ("source: [\n", "is no recipe"),
        ("source: a/b\n\tuser: q\n", "is no recipe"),
        ("- 1\n", "it holds"),
        ("", "it holds None and no keys"),
        ("? [a, b]\n: c\n", "is no recipe"),
        ("a: *b\n", "is no recipe"),
        ("--- 1\n--- 2\n", "is no recipe"),
        ("[" * 5000, "is no recipe"),
        ("source: a/b\nuser: !!binary aGk=\nassistant: a\n", "user is a bytes"),
        ("x: !!python/object/apply:os.system [exit]\n", "python/object/apply"),
        ("x: !!python/name:os.system\n", "python/name"),
        ("\0", "is no recipe"),
    ],
)
def test_what_has_no_meaning_is_refused(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read(text)


def test_hostile_files_are_refused():
    bomb = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}, *a]\n" for i in range(60))
    for content in (b"\xff\xfe\x00", b"x" * (LARGEST + 1), bomb.encode(), b"a: &a {b: *a}\n"):
        with pytest.raises(UsageError) as caught:
            parse(content, "r", "r.yml")
        assert len(str(caught.value)) < 400


def test_every_key_is_read():
    from train.data.fetch.recipe_yaml import _READERS

    assert set(_READERS) == set(KEYS)


def test_shipped_recipes_are_sound():
    recipes = {recipe.name: recipe for recipe in shipped()}
    assert set(recipes) == {
        "aya-basque", "magpie-ultra", "magpie-8b", "magpie-8b-filtered", "magpie-70b", "magpie-70b-filtered",
        "latxa-corpus", "codeact", "general", "english-latvian",
    }  # fmt: skip
    for recipe in recipes.values():
        assert recipe.about
        assert "\n" not in recipe.about
        assert load(recipe.name) == recipe


def test_the_nearest_recipe_is_named():
    with pytest.raises(UsageError, match="did you mean aya-basque"):
        load("aya-basqe")


def test_the_command_line_overrides():
    aya = load("aya-basque")
    assert override(aya, splits=["test"], revision="v2").splits == ("test",)
    local = override(aya, source="rows.parquet", revision=None)
    assert (local.local, local.config, local.splits) == (True, (), ())
    assert override(aya, source="./folder").splits == ("train", "test")
    with pytest.raises(UsageError, match="splits has no meaning"):
        override(aya, source="rows.parquet", splits=["train"])


# --- conditions and templates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "value", "passes", "fails"),
    [
        ("is", "eus", ["eus"], ["Eus", "eus ", "", None]),
        ("is", None, [None], ["", 0]),
        ("is", 5, [5, 5.0, "5", " 5 ", "5.0"], [6, "five", "", None]),
        ("is", True, [True], [False, None]),
        ("not", "eus", ["eng", None], ["eus"]),
        ("in", ["a", "b"], ["a", "b"], ["c", None]),
        ("not_in", ["a", "b"], ["c", None], ["a"]),
        ("like", "translation_*", ["translation_1", "translation_"], ["Translation_1", "x translation_1", None]),
        ("not_like", "translation_*", ["x", None, "translationx"], ["translation_7"]),
        ("min", 3, [3, 4.5, "3"], [2, "2.9", "x", None]),
        ("max", 3, [3, -1, "1e0"], [4, "x", None]),
        ("min", "2024-02-01", ["2024-02-01", "2025-01-01", datetime.date(2024, 3, 1)], ["2023-12-31", None]),
    ],
)
def test_conditions(test, value, passes, fails):
    assert all(Condition("f", test, value).holds({"f": cell}) for cell in passes)
    assert not any(Condition("f", test, value).holds({"f": cell}) for cell in fails)


def test_every_condition_is_tested():
    marks = [mark for mark in test_conditions.pytestmark if mark.name == "parametrize"]
    assert {case[0] for case in marks[0].args[1]} == set(TESTS)


@pytest.mark.parametrize(("cell", "value"), [("true", True), (True, "true"), (1, "1"), (True, 1), ([1], 1)])
def test_a_comparison_that_can_never_hold_is_an_error(cell, value):
    with pytest.raises(UsageError, match=r"where f: it holds .* can never be compared"):
        Condition("f", "is", value).holds({"f": cell})


def test_templates():
    assert template("a b").fill({"a b": "x"}) == "x"
    assert template("{prompt}{input}").fill({"prompt": "p", "input": ""}) == "p"
    assert template("say {{hi}} to {a.b[0]!r:>5}!").fill({"a.b[0]!r:>5": "{x}"}) == "say {hi} to {x}!"
    assert template("a}} {b}").fill({"b": "x"}) == "a} x"
    with pytest.raises(UsageError, match="without a partner"):
        template("a}")
    for record, reason in (
        ({}, "field"), ({"a": None}, "field"), ({"a": 5}, "type"), ({"a": ["x"]}, "type"), ({"a": " \n"}, "empty turn"),
    ):  # fmt: skip
        with pytest.raises(Malformed) as caught:
            template("Translate: {a}").fill(record)
        assert caught.value.reason == reason
