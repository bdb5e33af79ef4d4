"""What is wrong with a folder before it is published: each sentence has a folder that earns it, and only it."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from converters.assets.chat_template import TEMPLATES, apply_template, load_template
from converters.assets.files import files
from converters.hub.preflight import findings
from formats.errors import RefusedError
from tests.chat import worlds

NO_BLOCKS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def problems(folder, rows, need_template=False):
    return [finding.sentence for finding in findings(dict(files(folder)), rows, need_template)]


def sound(path, **changes):
    """A folder with the template chatml in which everything fits."""
    tokenizer = worlds.tokenizer(*worlds.NEEDED["chatml"])
    end = tokenizer.token_to_id("<|im_end|>")
    generation = {"eos_token_id": [1, end]} | changes.pop("generation", {})
    folder = worlds.folder(path, tokenizer, generation=generation, **changes)
    (folder / "chat_template.jinja").write_text(load_template("chatml"))
    return folder, worlds.length(tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("style", [4, 5])
def test_nothing_is_wrong_after_a_template_was_applied(tmp_path, name, style):
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(), style)
    applied = apply_template(dict(files(folder)), load_template(name), 999)
    for file, text in applied.texts.items():
        (folder / file).write_bytes(text)
    assert problems(folder, applied.rows_needed, need_template=True) == []
    assert problems(folder, applied.length, need_template=True) == []
    assert problems(folder, None, need_template=True) == []
    too_few = problems(folder, applied.length - 1, need_template=True)
    entries = f"the tokenizer has {applied.length} entries, the embedding {applied.length - 1} rows"
    assert too_few[0].startswith(f"{entries}: no text may have ")


def test_a_special_token_after_the_last_row_that_nothing_writes(tmp_path):
    """As Gemma 3's text models have one. It blocks where the template writes it, and as an ordinary token."""
    tokenizer = worlds.tokenizer(*worlds.NEEDED["chatml"], "<image>")
    rows = worlds.length(tokenizer) - 1
    folder = worlds.folder(tmp_path / "model", tokenizer, rows=rows)
    applied = apply_template(dict(files(folder)), load_template("chatml"), rows)
    assert (applied.added, applied.rows_needed) == ((), rows)
    for file, text in applied.texts.items():
        (folder / file).write_bytes(text)
    (finding,) = findings(dict(files(folder)), rows, need_template=True)
    entries = f"the tokenizer has {rows + 1} entries, the embedding {rows} rows"
    assert finding == (f"{entries}: no text may have <image> in it", False)
    template = load_template("chatml")
    (folder / "chat_template.jinja").write_text(template + "{# <image> #}")
    assert problems(folder, rows, need_template=True)[0] == f"{entries}: no text may have <image> in it"
    with pytest.raises(RefusedError, match="not of one model"):
        apply_template(dict(files(folder)), template + "{{ '<image>' }}", rows)


SETTINGS = {
    "config.json names no architectures": {"config": {"architectures": None}},
    "config.json names the architecture 'FSDPLlamaForCausalLM', a wrapper of the training framework": {
        "config": {"architectures": ["FSDPLlamaForCausalLM"]}
    },
    "the tokenizer has no token '<eos>', which is its eos_token": {"tokenizer_config": {"eos_token": "<eos>"}},
    "the tokenizer has no token '<none>', which is its pad_token": {
        "tokenizer_config": {"pad_token": {"content": "<none>", "special": True}}
    },
    "bos_token_id of config.json is 5000, the embedding has 400 rows": {"config": {"bos_token_id": 5000}},
    "pad_token_id of generation_config.json is -7, the embedding has 400 rows": {"generation": {"pad_token_id": -7}},
    "eos_token_id of config.json is 399, an id that the tokenizer does not have": {"config": {"eos_token_id": [399]}},
    "eos_token_id of config.json is '1', not an id or a list of ids": {"config": {"eos_token_id": "1"}},
    "forced_eos_token_id of generation_config.json is 400, the embedding has 400 rows": {
        "generation": {"forced_eos_token_id": [1, 400]}
    },
    "forced_bos_token_id of config.json is 400, the embedding has 400 rows": {"config": {"forced_bos_token_id": 400}},
    "decoder_start_token_id of generation_config.json is 399, an id that the tokenizer does not have": {
        "generation": {"decoder_start_token_id": 399}
    },
}  # fmt: skip


