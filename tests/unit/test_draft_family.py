"""A family drafted from transformers: how many lines are right of eleven that have tables, and what `check` sees."""

from __future__ import annotations

import re
from math import inf

import pytest

from converters.draft import computed
from converters.draft.computed import Rotation, rotation, single_threaded, tiny_model, without_warnings
from converters.draft.probes import model_of
from converters.draft.tables import PART_BY_NEIGHBOURS, drafted
from converters.draft.toml import _pairs, draft
from formats.errors import UnsupportedError
from formats.families import FAMILIES
from formats.huggingface.family_file import tomllib

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
    assert (made.faults, made.unread) == ("", "")
    assert {row.doubt for row in made.doubtful} == ({PART_BY_NEIGHBOURS} if name == "glm4" else set())


@pytest.mark.parametrize("name", ["gpt2", "falcon", "llama"])
def test_the_class_of_linear_layers(name):
    assert model_of(name).linear == FAMILIES[name].linear


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A family without a table, drafted."""
    with single_threaded(), without_warnings():
        model = model_of("glm")
        made = draft(model, drafted(model))
    path = tmp_path_factory.mktemp("draft") / "glm.toml"
    path.write_text(made.text)
    return path


def test_an_order_in_heads_that_no_pattern_has_is_marked_in_every_line_that_claims_one(glm):
    lines = glm.read_text().splitlines()
    assert f'only_here = "{PART_BY_NEIGHBOURS}"' in lines
    claimed = {line.split()[0] for line in lines if "half pair" in line}
    assert len(claimed) == 4
    assert {f"# ? {key}: {PART_BY_NEIGHBOURS}" for key in claimed} <= {*lines}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm", Rotation(neighbours=True, part=True)), ("gpt_neox", Rotation(neighbours=False, part=True)),
        ("cohere", Rotation(neighbours=True, part=False)), ("llama", Rotation(neighbours=False, part=False)),
        ("phi", None),
    ],
)  # fmt: skip
def test_which_elements_of_a_head_rotate(name, expected):
    with single_threaded(), without_warnings():
        assert rotation(tiny_model(model_of(name))) == expected


def test_a_head_that_a_config_rotates_as_a_whole_is_still_one_of_which_a_part_may_rotate():
    with single_threaded(), without_warnings():
        model = tiny_model(model_of("glm"), rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0})
        assert rotation(model) == Rotation(neighbours=True, part=True)


def test_megatron_is_refused_until_somebody_has_compared_logits():
    with single_threaded(), without_warnings():
        model = model_of("llama")
        made = draft(model, drafted(model))
    assert 'only_here = "nobody has compared its logits' in made.text


@pytest.mark.parametrize(
    ("name", "code", "reason", "way"),
    [
        ("olmo", 3, "the config of a tiny OlmoForCausalLM does not say norm_epsilon", "under [defaults]"),
        ("vaultgemma", 4, "the config of a tiny VaultGemmaForCausalLM: layers of type 'sliding_attention'", "by hand"),
    ],
)
def test_what_a_family_cannot_say_of_its_own_model_is_marked_and_said_first(convert, tmp_path, name, code, reason, way):
    path = tmp_path / f"{name}.toml"
    ran = convert("family", name, path)
    assert ran.code == 0, ran.err
    assert f"1 to review\n  {reason}" in ran.out
    assert f"# ? {reason}" in path.read_text()
    ran = convert("family", "check", path, name)
    assert ran.code == code
    assert ran.err.startswith(f"error: {reason}")
    assert way in ran.err
    assert "--set" not in ran.err


def test_lines_for_which_a_draft_does_not_load_are_marked(convert, tmp_path):
    """The norms after attention and MLP of openai-gpt both look like that before the MLP."""
    path = tmp_path / "openai-gpt.toml"
    ran = convert("family", "openai-gpt", path)
    assert ran.code == 0, ran.err
    reason = "its table has post_norm twice"
    assert f"it does not load yet: {reason}" in ran.out
    lines = path.read_text().splitlines()
    table = lines[lines.index("table = '''") + 1 : lines.index("'''")]
    named = {line.split()[0] for line in table if " post_norm: " in line}
    assert len(named) == 2
    assert {line[4:].partition(": ")[0] for line in lines if line.startswith("# ? ") and reason in line} == named
    assert all(f"  {key}: {reason}" in ran.out for key in named)
    ran = convert("family", "check", path, "openai-gpt")
    assert (ran.code, reason in ran.err) == (2, True)


def test_what_the_hint_says_helps(convert, tmp_path):
    path = tmp_path / "olmo.toml"
    assert convert("family", "olmo", path).code == 0
    path.write_text(path.read_text().replace("[defaults]", "[defaults]\nnorm_epsilon = 1e-05"))
    ran = convert("family", "check", path, "olmo")
    assert ran.code == 0, ran.err


def test_a_draft_of_a_model_with_a_table_is_not_needed(convert, tmp_path):
    path = tmp_path / "exaone4.toml"
    assert convert("family", "exaone4", path).code == 0
    ran = convert("family", "check", path, "exaone4")
    assert ran.code == 2
    assert f"exaone4 has a table, which every command takes: no command needs {path}" in ran.err


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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "MambaConfig has no known config key for heads, which a draft needs"),
        ("jetmoe", "JetMoeConfig has no known config key for heads, which a draft needs"),
        ("lfm2_moe", "no tiny Lfm2MoeForCausalLM, in which every size is another number: TypeError"),
        ("gpt_neo", "no tiny GPTNeoForCausalLM, in which every size is another number: StrictDataclass"),
        ("diffllama", "ValueError: DiffLlama requires `num_key_value_heads` to be even"),
        ("gemma4_text", "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute"),
        ("dots3_note_text", "AmbiguousGlobalPerLayerAttributeError: 'num_attention_heads' is a per-layer attribute"),
        ("gemma4_assistant", "ValueError: hidden_size_per_layer_input must be 0"),
    ],
)
def test_a_class_that_cannot_be_built_with_such_sizes_is_refused(name, reason):
    with single_threaded(), without_warnings(), pytest.raises(UnsupportedError, match=re.escape(reason)) as refused:
        drafted(model_of(name))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("bloom", {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}),
        ("megatron-bert", {"ln": "post_norm"}),
        ("xlm-roberta-xl", {"LayerNorm": "post_norm"}),
    ],
)
def test_a_block_that_adds_the_residual_itself(name, norms):
    """What it gives is the residual, and a norm of that is none of the block's output."""
    with single_threaded(), without_warnings():
        rows = drafted(model_of(name)).rows
    patterns = {row.key.rpartition("{layer}.")[2]: row.pattern for row in rows if "{layer}" in row.key}
    for norm, tensor in norms.items():
        assert patterns[f"{norm}.weight"] == f"{tensor}: hidden"
        assert patterns[f"{norm}.bias"] == f"{tensor}_bias: hidden"


