"""The shipped templates: texts and generation blocks are those of real transformers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from converters.assets.chat_template import TEMPLATES, load_template, probe
from converters.assets.jinja_sandbox import Dialogue, guarded, render
from formats.errors import SourceError, UsageError
from tests.chat import worlds

DIALOGUES = {
    "one turn": ["Hello?", "Hi."],
    "turns": ["a", "b", "c", "d", "e", "f"],
    "odd whitespace": ["  \n two\n\n", " \t reply \n", "\n", "  \n"],
    "empty": ["", "", "x", ""],
    "unicode": ["Ünï 你好 🙂?", "çödé 🙂👍🏽", "e\u0301", "\u2028"],
    "template syntax": ["{{ 7 * 7 }}", "{% generation %}{# no #}", "<&\">'", "\\n"],
    "literal tokens": ["<|user|> </s>", "<|im_end|>x<|assistant|>", "<s><|eot_id|>", "<|im_start|>assistant\n"],
    "no reply yet": ["a", "b", "c"],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def messages(texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


CASES = [
    pytest.param(name, messages(texts, system), id=f"{name}, {case}{', system' if system else ''}")
    for name in TEMPLATES
    for case, texts in DIALOGUES.items()
    for system in ((None,) if name == "control" else (None, " Be brief.\n "))
]


@pytest.fixture(scope="module")
def real():
    """`real(name)`: a tokenizer of transformers with the template's tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizers = {}
    for name in TEMPLATES:
        tokenizer = worlds.tokenizer(*worlds.NEEDED[name])
        tokenizers[name] = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
        tokenizers[name].chat_template = load_template(name)
    return tokenizers.__getitem__