@pytest.mark.parametrize("sentence", SETTINGS)
def test_settings(tmp_path, sentence):
    folder, _ = sound(tmp_path / "model", **SETTINGS[sentence])
    assert problems(folder, 400, need_template=True) == [sentence]
    assert [finding.blocks for finding in findings(dict(files(folder)), 400)] == [True]


def test_ids_that_are_fine(tmp_path):
    ignored = {"suppress_tokens": [5000], "begin_suppress_tokens": [-1]}
    folder, length = sound(tmp_path / "model", config={"pad_token_id": -1, "eos_token_id": [0, 1]}, generation=ignored)
    assert problems(folder, length) == []


@pytest.mark.parametrize("decoder", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("eos", ["<pad>", {"content": "<pad>", "lstrip": False}], ids=["text", "object"])
def test_the_file_that_says_which_token_ends_a_text(tmp_path, decoder, eos):
    """special_tokens_map.json, unless tokenizer_config.json lists the added tokens: as transformers reads them."""
    from transformers import AutoTokenizer

    style, bare = 4 if decoder else 5, {"chat_template": None}
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(), style, tokenizer_config=bare)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    assert AutoTokenizer.from_pretrained(folder).eos_token == ("</s>" if decoder else "<pad>")
    assert problems(folder, 400) == ([] if decoder else ["generation stops at [1], the tokenizer's <pad> has id 2"])
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert problems(folder, 400) == (["generation stops at [2], the tokenizer's </s> has id 1"] if decoder else [])


@pytest.mark.parametrize("style", [4, 5])
def test_special_tokens_that_are_plain_text(tmp_path, style):
    """A template is then no dialogue; without one nothing has to be a token."""
    built = worlds.tokenizer(*worlds.NEEDED["chatml"])
    split = {"split_special_tokens": True, "chat_template": None}
    generation = {"eos_token_id": [1, built.token_to_id("<|im_end|>")]}
    folder = worlds.folder(tmp_path / "model", built, style, tokenizer_config=split, generation=generation)
    assert problems(folder, 400) == []
    (folder / "chat_template.jinja").write_text(load_template("chatml"))
    sentence = (
        "tokenizer_config.json says split_special_tokens: transformers encodes <|im_end|>, which ends a reply, as "
    )
    for need in (True, False):
        assert findings(dict(files(folder)), 400, need) == [(sentence + "plain text", need)]


def test_a_token_that_tokenizer_config_json_hides_beside_letters(tmp_path):
    folder, rows = sound(tmp_path / "model")
    hidden = worlds.vars_of(AddedToken("<|im_end|>", special=True, single_word=True))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"added_tokens_decoder": {str(rows - 1): hidden}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert problems(folder, rows) == ["<|im_end|>, which ends a reply, is not a single special token of the tokenizer"]


@pytest.mark.parametrize(("file", "said"), worlds.OUTSIDE)
def test_tokens_of_other_files_after_the_last_row(tmp_path, file, said):
    """They have the ids that transformers gives them; a special one that nothing writes needs no row."""
    from transformers import AutoTokenizer

    rows = worlds.length(worlds.tokenizer())
    folder = worlds.naming(tmp_path / "model", file, said)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.convert_tokens_to_ids("<new>") == rows
    special = loaded.added_tokens_decoder[rows].special
    sentence = f"the tokenizer has {rows + 1} entries, the embedding {rows} rows: no text may have <new> in it"
    assert findings(dict(files(folder)), rows) == [(sentence, not special)]
    assert findings(dict(files(folder)), rows + 1) == []
    (folder / "chat_template.jinja").write_text(load_template("chatml").replace("<|im_end|>", "<new>"))
    assert (sentence, True) in findings(dict(files(folder)), rows)