def test_a_bias_that_no_table_knows_is_not_guessed(monkeypatch):
    monkeypatch.setattr(computed, "norms", lambda _: {"transformer.h.{layer}.input_layernorm": "down_norm"})
    with single_threaded(), without_warnings():
        rows = {row.key.rpartition(".h.{layer}.")[2]: row for row in drafted(model_of("bloom")).rows}
    assert rows["input_layernorm.weight"].pattern == "down_norm: hidden"
    assert rows["input_layernorm.bias"].doubt.startswith("not guessed: [hidden")


@pytest.mark.parametrize(("name", "other"), [("minimax", "self_attn.out_proj"), ("lfm3", "conv.out_proj")])
def test_layers_of_several_kinds_are_refused(convert, tmp_path, name, other):
    ran = convert("family", name, tmp_path / "draft.toml")
    assert (ran.code, "of several kinds: output is model.layers.{layer}." in ran.err) == (4, True)
    assert f"{other}.weight in" in ran.err
    assert "by hand" in ran.err
    assert not (tmp_path / "draft.toml").exists()


def test_what_transformers_does_not_know_is_refused(convert):
    assert convert("family", "nope").code == 4
    assert convert("family", "no/folder").code == 2


def test_values_of_a_draft_are_those_of_toml():
    values = {"limit": (0.0, inf), "epsilon": 1e-06, "on": True, "type": 'a\n"b"', "sizes": [8, 16], "absent": None}
    assert tomllib.loads("\n".join(_pairs(values))) == {**values, "limit": [0.0, inf], "absent": "none"}
