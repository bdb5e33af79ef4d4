"""A family file: each of ours written as one is itself again; what is wrong is said by field, line and character."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import UsageError
from formats.families import FAMILIES, known
from formats.families.family import Family
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.huggingface.family_file import load
from formats.huggingface.settings_table import USUAL
from formats.megatron.args.args import from_megatron, to_megatron
from tests.models import settings_of
from tests.roundtrip.test_own_family import example

OUTPUT = "output: hidden (group head dim)"
"""A pattern of the example, in line 3 of its table."""


APART = ("table", "file", "neox", "native", "scalings", "elsewhere")
"""What a family has beside the fields of a file."""


def dump(family: Family) -> str:
    """A family as TOML; JSON's texts, numbers and lists are TOML's too."""
    values = {field.name: getattr(family, field.name) for field in fields(Family) if field.name not in APART}
    values = {name: "none" if name == "rope_theta" and value is None else value for name, value in values.items()}
    lines = [f"table = '''{family.table}'''"]
    lines += [
        f"{name} = {json.dumps(value)}"
        for name, value in values.items()
        if not isinstance(value, dict) and value is not None
    ]
    for name, inner in values.items():
        if isinstance(inner, dict):
            pairs = ((key, "none" if value is None else value) for key, value in inner.items())
            lines += [f"[{name}]", *(f"{json.dumps(key)} = {written(value)}" for key, value in pairs)]
    return "\n".join(lines)


def written(value: object) -> str:
    """A value of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=5)
@given(
    changes=st.fixed_dictionaries({
        "drops": st.lists(st.sampled_from([r"h\.\d+\.bias", "rotary.*", 'quoted "\\\\']), max_size=2).map(tuple),
        "head_dim": st.none() | st.integers(1, 512),
        "mha": st.booleans(),
        "window_default": st.none() | st.integers(1, 8192),
    }),
)  # fmt: skip
def test_each_of_ours_is_itself_again(name, changes):
    own = replace(FAMILIES[name], name="own", **changes)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "own.toml"
        path.write_text(dump(own))
        again = load(path)
    assert again == replace(own, table=again.table, neox="", native={}, scalings=(), elsewhere="")
    assert again.tensors == own.tensors
    assert again.file == path


def test_what_megatron_has_to_be_told_is_in_own(tmp_path):
    text = dump(replace(FAMILIES["gpt_oss"], name="own", own={}))
    assert "its own lacks layer_types, swiglu_alpha, swiglu_limit" in str(refused(tmp_path, text))


