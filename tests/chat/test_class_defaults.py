"""A chat template for a model with special tokens that no file names: transformers knows them by itself."""

from __future__ import annotations

import json

import pytest

from formats.errors import RefusedError
from tests.chat import worlds
from tests.chat.test_apply import applied, held

NAMELESS = {"bos_token": None, "eos_token": None, "pad_token": None, "tokenizer_class": None}
BY_DEFAULT = [
    *(({"tokenizer_class": kind}, {}) for kind in (
        "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPTNeoXTokenizerFast",
        "CohereTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast", "CodeGenTokenizer", "WhisperTokenizer",
    )),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "qwen2"}),
    ({}, {"tokenizer_class": "GPT2TokenizerFast"}),
    *(({}, {"model_type": kind}) for kind in ("gpt2", "qwen2", "qwen3", "gpt_neox", "cohere", "gemma2", "starcoder2")),
    ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<s>", "unk_token": "<s>"}, {}),
]  # fmt: skip
"""Changes of tokenizer_config.json and of config.json with which transformers adds tokens that no file names."""


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize(("tokenizer", "config"), BY_DEFAULT)
def test_a_token_that_the_class_has_by_default_keeps_its_id(tmp_path, style, tokenizer, config):
    from transformers import AutoTokenizer

    built = worlds.tokenizer()
    folder = worlds.folder(
        tmp_path / "model", built, style, tokenizer_config=NAMELESS | tokenizer, config={"vocab_size": 900} | config
    )
    before, length = AutoTokenizer.from_pretrained(folder), worlds.length(built)
    theirs = {token: number for token, number in before.get_vocab().items() if number >= length}
    assert theirs
    with pytest.raises(RefusedError, match=rf"transformers gives such tokens ids from {length} on") as raised:
        applied(folder, "chatml")
    assert str(raised.value).startswith("tokenizer.json lacks ")
    assert any(f"{token} of the " in str(raised.value) for token in theirs)

    before.save_pretrained(folder)
    assert applied(folder, "chatml").added == ("<|im_start|>", "<|im_end|>")
    after = AutoTokenizer.from_pretrained(folder)
    new = length + len(theirs)
    assert after.convert_tokens_to_ids([*theirs, "<|im_start|>", "<|im_end|>"]) == [*theirs.values(), new, new + 1]


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("by", ["null", "another token", "a token that is there", "special_tokens_map.json"])
def test_a_default_of_the_class_that_does_not_count(tmp_path, style, by):
    from transformers import AutoTokenizer

    keys = ("bos_token", "eos_token", "unk_token", "pad_token")
    built = worlds.tokenizer(*(["<|endoftext|>", "<|padding|>"] if by == "a token that is there" else []))
    folder = worlds.folder(
        tmp_path / "model", built, style, tokenizer_config=NAMELESS | {"tokenizer_class": "GPTNeoXTokenizerFast"}
    )
    said = dict.fromkeys(keys, None if by == "null" else "<s>")
    settings = held(folder, "tokenizer_config.json")
    if by == "special_tokens_map.json":
        (folder / by).write_text(json.dumps(said))
        settings.pop("added_tokens_decoder", None)
    elif by != "a token that is there":
        settings |= said
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    result, length = applied(folder, "chatml"), worlds.length(built)
    assert result.added == ("<|im_start|>", "<|im_end|>")
    after = AutoTokenizer.from_pretrained(folder)
    assert after.convert_tokens_to_ids([*result.added]) == [length, length + 1]
    assert len(after) == length + 2


@pytest.mark.parametrize("style", [4, 5])
def test_the_token_that_tokenizer_json_pads_with_keeps_its_id(tmp_path, style):
    from transformers import AutoTokenizer

    built = worlds.tokenizer()
    length = worlds.length(built)
    built.enable_padding(pad_token="<new>", pad_id=length)
    folder = worlds.folder(tmp_path / "model", built, style, tokenizer_config={"pad_token": None})
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<new>") == length
    with pytest.raises(RefusedError, match=rf"lacks <new> of its padding: .* from {length} on"):
        applied(folder, "chatml")
    named = held(folder, "tokenizer_config.json") | {"pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    assert applied(folder, "chatml").added == ("<|im_start|>", "<|im_end|>")


def test_a_default_of_the_class_moves_the_ids_of_tokens_that_are_not_listed(tmp_path):
    """transformers builds the tokenizer anew, with its own tokens before those of a list."""
    from transformers import AutoTokenizer

    built = worlds.tokenizer(*worlds.NEEDED["chatml"])
    listed = {str(number): worlds.vars_of(built.get_added_tokens_decoder()[number]) for number in range(3)}
    settings = {"tokenizer_class": "GPT2TokenizerFast", "added_tokens_decoder": listed}
    settings |= {"extra_special_tokens": [*worlds.NEEDED["chatml"]]}
    folder = worlds.folder(tmp_path / "model", built, 4, tokenizer_config=NAMELESS | settings)
    first = built.token_to_id("<|im_start|>")
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_start|>") == first + 1
    with pytest.raises(RefusedError, match=rf"reads <\|im_start\|> \({first} in tokenizer.json\) as {first + 1}, "):
        applied(folder, "chatml")
