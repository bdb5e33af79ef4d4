"""A chat template is applied to a model's small files: transformers and tokenizers read what comes out."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from converters.assets.chat_template import TEMPLATES, apply_template, load_template
from converters.assets.files import files
from converters.assets.json_edit import members, removed, replaced
from converters.assets.token_files import GENERATES
from converters.assets.tokenizer_json import read_vocabulary, with_tokens
from formats.errors import RefusedError, SourceError
from tests.chat import worlds

CHAT = [
    {"role": role, "content": text}
    for role, text in (("user", "How many?"), ("assistant", "5."), ("user", "And?"), ("assistant", "9."))
]


def applied(folder, name, rows=10_000):
    """Apply a template, and put the new files in the folder."""
    result = apply_template(dict(files(folder)), load_template(name), rows)
    for file, text in result.texts.items():
        (folder / file).write_bytes(text)
    for file in result.removed:
        (folder / file).unlink()
    return result


def held(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("known", [False, True], ids=["new tokens", "known tokens"])
def test_transformers_reads_what_comes_out(tmp_path, name, style, known):
    from transformers import AutoTokenizer, GenerationConfig

    needed = worlds.NEEDED[name]
    tokenizer = worlds.tokenizer(*(needed if known else ()))
    before, first = worlds.length(tokenizer), worlds.length(worlds.tokenizer())
    folder = worlds.folder(tmp_path / "model", tokenizer, style)
    result = applied(folder, name)
    assert result.added == (() if known else needed)
    assert result.length == first + len(needed) == before + len(result.added)

    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == result.length
    for number, token in enumerate(needed):
        assert loaded.encode(token, add_special_tokens=False) == [first + number]
        inside = loaded.encode(f"x{token}y {token}", add_special_tokens=False)
        assert inside.count(first + number) == 2
        assert token not in loaded.decode(inside, skip_special_tokens=True)
        assert token in loaded.decode(inside)
    plain = "How many are 2 and 3? Ünï"
    assert loaded.encode(plain, add_special_tokens=False) == tokenizer.encode(plain, add_special_tokens=False).ids
    assert loaded.chat_template == load_template(name)
    out = loaded.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    trained = [token for token, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
    stop = loaded.convert_tokens_to_ids(TEMPLATES[name].terminators[0])
    assert trained.count(stop) == 2
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, stop]
    assert result.terminator == TEMPLATES[name].terminators[0]


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "Qwen2TokenizerFast", "GPT2TokenizerFast"])
def test_tokenizer_classes_of_a_model_read_them_too(tmp_path, kind):
    """transformers 5 builds these anew from the parts of tokenizer.json."""
    from transformers import AutoTokenizer

    tokenizer = worlds.tokenizer()
    changes = {"tokenizer_class": kind, "unk_token": "<pad>"}
    folder = worlds.folder(tmp_path / "model", tokenizer, 4, tokenizer_config=changes)
    result = applied(folder, "chatml")
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = [worlds.length(tokenizer), worlds.length(tokenizer) + 1]
    assert loaded.convert_tokens_to_ids(list(result.added)) == ids
    assert loaded.encode("x<|im_end|>y", add_special_tokens=False).count(ids[1]) == 1


@pytest.mark.parametrize("style", [4, 5])
def test_every_other_byte_stays(tmp_path, style):
    """tokenizer.json gets its entries, tokenizer_config.json loses its template, nothing else moves."""
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(), style)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    result = applied(folder, "chatml")
    after = {path.name: path.read_text() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {"chat_template.jinja"}
    assert after["chat_template.jinja"] == load_template("chatml")
    assert after["config.json"] == before["config.json"]
    lost = [line for line in before["tokenizer.json"].splitlines() if line not in after["tokenizer.json"].splitlines()]
    assert lost == []
    assert after["tokenizer.json"].partition('"normalizer"')[2] == before["tokenizer.json"].partition('"normalizer"')[2]
    assert set(result.texts) == {"chat_template.jinja", "generation_config.json", "tokenizer.json"} | (
        {"tokenizer_config.json"} if style == 4 else set()
    )
    config = held(folder, "tokenizer_config.json")
    assert list(config) == [key for key in json.loads(before["tokenizer_config.json"]) if key != "chat_template"]
    if style == 4:
        decoder = config["added_tokens_decoder"]
        assert {decoder[key]["content"] for key in list(decoder)[-2:]} == set(result.added)
        assert set(decoder[list(decoder)[-1]]) == set(decoder["0"])
    made_again = apply_template(dict(files(folder)), load_template("chatml"), 10_000)
    assert (made_again.texts, made_again.added) == ({}, ())


def test_the_file_is_as_the_library_itself_writes_it(tmp_path):
    tokenizer = worlds.tokenizer()
    folder = worlds.folder(tmp_path / "model", tokenizer)
    applied(folder, "llama3")
    tokenizer.add_special_tokens(list(worlds.NEEDED["llama3"]))
    tokenizer.save(str(tmp_path / "theirs.json"))
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "theirs.json").read_bytes()


def test_a_token_that_is_no_special_one_becomes_one(tmp_path):
    """Added as ordinary token, or only a piece of the model's vocabulary: no new row, one id in a text."""
    from transformers import AutoTokenizer

    plain = AddedToken("<|im_start|>", special=False, normalized=False)
    tokenizer = json.loads(worlds.tokenizer(plain).to_str())
    last = max(tokenizer["model"]["vocab"].values()) + 1
    tokenizer["model"]["vocab"]["<|im_end|>"] = last
    tokenizer["added_tokens"][-1]["id"] = last + 1
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
    assert len(tokenizer.encode("a<|im_end|>").ids) > 2
    folder = worlds.folder(tmp_path / "model", tokenizer, 4)
    result = applied(folder, "chatml", rows=worlds.length(tokenizer))
    assert (result.added, result.length, result.rows_needed) == ((), worlds.length(tokenizer), result.rows)
    assert "<|im_end|>, <|im_start|> become special tokens, which they were not" in result.notes
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.encode("a<|im_end|>", add_special_tokens=False)[-1] == last
    assert loaded.decode([last, last + 1], skip_special_tokens=True) == ""
    assert held(folder, "tokenizer_config.json")["added_tokens_decoder"][str(last + 1)]["special"] is True