@pytest.mark.parametrize(("name", "dialogue"), CASES)
def test_text_and_blocks_are_those_of_transformers(real, name, dialogue):
    tokenizer = real(name)
    for prompt in (False, True):
        text, spans = render(load_template(name), dialogue, **TOKENS, add_generation_prompt=prompt)
        options = {"add_generation_prompt": prompt}
        assert text == tokenizer.apply_chat_template(dialogue, tokenize=False, **options)
        expected = tokenizer.apply_chat_template(
            dialogue, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == expected["input_ids"]
        assert masked(encoded["offset_mapping"], spans) == expected["assistant_masks"]
        assert len(spans) == sum(message["role"] == "assistant" for message in dialogue)


def masked(offsets, spans):
    """1 for each token that shares a character with a span."""
    return [int(any(low < stop and high > start for start, stop in spans)) for low, high in offsets]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_terminator_is_trained_and_what_follows_is_not(real, name):
    """In every turn the token that ends it has mask 1, and so has nothing before the reply and behind that token."""
    tokenizer, end = real(name), TEMPLATES[name].terminators[0]
    expected = tokenizer.apply_chat_template(
        messages(DIALOGUES["turns"]), return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = tokenizer.convert_ids_to_tokens(expected["input_ids"])
    trained = [token for token, mask in zip(tokens, expected["assistant_masks"], strict=True) if mask]
    last = ["</s>"] if name == "control" else []
    assert trained == ["b", end, "d", end, "f", end, *last]


def test_control_is_what_neox_data_looks_like():
    """The users' own records: pair tokens, nothing between the turns, one eos per document."""
    text, spans = render(load_template("control"), messages(["a ", " b", "c", "d"]), **TOKENS)
    assert text == "<|user|>a <|user|><|assistant|> b<|assistant|><|user|>c<|user|><|assistant|>d<|assistant|></s>"
    assert [text[start:stop] for start, stop in spans] == [" b<|assistant|>", "d<|assistant|></s>"]


def test_chatml_and_llama3_as_published():
    """The texts that Qwen and Meta document for their formats."""
    chat = messages(["Hi"], "S")
    assert render(load_template("chatml"), chat, **TOKENS, add_generation_prompt=True)[0] == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(load_template("llama3"), chat, **TOKENS, add_generation_prompt=True)[0] == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(("name", "dialogue"), CASES)
def test_a_prompt_is_the_beginning_of_what_is_trained(name, dialogue):
    template, text = load_template(name), render(load_template(name), dialogue, **TOKENS)[0]
    for (place, message), replied in pairwise(enumerate(dialogue)):
        if message["role"] == "user" and replied[1]["role"] == "assistant":
            prompt = render(template, dialogue[: place + 1], **TOKENS, add_generation_prompt=True)[0]
            assert text.startswith(prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_table_says_what_the_template_does(name):
    template, shipped = load_template(name), TEMPLATES[name]
    probed = probe(template, **TOKENS)
    assert set(probed.markers()) == set(shipped.tokens) == set(worlds.NEEDED[name])
    assert probed.terminator({"</s>", *probed.markers(), TOKENS["eos_token"]}) == shipped.terminators[0]
    assert probed.faults(shipped.terminators[0]) == []


@pytest.mark.parametrize(("name", "role"), [("control", "system"), ("chatml", "tool"), ("llama3", "gpt")])
def test_a_role_that_a_format_lacks_is_refused(name, role):
    with pytest.raises(SourceError, match=f'"{name}" knows the roles'):
        render(load_template(name), [{"role": role, "content": "x"}], **TOKENS)


def test_tokens_that_a_format_needs_are_not_left_out_silently():
    for name, lacking in (("control", "eos_token"), ("llama3", "bos_token")):
        with pytest.raises(SourceError, match=f"'{lacking}' is undefined"):
            render(load_template(name), messages(["a", "b"]), **(TOKENS | {lacking: None}))


def test_a_template_is_a_shipped_one_or_a_file(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages }} ü")
    assert load_template(str(tmp_path / "mine.jinja")) == "{{ messages }} ü"
    with pytest.raises(UsageError, match="neither") as raised:
        load_template("chatlm")
    assert raised.value.hint == "shipped are control, chatml, llama3"
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="no text"):
        load_template(str(tmp_path / "mine.jinja"))


# --- other people's templates ----------------------------------------------------------------------------------------

FOREIGN = {
    "as transformers": "{{ messages | tojson }}{{ tools is none }}{{ documents is defined }}{{ strftime_now('%Y') }}",
    "tojson": "{{ {'b': 'ü<', 'a': 1} | tojson(indent=2, sort_keys=true) }}{{ [1] | tojson(separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}\n",
    "trimmed blocks": "  {% for m in messages %}\n    {{ m.role }}\n    {% endfor %}\n  x\n",
    "namespace": "{% set n = namespace(a=1, self=2) %}{% set n.b = n.a + n.self %}{{ n.b }}{{ dict(a=1) }}",
    "nested scopes": "{% macro m(x) %}[{{ x }}]{% endmacro %}{% for a in messages %}{{ m(a.content) }}"
    "{% if a.role == 'assistant' %}{% generation %}{{ m(a.content) }}{% endgeneration %}{% endif %}{% endfor %}",
    "missing": "{{ messages[0].nothing }}{{ unk_token }}|",
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_other_templates_render_as_in_transformers(real, name):
    chat = messages(["a <b>", "ü"])
    chat[0]["dropped"] = None
    text, spans = render(FOREIGN[name], chat, **TOKENS)
    tokenizer = real("chatml")
    assert text == tokenizer.apply_chat_template(chat, chat_template=FOREIGN[name], tokenize=False)
    if "generation" in FOREIGN[name]:
        expected = tokenizer.apply_chat_template(
            chat, chat_template=FOREIGN[name], return_dict=True, return_assistant_tokens_mask=True
        )
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert masked(offsets, spans) == expected["assistant_masks"] != []


def test_a_block_that_moves_is_an_error_and_not_a_wrong_mask():
    moved = "{% set x %}{% generation %}reply{% endgeneration %}{% endset %}before {{ x }}"
    with pytest.raises(SourceError, match="moves or changes"):
        render(moved, messages(["a"]), **TOKENS)
    changed = "{% filter upper %}{% generation %}reply{% endgeneration %}{% endfilter %}"
    with pytest.raises(SourceError, match="moves or changes"):
        render(changed, messages(["a"]), **TOKENS)


BROKEN = {
    "{% for m in messages %}": "TemplateSyntaxError",
    "{% generation %}x": "TemplateSyntaxError",
    "{{ raise_exception('not\nso') }}": "TemplateError: not so",
    "{{ messages.nothing.at_all }}": "UndefinedError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ range(10 ** 9) }}": "OverflowError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ raise_exception.__globals__['sys'] }}": "SecurityError",
    "{{ (''|attr('__class__')).x }}": "SecurityError",
    "{% set n = namespace() %}{% set n.__html__ = 1 %}": "SecurityError",
    "{{ namespace(__class__=1) }}": "SecurityError",
    "{% include 'other' %}": "TypeError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{% for i in range(99999) %}{{ '%099d' % i }}{% endfor %}": "more than 4194304 characters",
}  # fmt: skip


@pytest.mark.parametrize("template", BROKEN)
def test_a_broken_or_prying_template_is_an_error_of_the_source(template):
    with pytest.raises(SourceError, match=BROKEN[template]):
        render(template, messages(["a"]), **TOKENS)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a number": "{{ 7 ** (7 ** (7 ** 7)) % 10 }}",
    "memory at compile time": "{{ 'a' * 10 ** 12 }}",
    "memory by doubling": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "width": "{{ '%99999999999d' % 1 }}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_without_end_is_stopped(monkeypatch, case):
    """Each of these takes the machine's time or memory for good when it is rendered in this process."""
    monkeypatch.setattr("converters.assets.jinja_sandbox.MAX_SECONDS", 1)
    with pytest.raises(SourceError, match=r"does not end within|MemoryError|OverflowError|ValueError"):
        guarded(ENDLESS[case], [Dialogue(messages(["a"]))], **TOKENS)


def test_memory_is_bounded(monkeypatch):
    """268 MB of text that is never shown: fine without a limit, more than a smaller one."""
    doubling = "{% set n = namespace(s='a') %}{% for i in range(28) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    assert guarded(doubling, [Dialogue(messages(["a"]))], **TOKENS).rendered == [("", [])]
    monkeypatch.setattr("converters.assets.jinja_sandbox.MAX_MEMORY", 200 << 20)
    with pytest.raises(SourceError, match="MemoryError"):
        guarded(doubling, [Dialogue(messages(["a"]))], **TOKENS)


def test_a_guarded_process_tells_what_this_one_would():
    template = load_template("llama3")
    chat = messages(DIALOGUES["unicode"] + ["\ud800"], "S")
    answer = guarded(template, [Dialogue(chat), Dialogue(chat, True)], **TOKENS)
    assert answer.rendered == [
        render(template, chat, **TOKENS), render(template, chat, **TOKENS, add_generation_prompt=True)
    ]  # fmt: skip
    assert answer.names == {"messages", "bos_token", "add_generation_prompt"}
    assert json.dumps(answer.rendered)


FAULTY = {
    "no {% generation %}": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    "do not hold every reply": "{% for m in messages %}{% if loop.last %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
    "lies outside": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endif %}{% endfor %}",
    "holds a question": "{% generation %}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% endgeneration %}",
    "no beginning": "{{ messages | length }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY)
def test_templates_that_train_badly_are_seen(fault):
    probed = probe(FAULTY[fault], **TOKENS)
    assert probed.terminator(["<|end|>", "</s>"]) == "<|end|>"
    assert any(fault in sentence for sentence in probed.faults("<|end|>"))


def test_terminators_of_other_formats():
    """Of templates without generation blocks too, and where an eos follows only the last reply."""

    def terminator(template, eos, *tokens):
        probed = probe(template, bos_token=None, eos_token=eos)
        return probed.terminator({*tokens, *probed.markers(), eos})

    zephyr = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    gemma = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    harmony = (
        "{% for m in messages %}<|start|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"
    )
    alpaca = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    assert terminator(zephyr, "</s>") == "</s>"
    assert terminator(gemma, "<eos>", "<start_of_turn>", "<end_of_turn>") == "<end_of_turn>"
    assert terminator(harmony, "</s>") == "<|end|>"
    assert terminator(alpaca, "</s>") is None