def refused(tmp_path: Path, text: str) -> UsageError:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load(path)
    assert str(raised.value).startswith(str(path))
    assert len(str(raised.value)) < 600
    return raised.value


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("key: half pair", "key: pair half", "query in the order `half pair`, key in `pair half`"),
        (OUTPUT, "output: hidden (head group dim)", "in the order `group head`, output in `head group`"),
        ('name = "internlm2" ', "# ", "does not say name"),
        ('name = "internlm2"', 'name = "llama"', "name = 'llama' is taken"),
        ('name = "internlm2"', 'name = "../x"', "is no name"),
        ("mha = true", 'mha = "yes"', "mha = 'yes' is of the wrong kind"),
        ("mha = true", "mha = 1", "mha = 1 is of the wrong kind"),
        ("mha = true", "ffn_ratio = true", "ffn_ratio = True is of the wrong kind"),
        ("mha = true", "tokens = {pad_token_id = true}", "tokens.pad_token_id = True is no id of a token"),
        ("mha = true", "heads = 8", "a family has no 'heads'"),
        ("mha = true", "drops = ['(']", "no regular expression"),
        ("mha = true", "nulls = [1]", "no config key"),
        ("rope_theta = 1000000.0", 'rope_theta = "many"', "rope_theta = 'many'"),
        ("rope_theta = 1000000.0", "rope_theta = -1", "rope_theta = -1"),
        ("rope_theta = 1000000.0", 'rope_theta = "none"', "nothing rotates"),
        ("bias = false", "bias = 1979-05-27", "requires.bias is a date"),
        ("bias = false", "bias = { x = 1 }", "requires.bias is a dict"),
        ('hidden_act = "silu"', 'hidden_act = "gelu"', "requires does not say that its activation is silu"),
        ("[requires]", '[keys]\nwidth = "d"\n[requires]', "keys names no setting with 'width'"),
        ("[requires]", '[keys]\nlayers = ""\n[requires]', "keys.layers = '' is no key"),
        ("[requires]", '[keys]\nrotary_fraction = "part"\n[requires]', "defaults has none"),
        ("[requires]", '[keys]\nactivation = "act"\n[requires]', "leaves its activation open"),
        ("[requires]", '[copied]\nwidth = "rope_dim"\n[requires]', "copied.width = 'rope_dim' is no setting"),
        ("[requires]", "[copied]\nwidth = [8]\n[requires]", "copied.width = [8] is no setting"),
        ("[requires]", "[defaults]\nwidth = 8\n[requires]", "defaults names no setting"),
        ("[requires]", "[own]\nscale = 8\n[requires]", "no other format has the keys in own"),
        ("[requires]", "[requires", "is not valid TOML"),
        ("output: hidden (group", "output: hidden (grupp", "line 3 of its table: the model has no size"),
        ("output: hidden", "outputs: hidden", "line 3 of its table names a tensor that there is not"),
        (OUTPUT, "output: hidden (group head", "line 3 of its table: expected ')', found 'the end'"),
        (OUTPUT, "output: hidden (group head", "in pattern at character 27"),
        (OUTPUT, "output: hidden (group head)", "output has the axes hidden, group, head, dim, each once"),
        (OUTPUT, "output: hidden (group head dim dim)", "each once"),
        (OUTPUT, "hidden (output: group head dim | output: group head dim)", "each once"),
        (OUTPUT, "hidden (output: group head dim | ffn)", "belongs to no tensor"),
        (OUTPUT, "output: hidden (group head dim)/tp", "neither ranks (/) nor padding (~)"),
        (OUTPUT, "hidden (output: group head dim | ~padding)", "neither ranks"),
        (OUTPUT, "output: hidden (group head dim)    last", "there is no condition 'last'"),
        (OUTPUT, "output: hidden (group head dim)    serial", "need the key parallel_residual"),
        (OUTPUT, f"{OUTPUT}    recurrent", "without the key recurrent_layers no line can be recurrent"),
        (OUTPUT, f"{OUTPUT}    state", "without the key state_layers no line can be state"),
        (OUTPUT, f"{OUTPUT}    attention", "without one of the keys recurrent_layers, state_layers, short_layers"),
        (OUTPUT, "", "line 3 of its table is no key and pattern"),
        ("{layer}.attention.wo", "0.attention.wo", "output is a tensor of each layer"),
        ("model.norm", "model.{layer}.norm", "final_norm is a tensor of the model"),
        ("{layer}.attention.wo", "{layer}.{number}.wo", "has braces around something else"),
        ("{layer}.attention.wo", "{layer}." + "{a|b}" * 30, "has too many spellings"),
        ("feed_forward.w3", "feed_forward.w1", "the key model.layers.{layer}.feed_forward.w1.weight twice"),
        ("up: ffn hidden", "gate: ffn hidden", "its table has gate twice"),
        ("embedding: vocab hidden", "embedding: vocab hidden    untied", "its table has no embedding"),
        ("up: ffn hidden", "up: ffn hidden    optional", "its table has no up, or an optional one alone"),
        ("input_norm: hidden", "down_norm: hidden", "no family that Megatron has is made of these tensors"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_by_name(tmp_path, old, new, reason):
    text = example()
    assert old in text
    assert reason in str(refused(tmp_path, text.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\n" * 100_000, "too many for a family"),
        ("x = " + "[" * 5000 + "]" * 5000, "is not valid TOML"),
        ("[" + "x." * 5000 + "x]", "a family has no|does not say name|is not valid TOML"),
        ("\x00", "is not valid TOML"),
        ("", "does not say name"),
    ],
    ids=["huge", "deep", "dotted", "zero", "empty"],
)
def test_a_hostile_file_is_refused(tmp_path, text, reason):
    assert any(message in str(refused(tmp_path, text)) for message in reason.split("|"))


@pytest.mark.parametrize(
    "pattern",
    ["(" * 40_000 + "output: hidden" + ")" * 40_000, "output: " + "(hidden | hidden)" * 40],
    ids=["deep", "wide"],
)
def test_a_hostile_pattern_is_refused(tmp_path, pattern):
    assert "no pattern is so long" in str(refused(tmp_path, example().replace(OUTPUT, pattern)))


def test_the_longest_pattern_that_is_read_is_read_at_once(tmp_path):
    for pattern in ("(" * 140 + "output: hidden" + ")" * 140, "output: " + "(hidden | hidden)" * 8):
        assert "each once" in str(refused(tmp_path, example().replace(OUTPUT, pattern)))


def test_a_file_that_is_none_is_refused(tmp_path):
    for path, content in ((tmp_path / "none.toml", None), (tmp_path, None), (tmp_path / "latin.toml", b"x = '\xe9'")):
        if content:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=str(path)):
            load(path)


