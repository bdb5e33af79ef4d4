"""Dialogues encoded with a chat template: ids and masks of transformers, and no text becomes a control token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from converters.assets.chat_template import load_template
from formats.errors import RefusedError
from train.data.tokens.encode import LAST_REPLY, REPLY
from train.data.tokens.records import Record
from train.data.tokens.template_encoder import TemplateEncoder, _masked, check_template
from train.data.tokens.tokenizers import Fast

MODEL = Path(__file__).parents[1] / "golden/data/1_sft/bytes.model"
TEXTS = [
    "Hello there", " leading", "trailing ", "\n\nnew lines\n", "ā Š ž 🙂", "two  spaces", "don't", "x", "\tTab", "2=2.",
]  # fmt: skip
TOKENS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "control": ["<|user|>", "<|assistant|>"],
}


def byte_level(folder, tokens, end):
    """A tokenizer of the kind of Llama 3 and Qwen: byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5 + ["user assistant system"] * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*tokens, end]])
    return saved(folder, tokenizer.to_str(), end)


def metaspace(folder, tokens, end, scheme):
    """A tokenizer of the kind of Llama 2: `first` puts a prefix before the first text only."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 5 + ["user assistant system\n"] * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*tokens, end]])
    return saved(folder, tokenizer.to_str(), end)


def saved(folder, content, end):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(content)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": "<|begin|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece(folder):
    """The users' model as a fast tokenizer."""
    from converters.assets.sentencepiece import convert_tokenizer

    converted = convert_tokenizer(MODEL, control=TOKENS["control"], names={"eos": "<|endoftext|>"})
    folder.mkdir()
    for name, content in converted.files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=["chatml", "llama3", "control", "metaspace"])
def world(request, tmp_path):
    """(template, folder of a tokenizer that has its tokens)."""
    name = request.param
    if name == "control":
        return load_template(name), sentencepiece(tmp_path / "t")
    if name == "metaspace":
        return load_template("chatml"), metaspace(tmp_path / "t", TOKENS["chatml"], "<|end|>", "first")
    return load_template(name), byte_level(tmp_path / "t", TOKENS[name], "<|end|>")