def test_rows_that_lack_are_counted_and_padding_is_named(tmp_path):
    tokenizer = worlds.tokenizer()
    count = worlds.length(tokenizer)
    folder = worlds.folder(tmp_path / "model", tokenizer)
    exact = apply_template(dict(files(folder)), load_template("llama3"), count)
    assert (exact.rows_needed, exact.length, exact.rows) == (count + 3, count + 3, count)
    assert f"the embedding has {count} rows and needs {count + 3}" in exact.notes
    padded = apply_template(dict(files(folder)), load_template("llama3"), count + 61)
    assert padded.rows_needed == count + 61
    assert any("train them" in note for note in padded.notes)
    with pytest.raises(RefusedError, match="not of one model"):
        apply_template(dict(files(folder)), load_template("llama3"), count - 1)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 1}, {}, [1, "end"]),
        ({"eos_token_id": [2, 1]}, {}, [2, 1, "end"]),
        ({"eos_token_id": None}, {}, [1, "end"]),
        ({"eos_token_id": [2]}, {}, [2, 1, "end"]),
        (None, {"eos_token_id": [1, 2], "pad_token_id": 2}, [1, 2, "end"]),
        (None, {"eos_token_id": None}, [1, "end"]),
    ],
)
def test_generation_stops_at_all_old_ids_and_the_terminator(tmp_path, generation, config, expected):
    tokenizer = worlds.tokenizer()
    folder = worlds.folder(tmp_path / "model", tokenizer, generation=generation or {}, config=config)
    if generation is None:
        (folder / "generation_config.json").unlink()
    applied(folder, "control")
    end = worlds.length(tokenizer) + 1
    generated = held(folder, "generation_config.json")
    assert generated["eos_token_id"] == [end if token == "end" else token for token in expected]
    assert generated["bos_token_id"] == 0
    assert generated.get("pad_token_id") == config.get("pad_token_id")


@pytest.mark.parametrize("decoder", ["", "text_config"])
def test_generation_is_what_it_was_where_the_config_alone_describes_it(tmp_path, decoder):
    """The judge is transformers: without a generation_config.json it takes these settings from config.json."""
    from transformers import GenerationConfig

    said = {"do_sample": True, "temperature": 0.3, "top_k": 7, "repetition_penalty": 1.3, "max_length": 48}
    said |= {"pad_token_id": 2, "suppress_tokens": [3], "output_hidden_states": True, "use_cache": False}
    changes = {decoder: said | {"top_k": None}, "top_k": 7, "max_length": 9} if decoder else said
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(), config=changes)
    (folder / "generation_config.json").unlink()
    before = GenerationConfig.from_model_config(held(folder, "config.json")).to_dict()
    applied(folder, "chatml")
    after = GenerationConfig.from_pretrained(folder).to_dict()
    ids = ("eos_token_id", "_from_model_config", "transformers_version")
    assert {key: after.get(key) for key in before if key not in ids} == {
        key: value for key, value in before.items() if key not in ids
    }
    assert (after["temperature"], after["max_length"]) == (0.3, 9 if decoder else 48)
    assert GenerationConfig().to_dict().keys() - {"_from_model_config", "transformers_version"} <= GENERATES