def test_a_family_that_megatron_lacks_says_why(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('only_here = "its norms are elsewhere"\n' + example().replace("input_norm:", "down_norm:"))
    assert load(path).only_here == "its norms are elsewhere"


@pytest.mark.parametrize(
    ("more", "own", "other"),
    [
        ("tie_word_embeddings = false", "llama", "llama-tied"),
        ("num_attention_heads = 8", "llama", "llama-16"),
        ('rope_scaling = "none"', "llama", "llama3"),
        ('[keys]\nkv_heads = ""', "llama-mha", "llama"),
    ],
)
def test_a_checkpoint_of_which_a_family_fixes_a_setting_otherwise_is_of_another(tmp_path, more, own, other):
    """Megatron's args name none: they are those of the user's own family where these can be a model of it."""
    path = tmp_path / "own.toml"
    path.write_text(f"{example()}\n{more}\n")
    with known(load(path)):
        for name, family in ((own, "internlm2"), (other, "llama")):
            changes = {"num_attention_heads": 16} if name.endswith("16") else {}
            config = settings_of(name.removesuffix("-16"), rms_norm_eps=1e-6, **changes)
            args = to_megatron(from_huggingface(config, {}, "config.json"))
            assert from_megatron(args, {}, None, "args").family == family


def test_every_setting_may_have_a_key_of_its_own(tmp_path):
    """Whatever transformers calls it: a config in which nothing has its usual name."""
    keys = {name: f"my_{name}" for name in USUAL} | {"rope_theta": "my_rope_theta"}
    path = tmp_path / "own.toml"
    path.write_text(example() + "\n[keys]\n" + "\n".join(f'{name} = "{key}"' for name, key in keys.items()))
    family = load(path)
    values = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 96, "vocab": 100,
              "max_positions": 77, "norm_epsilon": 1e-4, "tied": True, "rope_theta": 5e5}  # fmt: skip
    config = {keys[name]: value for name, value in values.items()} | {"model_type": family.name}
    with known(family):
        spec = from_huggingface(config, {}, "config.json")
        assert {name: getattr(spec, name) for name in values} == values
        assert to_huggingface(spec, config) == config
        assert from_huggingface(to_huggingface(spec, {}), {}, "config.json") == spec


def test_whose_default_a_note_names(tmp_path):
    """Of a user's family it is that of the file, whatever the class of transformers assumes."""
    path = tmp_path / "own.toml"
    path.write_text(f'window = "sliding_window"\nwindow_default = 8\n{example()}\n[defaults]\nnorm_epsilon = 0.1\n')
    config = settings_of("llama", model_type="internlm2")
    with known(load(path)):
        notes = from_huggingface(config, {}, "config.json").notes
    for said in ("rms_norm_eps = 0.1", "sliding_window = 8"):
        assert f"{said} (not in config.json: the default of the family in {path})" in notes
    notes = from_huggingface(config | {"model_type": "mistral", "rms_norm_eps": 0.1}, {}, "config.json").notes
    assert "sliding_window = 4096 (not in config.json: the default of transformers for mistral)" in notes
