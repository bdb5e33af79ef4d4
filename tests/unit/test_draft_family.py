"""A family drafted from transformers: how many lines are right of eleven that have tables, and what `check` sees."""

from __future__ import annotations

import pytest

from converters.draft.computed import single_threaded, without_warnings
from converters.draft.probes import model_of
from converters.draft.tables import drafted
from converters.draft.toml import draft
from formats.families import FAMILIES

RIGHT = {
    "llama": (20, 20), "qwen3": (19, 19), "mixtral": (17, 17), "olmo2": (15, 15), "glm4": (17, 17), "phi3": (10, 10),
    "starcoder2": (15, 21), "gpt_neox": (17, 19), "deepseek_v3": (27, 27), "granite": (13, 13),
    "helium": (19, 19),
}  # fmt: skip
"""Family: lines that are those of its table to the last condition, and the lines of its table, further tokens apart.
The eight others are biases that the table wants, and the draft leaves to the key of the config that turns them on."""


@pytest.mark.parametrize("name", RIGHT)
def test_so_many_lines_are_those_of_the_table(name):
    with single_threaded(), without_warnings():
        model = model_of(name)
        table = drafted(model)
        made = draft(model, table)
    ours = {(row.key, row.pattern, frozenset(row.conditions)) for row in table.rows}
    rules = [rule for rule in FAMILIES[name].tensors if "mtp" not in rule.conditions]
    expected = {(rule.spellings[0], rule.pattern.text, rule.conditions) for rule in rules}
    assert (len(ours & expected), len(expected)) == RIGHT[name], sorted(map(str, expected ^ ours))
    bare = {(key, pattern) for key, pattern, _ in ours}
    assert {(key, pattern) for key, pattern, _ in expected} <= bare, "of the others the conditions alone differ"
    assert (made.faults, made.doubtful) == ("", [])


@pytest.mark.parametrize("name", ["gpt2", "falcon", "llama"])
def test_the_class_of_linear_layers(name):
    assert model_of(name).linear == FAMILIES[name].linear


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A family without a table, drafted."""
    with single_threaded(), without_warnings():
        model = model_of("glm")
        made = draft(model, drafted(model))
    assert 'only_here = "nobody has compared its logits' in made.text, "Megatron is refused until somebody has"
    path = tmp_path_factory.mktemp("draft") / "glm.toml"
    path.write_text(made.text)
    return path


def test_a_family_without_a_table_is_drafted_and_judged(glm, convert):
    ran = convert("family", "check", glm, "glm")
    assert ran.code == 0, ran.err
    assert "equal logits after FSDP on 2 ranks" in ran.out


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("mlp.down_proj", "mlp.down", "has no line for model.layers.{layer}.mlp.down_proj.weight"),
        (
            "down: hidden ffn",
            "down: ffn hidden",
            "down_proj.weight has shape [330, 219], but the configuration implies",
        ),
        ('model_type = "glm"', 'model_type = "glm4_moe"', "describes glm4_moe (GlmForCausalLM), and the model is glm"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(glm, convert, tmp_path, old, new, reason):
    path = tmp_path / "wrong.toml"
    text = glm.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    ran = convert("family", "check", path, "glm")
    assert ran.code in (2, 3)
    assert reason in ran.err


def test_what_cannot_be_guessed_is_marked(convert, tmp_path):
    ran = convert("family", "doge", tmp_path / "doge.toml")
    assert ran.code == 0, ran.err
    assert "model.layers.{layer}.self_attn.A: not guessed: [group] in the tiny model" in ran.out
    assert "# ? model.layers.{layer}.self_attn.A: not guessed" in (tmp_path / "doge.toml").read_text()


def test_a_class_that_computes_nothing_with_such_sizes_is_refused(convert, tmp_path):
    ran = convert("family", "codegen", tmp_path / "codegen.toml")
    assert ran.code == 4
    assert "a tiny CodeGenForCausalLM, in which every size is another number, computes nothing" in ran.err


def test_what_transformers_does_not_know_is_refused(convert):
    assert convert("family", "nope").code == 4
    assert convert("family", "no/folder").code == 2