def test_no_tokenizer(tmp_path):
    folder, length = sound(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    assert problems(folder, length) == ["there is no tokenizer: no tokenizer.json"]
    (folder / "tokenizer.model").write_bytes(b"raw")
    assert problems(folder, length) == [
        "tokenizer.model has no tokenizer.json beside it, so that its tokens cannot be checked"
    ]
    assert not findings(dict(files(folder)), length)[0].blocks
    assert findings(dict(files(folder)), length, need_template=True)[0].blocks
    (folder / "tokenizer.json").write_text("{}")
    assert problems(folder, length)[0] == "tokenizer.json is no tokenizer: it has no model"


def test_no_config(tmp_path):
    folder, length = sound(tmp_path / "model")
    (folder / "config.json").unlink()
    assert problems(folder, length, need_template=True) == ["there is no config.json"]
    (folder / "config.json").write_text("{")
    assert problems(folder, length) == ["config.json is not valid JSON: Expecting value: line 1 column 2 (char 1)"]


def test_no_eos(tmp_path):
    changes = {"generation": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}}
    folder, length = sound(tmp_path / "model", **changes)
    (folder / "chat_template.jinja").unlink()
    assert problems(folder, length) == [
        "nothing says where a text ends: generation_config.json and tokenizer_config.json name no eos"
    ]


TEMPLATE = {
    "the chat template does not render: TemplateSyntaxError": ("{% for %}", {}),
    "the chat template leaves out a reply": ("{{ messages[0].content }}", {}),
    "the chat template ends a reply with no special token": ("{% for m in messages %}{{ m.content }} {% endfor %}", {}),
    "<|im_end|>, which ends a reply, has id": (None, {"generation": {"eos_token_id": 1}}),
    "<|end|>, which ends a reply, is not a single special token": (
        load_template("chatml").replace("im_end", "end"), {}
    ),
    "the chat template uses eos_token, and tokenizer_config.json names none": (
        load_template("chatml") + "{{ eos_token }}", {"tokenizer_config": {"eos_token": None}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", TEMPLATE)
def test_templates(tmp_path, sentence):
    """They stop a model that is to be served with its template, and are worth a note otherwise."""
    template, changes = TEMPLATE[sentence]
    folder, length = sound(tmp_path / "model", **changes)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    for needed in (True, False):
        every = findings(dict(files(folder)), length, needed)
        faults = [finding for finding in every if finding.sentence.startswith(sentence)]
        assert [finding.blocks for finding in faults] == [needed]


def test_a_template_that_only_training_suffers_from(tmp_path):
    folder, length = sound(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(NO_BLOCKS)
    faults = findings(dict(files(folder)), length, need_template=True)
    assert [(finding.sentence.partition(",")[0], finding.blocks) for finding in faults] == [
        ("the chat template has no {% generation %} block", False)
    ]


def test_no_template(tmp_path):
    folder, length = sound(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert problems(folder, length) == []
    assert problems(folder, length, need_template=True) == ["there is no chat template"]


def test_templates_lie_in_several_places(tmp_path):
    """The file outranks the tokenizer config, which may hold one or several."""
    folder, length = sound(tmp_path / "model", tokenizer_config={"chat_template": "{% for %}"})
    assert problems(folder, length, need_template=True) == []
    (folder / "chat_template.jinja").unlink()
    assert "TemplateSyntaxError" in problems(folder, length, need_template=True)[0]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for default, expected in ((load_template("chatml"), []), ("{% for %}", ["the chat template does not render"])):
        named = [{"name": "tool_use", "template": "{% if %}"}, {"name": "default", "template": default}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
        assert [problem.partition(":")[0] for problem in problems(folder, length, need_template=True)] == expected


@pytest.mark.parametrize("flags", [{"special": False}, {"special": True, "single_word": True}])
def test_a_terminator_that_is_no_special_token(tmp_path, flags):
    """Or one that a text does not show when a letter stands before it."""
    tokenizer = worlds.tokenizer("<|im_start|>", AddedToken("<|im_end|>", **flags))
    end = tokenizer.token_to_id("<|im_end|>")
    folder = worlds.folder(tmp_path / "model", tokenizer, generation={"eos_token_id": [1, end]})
    (folder / "chat_template.jinja").write_text(load_template("chatml"))
    assert problems(folder, 999, need_template=True) == [
        "<|im_end|>, which ends a reply, is not a single special token of the tokenizer"
    ]