def test_users_templates(tmp_path):
    """A file: its terminator and its <|…|> tokens are found by rendering it."""
    theirs = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
    (tmp_path / "mine.jinja").write_text(theirs)
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(AddedToken("<end>", special=False)))
    result = applied(folder, str(tmp_path / "mine.jinja"))
    assert (result.terminator, result.added) == ("<end>", ("<|turn|>",))
    assert result.texts["chat_template.jinja"] == theirs.encode()
    zephyr = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    result = apply_template(dict(files(folder)), zephyr, 999)
    assert (result.terminator, result.added) == ("</s>", ("<|user|>", "<|assistant|>", "<|system|>"))
    with pytest.raises(RefusedError, match="never stop"):
        apply_template(dict(files(folder)), "{% for m in messages %}{{ m.content }}\n{% endfor %}", 999)
    with pytest.raises(SourceError, match="TemplateSyntaxError"):
        apply_template(dict(files(folder)), "{% for %}", 999)


def test_other_files_with_tokens_and_templates(tmp_path):
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer())
    (folder / "added_tokens.json").write_text('{"<pad>": 2}')
    (folder / "tokenizer.model").write_bytes(b"raw")
    (folder / "chat_template.json").write_text('{"chat_template": "x"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    result = applied(folder, "chatml")
    assert set(result.removed) == {"chat_template.json", "additional_chat_templates/tools.jinja"}
    count = result.length
    assert held(folder, "added_tokens.json") == {"<pad>": 2, "<|im_start|>": count - 2, "<|im_end|>": count - 1}
    assert any(note.startswith("tokenizer.model lacks them") for note in result.notes)
    assert result.notes[-2:] == (
        "named chat templates that are not carried, since the new one is the only one: tools",
        "chat_template.json is not carried: it holds the template that is replaced",
    )


@pytest.mark.parametrize("listed", [False, True], ids=["dict", "list"])
def test_named_templates_inside_the_tokenizer_config_are_told(tmp_path, listed):
    named = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}", "rag": "{{ 3 }}"}
    held = [{"name": name, "template": text} for name, text in named.items()] if listed else named
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(), tokenizer_config={"chat_template": held})
    assert "named chat templates that are not carried, since the new one is the only one: rag, tool_use" in (
        applied(folder, "chatml").notes
    )
    assert not any("not carried" in note for note in applied(folder, "chatml").notes)


@pytest.mark.parametrize(("file", "said"), worlds.OUTSIDE)
def test_a_token_of_another_file_keeps_its_id(tmp_path, file, said):
    """transformers gives it one after those of tokenizer.json, and the tokens of a template must not get the same."""
    from transformers import AutoTokenizer

    folder = worlds.naming(tmp_path / "model", file, said)
    before, length = AutoTokenizer.from_pretrained(folder), worlds.length(worlds.tokenizer())
    assert before.encode("a<new>b", add_special_tokens=False)[1] == length
    with pytest.raises(RefusedError) as raised:
        applied(folder, "chatml")
    assert str(raised.value) == (
        f"tokenizer.json lacks <new> of {file}: transformers gives such tokens ids from {length} on, which "
        "<|im_start|>, <|im_end|> of the chat template would get"
    )
    assert f"from_pretrained('{folder}')" in str(raised.value.hint)

    before.save_pretrained(folder)
    assert applied(folder, "chatml").added == ("<|im_start|>", "<|im_end|>")
    after = AutoTokenizer.from_pretrained(folder)
    assert after.convert_tokens_to_ids(["<new>", "<|im_start|>"]) == [length, length + 1]
    assert after.encode("a<new>b", add_special_tokens=False)[1] == length


def test_a_token_of_another_file_is_no_matter_where_none_is_added(tmp_path):
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(*worlds.NEEDED["chatml"]))
    (folder / "special_tokens_map.json").write_text('{"mask_token": "<new>"}')
    assert applied(folder, "chatml").added == ()


@pytest.mark.parametrize("file", ["config", "generation"])
def test_an_id_that_no_token_has_is_none_of_the_template(tmp_path, file):
    """The token that a pad is would not be trained, and one that ends a text would end each reply; one that ends a
    reply may be named."""
    length = worlds.length(worlds.tokenizer())
    folder = worlds.folder(tmp_path / "pad", worlds.tokenizer(), **{file: {"pad_token_id": length}})
    with pytest.raises(RefusedError, match=rf"says pad_token_id = {length}, which no token .* <\|im_start\|> of the"):
        applied(folder, "chatml")
    folder = worlds.folder(tmp_path / "end", worlds.tokenizer(), **{file: {"eos_token_id": [1, length + 1]}})
    assert applied(folder, "chatml").added == ("<|im_start|>", "<|im_end|>")


