"""SentencePiece models, trained here, become fast tokenizers with the same ids: real libraries on both sides."""

from __future__ import annotations

import itertools
import json
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import Tokenizer, normalizers

from converters.assets import normalizer
from converters.assets.sentencepiece import Converted, convert_tokenizer
from converters.assets.tokenizer_proof import check, made
from formats.errors import RefusedError, UnsupportedError, UsageError, VerificationError

ROOT = Path(__file__).parents[2]
PAIR = ("<|user|>", "<|assistant|>")
EOD = "<|endoftext|>"
TYPED = {"control_symbols": [*PAIR, EOD]}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
USER = {"user_defined_symbols": [*PAIR, EOD, "\n", "\n\n", "\t", "<tag>", "5"]}
OWN_RULES = "61 65\t61 6E 64\n2026\t2E 2E 2E\n41\t61\n"
"""ae becomes and, an ellipsis three dots, A becomes a."""
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"byte_fallback": True, **TYPED},
    "bpe without bytes": TYPED,
    "bpe identity": {"byte_fallback": True, **IDENTITY, **TYPED},
    "bpe identity collapsed": {"normalization_rule_name": "identity", **TYPED},
    "bpe without prefix": {"byte_fallback": True, "add_dummy_prefix": False, **IDENTITY, **TYPED},
    "bpe user-defined": {"byte_fallback": True, **IDENTITY, **USER},
    "bpe user-defined nfkc": {"byte_fallback": True, **USER},
    "bpe user-defined without prefix": {"byte_fallback": True, "add_dummy_prefix": False, **IDENTITY, **USER},
    "bpe over words": {"byte_fallback": True, "split_by_whitespace": False, **TYPED},
    "bpe own rules": {"byte_fallback": True, "own_rules": True, **TYPED},
    "unigram": {"model_type": "unigram", "byte_fallback": True, **TYPED},
    "unigram without bytes": {"model_type": "unigram", **TYPED},
    "unigram casefolded": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf", **TYPED},
    "unigram user-defined": {"model_type": "unigram", "byte_fallback": True, **IDENTITY, **USER},
}
TEXTS = 2000


