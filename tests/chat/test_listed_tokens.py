"""A chat template for a model whose tokenizer_config.json says how added tokens are read, of all or of some."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from converters.assets.chat_template import TEMPLATES
from formats.errors import RefusedError, SourceError
from tests.chat import worlds
from tests.chat.test_apply import applied, held


def partly_listed(path, kind, listed, eos):
    """A folder whose tokenizer.json has `<x>` and `<y>` besides the model's vocabulary, and whose config lists some.

    transformers builds tokenizers of these classes anew, but a byte-level LlamaTokenizer.
    """
    tokenizer = worlds.tokenizer("<x>", "<y>")
    if kind.startswith("Llama"):
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    decoder = {str(number): worlds.vars_of(AddedToken(token, special=True)) for token, number in listed.items()}
    named = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": eos, "unk_token": "</s>", "pad_token": "<pad>"}
    changes = named | {"added_tokens_decoder": decoder}
    return worlds.folder(path, tokenizer, 4, tokenizer_config=changes), tokenizer


REBUILT = ["LlamaTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer"]


@pytest.mark.parametrize("kind", [*REBUILT, "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("eos", ["<y>", {"__type": "AddedToken", "content": "<y>"}], ids=["text", "token"])
@pytest.mark.parametrize("listed", [{"<x>": 300}, {"<s>": 0, "</s>": 1, "<pad>": 2, "<x>": 300}])
def test_tokens_keep_their_ids_where_the_config_lists_some_of_them(tmp_path, kind, name, eos, listed):
    from transformers import AutoTokenizer

    folder, tokenizer = partly_listed(tmp_path / "model", kind, listed, eos)
    tokens = ["<s>", "</s>", "<pad>", "<x>", "<y>"]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    before = AutoTokenizer.from_pretrained(folder)
    assert before.convert_tokens_to_ids(tokens) == ids == [0, 1, 2, 300, 301]
    result = applied(folder, name)
    loaded, there = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert loaded.convert_tokens_to_ids(tokens) == ids
    new = list(range(302, 302 + len(worlds.NEEDED[name])))
    assert loaded.convert_tokens_to_ids(list(result.added)) == new
    assert [loaded.encode(f"a{token}b", add_special_tokens=False).count(number) for token, number in
            zip(result.added, new, strict=True)] == [1] * len(new)  # fmt: skip
    decoder = held(folder, "tokenizer_config.json")["added_tokens_decoder"]
    flags = {str(number): worlds.vars_of(token) for number, token in there.get_added_tokens_decoder().items()}
    assert decoder == flags


@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize(
    ("eos", "listed", "read"),
    [
        ("</s>", {}, {"<x>": "plain text", "<y>": "plain text"}),
        ("</s>", {"<s>": 0, "<y>": 301}, {"<x>": "plain text", "<y>": 300}),
        ("<x>", {"</s>": 1, "<y>": 301}, {"<x>": 301, "<y>": 300}),
        ("<x>", {"<s>": 0, "</s>": 1, "<pad>": 2}, {"<y>": "plain text"}),
        ("</s>", {"<x>": 301, "<y>": 300}, {"<x>": 301, "<y>": 300}),
    ],
)
@pytest.mark.parametrize("kind", REBUILT)
def test_a_tokenizer_whose_ids_transformers_changes_is_refused(tmp_path, kind, name, eos, listed, read):
    """Nobody can tell whether the model was trained with the ids of tokenizer.json or with the other ones."""
    from transformers import AutoTokenizer

    folder, tokenizer = partly_listed(tmp_path / "model", kind, listed, eos)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert {token: loaded.get_added_vocab().get(token, "plain text") for token in read} == read
    with pytest.raises(RefusedError) as raised:
        applied(folder, name)
    said = ", ".join(
        f"{token} ({tokenizer.token_to_id(token)} in tokenizer.json) as {so}" for token, so in read.items()
    )
    assert str(raised.value) == (
        "added_tokens_decoder of tokenizer_config.json does not list the added tokens of tokenizer.json with their "
        f"ids: for most classes of tokenizers, transformers 5 reads {said}"
    )


def test_a_listed_token_without_an_id(tmp_path):
    folder, _ = partly_listed(tmp_path / "model", "GPT2TokenizerFast", {"<x>": "x"}, "</s>")
    with pytest.raises(SourceError, match=r"added_tokens_decoder of tokenizer_config\.json has a key that is no id"):
        applied(folder, "chatml")


SPLITS = [("tokenizer_config.json", 4), ("tokenizer_config.json", 5), ("special_tokens_map.json", 5)]
"""The files that may say that special tokens are plain text, and the style of transformers in which it counts."""


@pytest.mark.parametrize(("file", "style"), SPLITS)
@pytest.mark.parametrize("known", [False, True], ids=["new tokens", "known tokens"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_that_are_plain_text_are_refused(tmp_path, file, style, known, name):
    from transformers import AutoTokenizer

    folder = worlds.folder(tmp_path / "model", worlds.tokenizer(*(worlds.NEEDED[name] if known else ())), style)
    said = held(folder, file) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(said | {"split_special_tokens": True}))
    assert len(AutoTokenizer.from_pretrained(folder).encode("<s>", add_special_tokens=False)) == 3
    tokens = ", ".join(worlds.NEEDED[name])
    with pytest.raises(RefusedError) as raised:
        applied(folder, name)
    assert str(raised.value) == (
        f"{file} says split_special_tokens: transformers would encode {tokens} of the chat template as plain text"
    )
    assert str(raised.value.hint).startswith('"split_special_tokens": false there')
    (folder / file).write_text(json.dumps(said | {"split_special_tokens": False}))
    assert applied(folder, name).added == (() if known else worlds.NEEDED[name])


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("token", worlds.NEEDED["chatml"])
@pytest.mark.parametrize("flag", ["single_word", "normalized", "lstrip", "rstrip"])
def test_flags_that_tokenizer_config_json_gives_a_token(tmp_path, kind, token, flag):
    """They count, not those of tokenizer.json: transformers says which of them hide the token beside letters."""
    from transformers import AutoTokenizer

    built = worlds.tokenizer(*worlds.NEEDED["chatml"])
    named = {"tokenizer_class": kind, "unk_token": "<pad>"}
    folder = worlds.folder(tmp_path / "model", built, 4, tokenizer_config=named)
    settings = held(folder, "tokenizer_config.json")
    settings["added_tokens_decoder"][str(built.token_to_id(token))][flag] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = AutoTokenizer.from_pretrained(folder).encode(f"a{token}b", add_special_tokens=False)
    assert (built.token_to_id(token) in ids) is (flag != "single_word")
    if flag != "single_word":
        assert applied(folder, "chatml").added == ()
        return
    with pytest.raises(RefusedError, match=rf"tokenizer_config\.json has the token {re.escape(token)}") as raised:
        applied(folder, "chatml")
    assert f'in the entry of {token} in "added_tokens_decoder"' in str(raised.value.hint)


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens", "turn_token"])
def test_flags_that_another_key_gives_a_token(tmp_path, key):
    from transformers import AutoTokenizer

    built = worlds.tokenizer(*worlds.NEEDED["chatml"])
    hidden = {"__type": "AddedToken"} | worlds.vars_of(AddedToken("<|im_end|>", special=True, single_word=True))
    named = dict.fromkeys((f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), "<pad>")
    settings = named | {"tokenizer_class": "CohereTokenizerFast", key: hidden if key == "turn_token" else [hidden]}
    folder = worlds.folder(tmp_path / "model", built, tokenizer_config=settings)
    end = built.token_to_id("<|im_end|>")
    assert end not in AutoTokenizer.from_pretrained(folder).encode("a<|im_end|>b", add_special_tokens=False)
    with pytest.raises(RefusedError, match=r"tokenizer_config\.json has the token <\|im_end\|>") as raised:
        applied(folder, "chatml")
    assert f'in the entry of <|im_end|> in "{key}"' in str(raised.value.hint)