def test_the_end_in_special_tokens_map_is_where_generation_stops(tmp_path):
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer())
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<pad>"}')
    applied(folder, "chatml")
    assert held(folder, "generation_config.json")["eos_token_id"][:2] == [1, 2]


def test_no_fast_tokenizer_is_refused(tmp_path):
    folder = worlds.folder(tmp_path / "model", worlds.tokenizer())
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(RefusedError, match=r"needs tokenizer\.json, and the model has tokenizer\.model") as raised:
        apply_template(dict(files(folder)), load_template("chatml"), 999)
    assert raised.value.hint.endswith("convert tokenizer MODEL OUT")
    (folder / "tokenizer.model").unlink()
    with pytest.raises(RefusedError, match="no tokenizer at all"):
        apply_template(dict(files(folder)), load_template("chatml"), 999)


def test_ids_with_holes_are_refused(tmp_path):
    """The library would give a new token the id of an old one."""
    vocab = {chr(97 + number): number for number in range(26)} | {"z1": 30}
    holed = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    with pytest.raises(RefusedError, match="new ids from 31 on"):
        with_tokens(holed.to_str().encode(), ["<|x|>"])


def test_a_tokenizer_that_changes_the_text_first_still_sees_the_token():
    """Lower case, the SentencePiece prefix: control tokens are matched as they are written."""
    lowercasing = worlds.tokenizer()
    lowercasing.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("▁")])
    lowercasing.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    edited, known = with_tokens(lowercasing.to_str().encode(), ["<|IM|>"])
    assert known.single("<|IM|>")
    assert read_vocabulary(edited).ids["<|IM|>"] == worlds.length(lowercasing)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": 1}', b"\xff\xfe", b"raw"])
def test_what_is_no_tokenizer_is_an_error_of_the_source(content):
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        read_vocabulary(content)


def test_a_panic_of_the_library_is_an_error_of_the_source():
    """An impossible prefix of BPE pieces: tokenizers 0.23.3 slices out of range."""
    broken = json.loads(worlds.tokenizer().to_str())
    broken["model"]["continuing_subword_prefix"] = "xxxxx"
    with pytest.raises(SourceError, match=r"tokenizer\.json is no tokenizer that can be loaded"):
        read_vocabulary(json.dumps(broken).encode())
    silent = Tokenizer(models.WordLevel({"a": 0}, unk_token="absent"))
    with pytest.raises(SourceError, match="fails on"):
        with_tokens(silent.to_str().encode(), ["<|x|>"])


# --- edits of JSON texts ---------------------------------------------------------------------------------------------

TEXT = '{\n  "a": [1, "}"],\n  "b\\"": {"c": 2.50},\n  "d": 1e-6\n}\n'


@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [
        (TEXT, "a", None, TEXT.replace('[1, "}"]', "null")),
        (TEXT, "d", [1, 2], TEXT.replace("1e-6", "[\n    1,\n    2\n  ]")),
        (TEXT, "e", "ü\n", '{\n  "e": "ü\\n",' + TEXT[1:]),
        ('{"a":1}', "a", {"b": 2}, '{"a":{"b": 2}}'),
        ('{"a":1}', "b", 2, '{"b": 2, "a":1}'),
        ("{}\n", "b", 2, '{"b": 2}\n'),
        (" {\n} ", "b", 2, ' {"b": 2} '),
    ],
)
def test_one_member_changes(text, key, value, expected):
    assert replaced(text, "x", key, value) == expected
    assert json.loads(expected) == json.loads(text) | {key: value}


@pytest.mark.parametrize("key", ["a", 'b"', "d", "nothing"])
@pytest.mark.parametrize("text", [TEXT, json.dumps(json.loads(TEXT)), '{"a":0}', "{}", '{ "d" : 1 }'])
def test_one_member_goes(text, key):
    left = removed(text, "x", key)
    assert json.loads(left) == {name: value for name, value in json.loads(text).items() if name != key}
    assert left == text or len(left) < len(text)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1', '{"a" 1}', '{"a": 1 "b": 2}', '{"a": 1, "a": 2}', "{1: 2}", "{} {}", '{"a":}', "{,}"]
)
def test_what_is_no_object_is_an_error(text):
    with pytest.raises(SourceError, match=r"x is not (a )?valid JSON"):
        list(members(text, "x"))