def lines() -> list[str]:
    draw = random.Random(11)
    syllables = re.findall(
        r"\S+", "la ne to sa ri mā ķi ū stro pie iet kas un the ing ver ļi žē šu čo ни ко пре 日 本 ก ขา"
    )
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(800)]
    words += ["Hello,", "world!", "1234", "x=1;", "don't", "e\u0301te\u0301", "naïve", "Aha", "ae", "①"] * 8
    return [" ".join(draw.choices(words, k=draw.randint(3, 15))) for _ in range(2000)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained("bpe")`: a model of that kind, trained once. Settings may be given instead."""
    folder, corpus = tmp_path_factory.mktemp("spm"), lines()

    def get(kind: str, **settings: Any) -> Path:
        name = re.sub(r"\W", "_", kind)
        path = folder / f"{name}.model"
        if not path.exists():
            settings = {"model_type": "bpe", "vocab_size": 700} | (settings or KINDS[kind])
            if settings.pop("own_rules", False):
                (folder / "rules.tsv").write_text(OWN_RULES)
                settings["normalization_rule_tsv"] = str(folder / "rules.tsv")
            SentencePieceTrainer.train(
                sentence_iterator=iter(corpus), model_prefix=str(folder / name), minloglevel=2, num_threads=2,
                hard_vocab_limit=False, **settings,
            )  # fmt: skip
        return path

    return get


@pytest.fixture(scope="session")
def converted_from(trained: Callable[..., Path]) -> Callable[[str], Converted]:
    """`converted_from("bpe")`: that model, with the control tokens of the users."""
    cache: dict[str, Converted] = {}

    def get(kind: str) -> Converted:
        if kind not in cache:
            cache[kind] = convert_tokenizer(trained(kind), control=PAIR, names={"eos": EOD})
        return cache[kind]

    return get


@pytest.fixture
def run(convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run(MODEL, OUT, ...)`: the command, whether or not it is in the list of commands yet."""
    from converters import cli
    from converters.commands.tokenizer import tokenizer

    monkeypatch.setitem(cli.cli.commands, "tokenizer", tokenizer)
    return lambda *argv: convert("tokenizer", *argv, "--check", 300)


def proto_of(path: Path) -> Any:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    return proto


def changed(path: Path, out: Path, change: Callable[[Any], object]) -> Path:
    """A copy of a model with a change in its protocol buffer."""
    proto = proto_of(path)
    change(proto)
    out.write_bytes(proto.SerializeToString())
    return out


def sentencepiece(content: bytes) -> Any:
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    return processor


def fast(converted: Converted, split: bool = False) -> Tokenizer:
    tokenizer = Tokenizer.from_str(converted.files["tokenizer.json"].decode())
    tokenizer.encode_special_tokens = split
    return tokenizer


def span_wise(raw: Any, text: str, control: dict[str, int]) -> list[int]:
    """As the users' training data is encoded: control tokens become ids, each span is encoded by itself."""
    parts = re.split("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")", text)
    spans = ([control[part]] if i % 2 else raw.encode(part) for i, part in enumerate(parts))
    return [token_id for span in spans for token_id in span]


def dialogues(converted: Converted, count: int) -> Iterator[str]:
    draw = random.Random(5)
    texts = made(converted, 2 * count, draw)
    for question, answer in zip(texts, texts, strict=False):
        yield f"{PAIR[0]}{question}{PAIR[0]}{PAIR[1]}{answer}{PAIR[1]}{EOD}"


# --- the same ids ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(trained, converted_from, kind):
    """BPE without exception. In Unigram two ways to cut a text may have one score, but for rounding."""
    converted = converted_from(kind)
    scores = [piece.score for piece in proto_of(trained(kind)).pieces]
    for finding in check(converted, TEXTS):
        assert finding.compared >= TEXTS / 5
        if converted.kind == "bpe" or finding.what == "decoded texts":
            assert finding.different == 0, finding.examples[0]
        assert finding.rate <= 0.004, finding.examples[0]
        for text, expected, ids in finding.examples:
            assert sorted(expected) == sorted(ids), (text, scores)


@pytest.mark.parametrize("kind", ["bpe user-defined", "unigram user-defined"])
def test_the_reference_is_the_model_as_it_is(trained, converted_from, kind):
    """Control tokens get the type of one; that changes no text that does not spell one."""
    converted = converted_from(kind)
    raw, reference = sentencepiece(trained(kind).read_bytes()), sentencepiece(converted.reference)
    texts = [
        text for text in made(converted, 1000, random.Random(1)) if not any(token in text for token in (*PAIR, EOD))
    ]
    assert len(texts) > 800
    assert raw.encode(texts) == reference.encode(texts)


@pytest.mark.parametrize("kind", ["bpe", "bpe identity", "bpe user-defined", "unigram"])
def test_the_users_dialogues(trained, converted_from, kind):
    """The example of the users, and texts of every kind between their control tokens."""
    converted = converted_from(kind)
    raw, tokenizer = sentencepiece(trained(kind).read_bytes()), fast(converted)
    control = {token: raw.piece_to_id(token) for token in converted.control}
    example = (
        "<|user|>Translate the following sentence from English to Latvian: Hello, how are you?<|user|>"
        "<|assistant|>Sveiki, kā jums klājas?<|assistant|>"
    )
    ids = tokenizer.encode(example).ids
    assert ids == span_wise(raw, example, control)
    assert raw.id_to_piece(ids[1]).startswith("\u2581")
    spoken = list(dialogues(converted, 300))
    wrong = [text for text in spoken if tokenizer.encode(text).ids != span_wise(raw, text, control)]
    assert len(spoken) == 300
    assert len(wrong) <= (1 if converted.kind == "unigram" else 0)


@pytest.mark.parametrize("kind", ["bpe", "bpe user-defined", "unigram", "unigram without bytes"])
def test_a_message_cannot_spell_a_control_token(converted_from, kind):
    """With special tokens split, as the note says; also right behind a user-defined piece."""
    converted = converted_from(kind)
    control = {i for token, i in converted.control.items() if token != "<unk>"}
    around = [(before, after) for before in ("", "a", "\n\n", "<tag>", " ", "日") for after in ("", "b", "\n\n", " ")]
    texts = [f"{before}{token}{after}" for token in converted.control for before, after in around]
    tokenizer = fast(converted, split=True)
    assert not any(control & set(encoded.ids) for encoded in tokenizer.encode_batch(texts))
    assert [encoded.ids for encoded in tokenizer.encode_batch(texts)] == sentencepiece(converted.reference).encode(
        texts
    )
    assert all(control & set(encoded.ids) for encoded in fast(converted).encode_batch([f"a{token}b" for token in PAIR]))


@pytest.mark.parametrize(
    "text",
    ["x" * 5000, "mā" * 5000, "\0", "a\0\0b", " " * 5000, "\n" * 3000, "日" * 3000, "<" * 3000, "e\u0301" * 3000,
     "a" + "\u0301" * 3000, "the ne la " * 30_000, "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 500, "\ufffd\ufeff"],
    ids=lambda text: f"{text[:3]!a} {len(text)}",
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bpe", "bpe user-defined"])
def test_long_and_odd_texts(converted_from, kind, text):
    converted = converted_from(kind)
    assert fast(converted).encode(text).ids == sentencepiece(converted.reference).encode(text)


@pytest.mark.parametrize("kind", ["bpe", "bpe user-defined nfkc", "unigram casefolded"])
def test_every_short_text_of_awkward_characters(converted_from, kind):
    """Characters that vanish, compose, join or split, in every order: the steps must not lose count of them."""
    awkward = (
        "a",
        " ",
        "\x01",
        "\n",
        "\r",
        "\u0301",
        "\u0323",
        "\u0345",
        "\u200d",
        "Å",
        "\u2095",
        "\u2581",
        "\u1100",
        "\u1161",
    )
    texts = ["".join(characters) for count in (1, 2, 3) for characters in itertools.product(awkward, repeat=count)]
    converted = converted_from(kind)
    expected = sentencepiece(converted.reference).encode(texts)
    ours = [encoded.ids for encoded in fast(converted).encode_batch(texts)]
    assert [text for text, theirs, mine in zip(texts, expected, ours, strict=True) if theirs != mine] == []


def test_lone_surrogates_are_refused_by_both(converted_from):
    """Such a text has no UTF-8; neither side makes ids of it."""
    converted = converted_from("bpe")
    with pytest.raises((UnicodeEncodeError, TypeError)):
        fast(converted).encode("a\ud800b")
    with pytest.raises((UnicodeEncodeError, RuntimeError)):
        sentencepiece(converted.reference).encode("a\ud800b")


def test_pieces_that_look_alike(trained, tmp_path):
    """One letter in two spellings, signs that look alike, pieces that begin like a byte's."""

    def add(*texts: str) -> Callable[[Any], None]:
        def change(proto: Any) -> None:
            for text in set(texts) - {piece.piece for piece in proto.pieces}:
                proto.pieces.add(piece=text, score=-1000.0 - texts.index(text))

        return change

    texts = ("\u0301", "é", "e\u0301", "ne\u0301", "_", "__", "<", "0", "<0", "\u2581\u2581", "\xa0", "K", "\u212a")
    path = changed(trained("bpe identity"), tmp_path / "alike.model", add(*texts))
    assert all(finding.different == 0 for finding in check(convert_tokenizer(path), TEXTS))
    path = changed(trained("bpe identity"), tmp_path / "apart.model", add("\u0101\u0304"))  # one half is no piece
    assert check(convert_tokenizer(path), TEXTS)[0].different > 0


# --- the check can fail ----------------------------------------------------------------------------------------------


def metaspace(tokenizer: dict[str, Any], scheme: str) -> None:
    steps = tokenizer["normalizer"]["normalizers"]
    steps[:] = [step for step in steps if step["type"] != "Prepend"]
    tokenizer["pre_tokenizer"] = {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False,
    }  # fmt: skip


def always(tokenizer: dict[str, Any]) -> None:
    metaspace(tokenizer, "always")


def only_first(tokenizer: dict[str, Any]) -> None:
    metaspace(tokenizer, "first")


def strip(tokenizer: dict[str, Any]) -> None:
    steps = tokenizer["normalizer"]["normalizers"]
    steps.insert(len(steps) - 2, {"type": "Strip", "strip_left": True, "strip_right": True})


def no_separators(tokenizer: dict[str, Any]) -> None:
    steps = tokenizer["normalizer"]["normalizers"]
    start, stop = 0, next(i for i, step in enumerate(steps) if step["type"] == "NFC") + 2
    steps[start:stop] = [step for step in steps if step["type"] == "Precompiled"]


def merges_by_id(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"].sort()


def added_tokens(tokenizer: dict[str, Any]) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["added_tokens"] += [{"id": vocabulary[piece], "content": piece} | flags for piece in ("\n\n", "<tag>")]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    tokenizer["pre_tokenizer"] = None


def no_cuts(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"] = None


def no_byte_decoder(tokenizer: dict[str, Any]) -> None:
    del tokenizer["decoder"]["decoders"][1]


@pytest.mark.parametrize(
    ("kind", "sabotage", "what"),
    [
        ("bpe identity", always, "texts"),
        ("bpe identity", only_first, "dialogues"),
        ("bpe identity collapsed", strip, "texts"),
        ("bpe", no_separators, "texts"),
        ("bpe", merges_by_id, "texts"),
        ("bpe user-defined", added_tokens, "texts"),
        ("unigram without bytes", no_cuts, "texts"),
        ("bpe identity", no_byte_decoder, "decoded texts"),
    ],
)
def test_every_fact_is_seen_by_the_check(converted_from, kind, sabotage, what):
    """The ways to convert that do not work: each differs in texts that the check makes."""
    converted = converted_from(kind)
    tokenizer = json.loads(converted.files["tokenizer.json"])
    sabotage(tokenizer)
    broken = replace(converted, files={"tokenizer.json": json.dumps(tokenizer).encode()})
    rated = {finding.what: finding for finding in check(broken, TEXTS)}[what]
    assert rated.rate > 0.005
    assert rated.examples


def test_a_swapped_vocabulary_is_seen(converted_from):
    converted = converted_from("bpe")
    tokenizer = json.loads(converted.files["tokenizer.json"])
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    with pytest.raises(VerificationError, match="piece 6"):
        check(replace(converted, files={"tokenizer.json": json.dumps(tokenizer).encode()}), 10)


def test_a_panic_is_an_error(converted_from):
    """The tokenizers library breaks down when a separator is put before a text; whatever does that is reported."""
    converted = converted_from("bpe")
    broken = converted.files["tokenizer.json"].replace(rb"(?<=[\\s\\S])", b"")
    assert broken != converted.files["tokenizer.json"]
    with pytest.raises(UnsupportedError, match="the tokenizers library fails"):
        check(replace(converted, files={"tokenizer.json": broken}), TEXTS)


def test_precompiled_by_itself_loses_accents(trained, converted_from):
    """Why there are separators: half of a Vietnamese letter, in the spelling of macOS, is dropped."""
    charsmap = proto_of(trained("bpe")).normalizer_spec.precompiled_charsmap
    assert normalizers.Precompiled(charsmap).normalize_str("e\u0323\u0302") == "\u1eb9"
    assert normalizer.charsmap_rules(charsmap)["e\u0323\u0302"] == "\u1ec7"
    steps = fast(converted_from("bpe")).normalizer
    assert (
        steps.normalize_str("Vie\u0323\u0302t e\u0323\u0302 \u2095\u0320") == "\u2581Vi\u1ec7t\u2581\u1ec7\u2581h\u0320"
    )


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [None, "llama", "mistral", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("kind", ["bpe", "bpe user-defined", "unigram"])
def test_transformers_loads_it(trained, converted_from, tmp_path, kind, model_type):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    converted = converted_from(kind)
    for name, content in converted.files.items():
        (tmp_path / name).write_bytes(content)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    texts = list(dialogues(converted, 100))
    expected = [encoded.ids for encoded in fast(converted).encode_batch(texts)]
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert loaded(texts)["input_ids"] == expected
        assert len(loaded) == converted.size
        assert loaded.get_vocab() == {piece: i for i, piece in enumerate(converted.pieces)}
        assert (loaded.eos_token, loaded.eos_token_id) == (EOD, converted.control[EOD])
        assert set(loaded.all_special_ids) == set(converted.control.values())
        plain = loaded("a<|user|>b", split_special_tokens=True)["input_ids"]
        assert plain == sentencepiece(converted.reference).encode("a<|user|>b")
        assert loaded.decode(loaded("<|user|>mā 日 ne<|user|>")["input_ids"], skip_special_tokens=True) == "mā 日 ne"
    loaded.save_pretrained(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again")(texts)["input_ids"] == expected


def test_bos_is_added_on_request(trained, tmp_path):
    from transformers import AutoTokenizer

    converted = convert_tokenizer(trained("bpe identity"), add_bos=True)
    for name, content in converted.files.items():
        (tmp_path / name).write_bytes(content)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    raw = sentencepiece(converted.reference)
    assert loaded("mā ne")["input_ids"] == [raw.bos_id(), *raw.encode("mā ne")]
    assert loaded("mā", "ne")["input_ids"] == [raw.bos_id(), *raw.encode("mā"), raw.bos_id(), *raw.encode("ne")]
    assert all(finding.different == 0 for finding in check(converted, 300))


# --- which tokens ----------------------------------------------------------------------------------------------------


def test_tokens_must_be_pieces(trained):
    path = trained("bpe identity")
    for wrong in ({"control": ["<|system|>"]}, {"names": {"eos": "<|eod|>"}}, {"names": {"pad": "<pad>"}}):
        with pytest.raises(RefusedError, match="is no piece of") as caught:
            convert_tokenizer(path, **wrong)
        assert "--add" in caught.value.hint
    ordinary = next(piece.piece for piece in proto_of(path).pieces if piece.type == 1)
    for token in (ordinary, "<0x41>"):
        with pytest.raises(RefusedError, match="ordinary text"):
            convert_tokenizer(path, control=[token])
    for token in ("", " ", "a\udc80"):
        with pytest.raises(UsageError, match="cannot be a token"):
            convert_tokenizer(path, control=[token], add=True)


def test_the_end_must_not_be_unknown(trained):
    path = trained("bpe identity")
    for names in ({"eos": "<unk>"}, {"bos": "<unk>"}, {"eos": EOD, "pad": EOD}):
        with pytest.raises(RefusedError, match="would be one token"):
            convert_tokenizer(path, names=names)
    with pytest.raises(RefusedError, match="calls what it does not know '<unk>'"):
        convert_tokenizer(path, names={"unk": EOD})


def test_roles(trained):
    model = trained("no roles", bos_id=-1, eos_id=-1, **IDENTITY, **TYPED)
    converted = convert_tokenizer(model)
    assert converted.special == {"unk": 0}
    assert any("--eos" in note for note in converted.notes)
    with pytest.raises(RefusedError, match="no token for the beginning"):
        convert_tokenizer(model, add_bos=True)
    named = convert_tokenizer(model, names={"bos": PAIR[0], "eos": EOD, "pad": "<unk>"}, add_bos=True)
    assert named.special == {"bos": 1, "eos": 3, "pad": 0, "unk": 0}
    config = json.loads(named.files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (PAIR[0], EOD, "<unk>")
    assert config["additional_special_tokens"] == [PAIR[1]]


def test_new_tokens_follow_the_last_piece(trained):
    converted = convert_tokenizer(
        trained("bpe identity"), control=["<|system|>", PAIR[0], "<|tool|>"], names={"pad": "<|fill|>"}, add=True
    )
    count = len(proto_of(trained("bpe identity")).pieces)
    assert [converted.control[key] for key in ("<|system|>", "<|tool|>", "<|fill|>")] == [count, count + 1, count + 2]
    assert (converted.size, converted.special["pad"]) == (count + 3, count + 2)
    assert any(f"needs {count + 3} rows" in note for note in converted.notes)
    assert all(finding.different == 0 for finding in check(converted, 500))


def test_the_bytes_are_always_the_same(trained):
    first, second = (convert_tokenizer(trained("bpe user-defined nfkc"), control=PAIR) for _ in range(2))
    assert first == second
    json.loads(first.files["tokenizer.json"])
    assert first.files["tokenizer.model"] == trained("bpe user-defined nfkc").read_bytes()
    assert str(fast(first))  # tokenizers 0.23.3 panics here if a long pattern is not ASCII


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(run, trained, tmp_path):
    out = tmp_path / "new" / "out"
    ran = run(trained("bpe identity"), out, "--control", PAIR[0], "--control", PAIR[1], "--eos", EOD)
    assert ran.code == 0, ran.err
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    assert "300 texts compared with SentencePiece: 0 differ" in ran.out
    assert "split_special_tokens" in ran.err
    assert not out.with_name("out.partial").exists()
    ran = run(trained("bpe identity"), tmp_path / "json", "--json", "--corpus", ROOT / "README.md")
    record = json.loads(ran.out)
    assert record["special"] == {"bos": 1, "eos": 2, "unk": 0}
    assert 300 < record["checks"]["texts"]["compared"] <= 600
    assert record["checks"]["dialogues"]["different"] == 0


def test_only_tokenizers_are_replaced(run, trained, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert run(trained("bpe identity"), out).code == 0  # an empty folder is as good as none
    assert run(trained("bpe identity"), out).code == 7
    (out / "tokenizer.json").write_text("old")
    (tmp_path / "out.partial" / "out").mkdir(parents=True)  # what a killed run leaves
    assert run(out / "tokenizer.model", out, "--force").code == 0
    assert len((out / "tokenizer.json").read_bytes()) > 1000
    (out / "model.safetensors").write_text("weights")
    ran = run(trained("bpe identity"), out, "--force")
    assert (ran.code, (out / "model.safetensors").read_text()) == (7, "weights")
    (tmp_path / "file").write_text("x")
    assert run(trained("bpe identity"), tmp_path / "file", "--force").code == 7
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "thesis.tex").write_text("x")
    assert run(trained("bpe identity"), tmp_path / "other").code == 7
    assert (tmp_path / "other.partial" / "thesis.tex").exists()
    assert run(trained("bpe identity"), tmp_path / "none", "--corpus", tmp_path / "missing").code == 3
    assert not (tmp_path / "none").exists()


def test_mismatches_are_printed_and_stop_it(run, trained, tmp_path, monkeypatch):
    """A tokenizer that differs is not written, unless so many are allowed; it is said either way."""

    good = normalizer.steps
    monkeypatch.setattr(normalizer, "steps", lambda *args: [s for s in good(*args) if s["type"] != "NFC"])
    ran = run(trained("bpe"), tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (6, False)
    assert "differ" in ran.err
    assert re.search(r"raw +\[\d+, .*\n +fast \[\d+, ", ran.out)
    ran = run(trained("bpe"), tmp_path / "out", "--allow-mismatches", 0.5)
    assert (ran.code, (tmp_path / "out").exists()) == (0, True)
    assert re.search(r"300 texts compared with SentencePiece: [1-9]\d* differ", ran.out)
    assert "from place" in ran.out


def test_missing_tokens_have_a_hint(run, trained, tmp_path):
    ran = run(trained("bpe identity"), tmp_path / "out", "--control", "<|system|>")
    assert (ran.code, "hint:" in ran.err, "--add" in ran.err) == (5, True, True)
    ran = run(trained("bpe identity"), tmp_path / "out", "--control", "<|system|>", "--add")
    assert ran.code == 0
    assert "rows" in ran.err


def test_no_framework_is_loaded(trained, tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom converters.commands.tokenizer import tokenizer\n"
        "tokenizer([*sys.argv[1:], '--check', '50'], None, standalone_mode=False)\n"
        "print('LOADED', [one for one in ('torch', 'transformers') if one in sys.modules])"
    )
    argv = [sys.executable, "-c", code, str(trained("bpe identity")), str(tmp_path / "out")]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert "LOADED []" in ran.stdout


# --- attacks ---------------------------------------------------------------------------------------------------------


def empty(raw: bytes) -> bytes:
    return b""


def random_bytes(raw: bytes) -> bytes:
    return random.Random(0).randbytes(5000)


def is_json(raw: bytes) -> bytes:
    return b'{"version": "1.0", "model": {"vocab": {}}}'


def pieces_only(raw: bytes) -> bytes:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(raw)
    proto.ClearField("normalizer_spec")
    return proto.SerializeToString()


def edited(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    def edit(raw: bytes) -> bytes:
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(raw)
        change(proto)
        return proto.SerializeToString()

    return edit


def charsmap(proto: Any, at: int, value: bytes) -> None:
    original = proto.normalizer_spec.precompiled_charsmap
    proto.normalizer_spec.precompiled_charsmap = original[:at] + value + original[at + len(value) :]


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        random_bytes,
        is_json,
        pieces_only,
        *(pytest.param(lambda raw, part=part: raw[: len(raw) * part // 7], id=f"cut {part}") for part in range(1, 7)),
        pytest.param(lambda raw: raw[:-1], id="last byte"),
        pytest.param(lambda raw: b"\x0a\xff\xff\xff\xff\x7f" + raw, id="absurd length"),
        pytest.param(lambda raw: raw.replace("\u2581".encode(), b"\xff\xfe\xfd"), id="no UTF-8"),
        pytest.param(edited(lambda proto: proto.ClearField("pieces")), id="no pieces"),
        pytest.param(edited(lambda proto: setattr(proto.pieces[20], "piece", "")), id="empty piece"),
        pytest.param(edited(lambda proto: setattr(proto.pieces[-1], "piece", proto.pieces[-2].piece)), id="twice"),
        pytest.param(edited(lambda proto: setattr(proto.pieces[-1], "score", float("nan"))), id="nan"),
        pytest.param(edited(lambda proto: setattr(proto.pieces[-1], "score", float("inf"))), id="infinite"),
        pytest.param(edited(lambda proto: setattr(proto.pieces[0], "type", 1)), id="no unknown"),
        pytest.param(edited(lambda proto: setattr(proto.pieces[1], "type", 2)), id="two unknown"),
        pytest.param(edited(lambda proto: charsmap(proto, 0, struct.pack("<I", 2**32 - 4))), id="charsmap size"),
        pytest.param(edited(lambda proto: charsmap(proto, 4, b"\xff" * 4000)), id="charsmap units"),
        pytest.param(edited(lambda proto: charsmap(proto, 4, b"\x01" * 4000)), id="charsmap cycles"),
    ],
)
def test_damaged_models(run, trained, tmp_path, damage):
    """One sentence and exit code 3, from whichever library finds out; nothing is written."""
    path = tmp_path / "damaged.model"
    path.write_bytes(damage(trained("bpe").read_bytes()))
    ran = run(path, tmp_path / "out")
    assert ran.code == 3, ran
    assert ran.err.startswith("error: ")
    assert str(path) in ran.err or "normalizer" in ran.err
    assert {file.name for file in tmp_path.iterdir()} == {"damaged.model"}


def test_random_damage_never_crashes(trained, tmp_path):
    """A byte anywhere: refused, or the same ids on both sides. In processes of their own, for a crash would end it."""
    code = (
        "import random, sys\nfrom pathlib import Path\nfrom converters.assets.tokenizer_proof import check\n"
        "from converters.assets.sentencepiece import convert_tokenizer\nfrom formats.errors import VitruvianError\n"
        "raw, path, draw = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), random.Random(int(sys.argv[3]))\n"
        "for _ in range(40):\n"
        "    at = draw.randrange(len(raw))\n"
        "    path.write_bytes(raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1:])\n"
        "    try:\n        check(convert_tokenizer(path), 100)\n"
        "    except VitruvianError as error:\n        print(type(error).__name__)\n"
        "print('DONE')"
    )
    path = trained("bpe identity")
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "m.model"), "3"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert ran.stdout.endswith("DONE\n"), ran.stdout + ran.stderr
    assert "SourceError" in ran.stdout


def test_models_that_cannot_be_converted(run, trained, tmp_path):
    suffix = trained("suffix", vocab_size=600, treat_whitespace_as_suffix=True)
    characters = trained("characters", model_type="char", vocab_size=200)
    words = trained("words", model_type="word", vocab_size=500)

    def unused(proto: Any) -> None:
        next(piece for piece in proto.pieces if piece.type == 1 and len(piece.piece) == 2).type = 5

    def denormalized(proto: Any) -> None:
        proto.denormalizer_spec.precompiled_charsmap = proto.normalizer_spec.precompiled_charsmap

    models = [suffix, characters, words]
    models += [
        changed(trained("bpe"), tmp_path / f"{change.__name__}.model", change) for change in (unused, denormalized)
    ]
    for path in models:
        ran = run(path, tmp_path / "out")
        assert ran.code == 4, ran
        assert len(ran.err.splitlines()) == 1
    assert run(tmp_path, tmp_path / "out").code == 3
    assert run(tmp_path / "absent.model", tmp_path / "out").code == 3


@pytest.mark.parametrize("kind", ["bpe identity", "unigram user-defined"])
def test_unused_pieces(trained, tmp_path, kind):
    """They are never found, if ordinary text cannot reach over them; else the model is refused."""

    def add(proto: Any) -> None:
        proto.pieces.add(piece="<unused>", score=-1.0, type=5)

    def spoil(proto: Any) -> None:
        next(piece for piece in proto.pieces if piece.type == 1 and len(piece.piece) == 3).type = 5

    converted = convert_tokenizer(changed(trained(kind), tmp_path / "unused.model", add))
    unused = len(converted.pieces) - 1
    texts = ["<unused>", "a<unused><unused> b"]
    assert [encoded.ids for encoded in fast(converted).encode_batch(texts)] == sentencepiece(
        converted.reference
    ).encode(texts)
    assert not any(unused in encoded.ids for encoded in fast(converted).encode_batch(texts))
    with pytest.raises(UnsupportedError, match="is unused"):
        convert_tokenizer(changed(trained(kind), tmp_path / "spoiled.model", spoil))