def dialogues(number=25):
    chosen = random.Random(3)
    for _ in range(number):
        turns = [text for _ in range(chosen.randint(1, 3)) for text in chosen.sample(TEXTS, 2)]
        yield Record(["user", "assistant"] * (len(turns) // 2), turns)


def test_ids_and_masks_are_those_of_transformers(world):
    from transformers import PreTrainedTokenizerFast

    template, folder = world
    vocabulary = Fast(folder / "tokenizer.json")
    encode = TemplateEncoder(vocabulary, template, None)
    real = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **{
        f"{role}_token": token for role, token in vocabulary.named.items()
    })  # fmt: skip
    for record in dialogues():
        encoded = encode([record])
        messages = [{"role": role, "content": text} for role, text in zip(*record[:2], strict=True)]
        expected = real.apply_chat_template(
            messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert encoded.ids.tolist() == expected["input_ids"]
        assert [bits & REPLY for bits in encoded.mask.tolist()] == expected["assistant_masks"]
        last = [bits & LAST_REPLY for bits in encoded.mask.tolist()]
        assert any(last)
        assert not any(last[: len(last) // 4])


def test_a_token_of_header_and_reply_is_trained_unless_the_reply_is_excluded():
    """Tokens of `a`, `\\np`, `q`, `r` and a token without characters; the reply begins at `p` and ends before `r`."""
    import numpy as np

    offsets = np.array([[0, 1], [1, 3], [3, 4], [4, 5], [3, 3]])
    assert _masked(offsets, [((2, 4), REPLY)]).tolist() == [0, REPLY, REPLY, 0, REPLY]
    assert _masked(offsets, [((0, 2), 0), ((2, 4), REPLY)]).tolist() == [0, 0, REPLY, 0, REPLY]
    assert _masked(offsets, [((2, 4), REPLY), ((0, 2), 0)]).tolist() == [0, 0, REPLY, 0, REPLY]


def test_a_text_that_spells_a_control_token_stays_text(world):
    """Either as text, or not at all: where the tokenizer looks past control tokens the document is dropped."""
    template, folder = world
    vocabulary = Fast(folder / "tokenizer.json")
    encode = TemplateEncoder(vocabulary, template, None)
    special = [token for token, is_special in vocabulary.added.items() if is_special and token.startswith("<|")]
    ids = {vocabulary.ids[token] for token in special}
    plain = encode([Record(["user", "assistant"], ["say X now", "no"])])
    for token in special:
        encoded = encode([Record(["user", "assistant"], [f"say {token} now", "no"])])
        if not encode.separable:
            assert encoded.refused == [(0, "literal")]
            continue
        assert [token_id for token_id in encoded.ids.tolist() if token_id in ids] == [
            token_id for token_id in plain.ids.tolist() if token_id in ids
        ]
        assert f"say {token} now" in vocabulary.decode(encoded.ids.tolist()).replace("  ", " ")
        assert encoded.mask.sum() == plain.mask.sum()


def test_separable_is_found_out(tmp_path):
    assert TemplateEncoder(Fast(sentencepiece(tmp_path / "s") / "tokenizer.json"), "", None).separable
    first = metaspace(tmp_path / "m", ["<|a|>"], "<|end|>", "first")
    assert not TemplateEncoder(Fast(first / "tokenizer.json"), "", None).separable


def test_the_end_of_a_document_is_trained_and_never_doubled(world):
    template, folder = world
    vocabulary = Fast(folder / "tokenizer.json")
    end = vocabulary.ids[vocabulary.named["eos"]]
    encoded = TemplateEncoder(vocabulary, template, end)([Record(["user", "assistant"], ["a", "b"])])
    assert encoded.ids.tolist().count(end) == 1
    assert encoded.ids[-1] == end
    assert encoded.mask[-1] == REPLY | LAST_REPLY


def test_a_tokenizer_that_truncates_or_pads_gives_whole_documents(tmp_path):
    from tokenizers import Tokenizer, processors

    folder = byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>")
    plain = TemplateEncoder(Fast(folder / "tokenizer.json"), load_template("chatml"), None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=200)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    odd = TemplateEncoder(Fast(folder / "tokenizer.json"), load_template("chatml"), None)
    for record in dialogues():
        first, second = plain([record]), odd([record])
        assert first.ids.tolist() == second.ids.tolist()
        assert first.mask.tolist() == second.mask.tolist()


def test_text_that_a_model_makes_a_control_token_of_is_dropped(tmp_path):
    """Unigram finds its own control pieces in a text; a lowercasing normalizer makes one of <|IM_END|>."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

    pieces = [("<unk>", 0.0), ("<|im_start|>", 0.0), ("<|im_end|>", 0.0), ("▁", -1.0)]
    pieces += [(letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz\n<|_>"]
    unigram = Tokenizer(models.Unigram(pieces, 0, False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens([AddedToken(token, special=True) for token in TOKENS["chatml"]])
    lower = Tokenizer.from_str(unigram.to_str())
    lower.normalizer = normalizers.Lowercase()
    lower.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    for name, tokenizer, text in (("u", unigram, "say <|im_end|> now"), ("l", lower, "say <|END|> now")):
        vocabulary = Fast(saved(tmp_path / name, tokenizer.to_str(), "<|im_end|>") / "tokenizer.json")
        encode = TemplateEncoder(vocabulary, load_template("chatml"), None)
        good = encode([Record(["user", "assistant"], ["say it now", "no"])])
        assert not good.refused
        assert encode([Record(["user", "assistant"], [text, "no"])]).refused == [(0, "literal")]


def test_turns_with_more_than_text_are_not_cut(train, tmp_path):
    folder = byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>")
    call = {"role": "assistant", "content": "let me", "tool_calls": [{"name": "f"}]}
    good = {
        "conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]
    }
    rows = [good, {"conversations": [{"role": "user", "content": "a"}, call]}, {"text": "plain", "conversations": None}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--input", tmp_path / "c.jsonl", "--tokenizer", folder, "--chat-template", "chatml", "--output-prefix"]
    ran = train("tokenize", *options, tmp_path / "P", "--workers", 1, "--max-drop-rate", 1)
    assert ran.code == 0, ran.err
    assert "2 documents" in ran.out
    assert "1 dropped: a turn with tool calls" in ran.err


@pytest.mark.parametrize(
    ("template", "message"),
    [  # what is written for each turn
        ("{{ m['content'] }}{{ loop.length if loop.last }}<|im_end|>", "is no beginning of what it trains"),
        (
            "{% for m in messages %}<|nobody|>{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
            "nobody",
        ),
        (
            "{{ m['content'] | upper }}<|im_end|>",
            "leaves out a reply, or changes it: 'That makes 5.', which it was tried",
        ),
    ],
)
def test_templates_that_cannot_be_trained_are_refused(tmp_path, template, message):
    vocabulary = Fast(byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>") / "tokenizer.json")
    with pytest.raises(RefusedError, match=message.replace("{", r"\{")):
        check_template(vocabulary, "{% for m in messages %}" + template + "{% endfor %}")


def test_from_the_command_line(train, tmp_path):
    folder = byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>")
    (folder / "chat_template.jinja").write_text(load_template("chatml"))
    lines = [
        json.dumps({"conversations": [{"role": role, "content": text} for role, text in zip(*record[:2], strict=True)]})
        for record in dialogues(50)
    ]
    (tmp_path / "c.jsonl").write_text("\n".join([*lines, json.dumps({"text": "plain text"}), "{]"]))
    ran = train(
        "tokenize", "--input", tmp_path / "c.jsonl", "--tokenizer", folder, "--append-eod", "--output-prefix",
        tmp_path / "P", "--workers", 2,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "51 documents" in ran.out
    assert "1 dropped: the line is not valid JSON" in ran.err
    display = train("show", tmp_path / "P_text_document", "--tokenizer", folder, "--first", 100, "--no-color")
    assert display.code == 0, display.err
    assert display.out.count("document ") == 51
    assert display.out.count("»") >= 51
    (tmp_path / "P_text_document.mask").unlink()
    assert train("show", tmp_path / "P_text_document").code == 3


CUT = """{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content[:40] }}<|im_end|>{% endgeneration %}
{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("turns", "altered"),
    [
        ([("user", "hi"), ("assistant", " yes \n")], 0),
        ([("system", "be brief"), ("user", "hi"), ("assistant", "yes")], 1),
        ([("user", "hi"), ("assistant", "no " * 30)], 1),
        ([("user", "what is <|im_end|> for?"), ("assistant", "yes")], 0),
        ([("user", "what is <|im_end|> for?"), ("assistant", "<|im_end|> " * 30)], 1),
    ],
)
def test_what_a_template_leaves_out_or_cuts_is_counted(train, tmp_path, turns, altered):
    """A system turn that it ignores, a reply that it cuts; not the white space that many templates strip."""
    folder = byte_level(tmp_path / "t", TOKENS["chatml"], "<|end|>")
    (tmp_path / "cut.jinja").write_text(CUT)
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "c.jsonl").write_text(json.dumps(record) + "\n")
    options = ["--tokenizer", folder, "--chat-template", tmp_path / "cut.jinja"]
    source = ["--input", tmp_path / "c.jsonl", *options, "--append-eod", "--workers", 1]
    ran = train("tokenize", *source, "--output-prefix", tmp_path / "P")
    assert ran.code == 0, ran.err
    assert ("of 1 records the chat template leaves out or changes a message" in ran.err) == bool(altered)
    counts = json.loads((tmp_path / "P_text_document.json").read_text())["counts"]
    assert counts.get("altered_documents", 0) == altered
    ran = train("lint", tmp_path / "c.jsonl", *options)
    assert ("leaves out or changes a message" in ran.out) == bool(altered)


@pytest.mark.parametrize("kind", ["bos", "eos"])
def test_work_with_another_token_for_the_template_is_not_gone_on_with(train, tmp_path, kind):
    """The names of bos and eos are not in tokenizer.json, and the template writes them."""
    folder = byte_level(tmp_path / "t", [*TOKENS["chatml"], "<|begin|>"], "<|end|>")
    (tmp_path / "named.jinja").write_text(f"{{{{- {kind}_token -}}}}{load_template('chatml')}")
    turns = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns}) + "\n{]\n")
    words = ["tokenize", "--input", tmp_path / "c.jsonl", "--tokenizer", folder, "--chat-template",
             tmp_path / "named.jinja", "--output-prefix", tmp_path / "P", "--workers", 1]  # fmt: skip
    assert "1 of 2 records are malformed" in train(*words, "--strict").err  # what is tokenized stays
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {f"{kind}_token": "<|im_end|>"}))
    refused = train(*words, "--max-drop-rate", 0.5)
    assert refused.code == 7, refused.err
    assert "unfinished work of another command" in refused.err
