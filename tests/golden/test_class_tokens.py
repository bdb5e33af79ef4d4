"""The special tokens that classes of tokenizers have by default: the judge is transformers, with all of its classes."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models
from transformers.models.auto import tokenization_auto as auto
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from converters.assets.class_tokens import CLASSES, FORCED, MODEL_TYPES, class_defaults

PIECES = [*"abcdefghijklmnopqrstuvwxyz", "\u0120", "\u2581", "<unk>"]
NO_TOKENS = {"Parakeet"}
NEED_MORE = {
    "AlbertTokenizer", "BigBirdTokenizer", "CpmTokenizerFast", "MarkupLMTokenizer", "PegasusTokenizer",
    "RoFormerTokenizer",
}  # fmt: skip
"""Classes that need a library, a file or a vocabulary of their own: only their signatures are compared."""
UNIGRAM = {"BarthezTokenizer", "CamembertTokenizer", "MLukeTokenizer"}
"""Classes that do not say that their model is one of these."""
OWN_VOCABULARY = {"EsmcTokenizer"}
"""Classes that take no vocabulary of a tokenizer.json."""


def classes():
    """The classes of transformers that read a tokenizer.json, by name; an import that fails is that of a slow one."""
    folder = Path(transformers.models.__file__).parent
    found = {}
    for file in sorted(folder.glob("*/tokenization_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except NameError:
            assert file.parent.name == "pop2piano"
            continue
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, TokenizersBackend) and value.__module__ == module.__name__:
                found[value.__name__] = value
    return found


ALL = classes()


def said(kind):
    """(key, token) of the defaults in the signatures of a class and of those that it is made of."""
    keys = {}
    for base in kind.__mro__[: kind.__mro__.index(TokenizersBackend)]:
        for name, value in inspect.signature(base.__init__).parameters.items():
            if name.endswith("_token") and isinstance(value.default, str):
                keys.setdefault(name, value.default)
    return set(keys.items())


def of(name):
    return {(each.key, each.token) for each in class_defaults({"tokenizer_class": name}, {})}


def test_there_are_many():
    assert len(ALL) > 50
    assert ALL.keys() >= NEED_MORE | OWN_VOCABULARY | UNIGRAM


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_the_signature_of_a_class(name, suffix):
    assert said(ALL[name]) <= of(name.removesuffix("Fast") + suffix)
    assert name.removesuffix("Fast").removesuffix("Tokenizer") in {*CLASSES, *NO_TOKENS}


@pytest.mark.parametrize("name", sorted(ALL.keys() - NEED_MORE - OWN_VOCABULARY))
def test_what_a_class_adds(tmp_path, name):
    """As the class itself loads a tokenizer.json that has none of its tokens."""
    kind = ALL[name]
    if kind.model is models.Unigram or name in UNIGRAM:
        built = Tokenizer(models.Unigram([(piece, 0.0) for piece in PIECES], PIECES.index("<unk>")))
    else:
        built = Tokenizer(models.BPE({piece: number for number, piece in enumerate(PIECES)}, []))
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    added = kind.from_pretrained(tmp_path).get_vocab().keys() - {*PIECES}
    known = {token for _, token in of(name)}
    lists = {token for key, token in of(name) if not key}
    theirs = {token.replace("\u2581<ent", "<ent") for token in added}  # MLuke's, by a vocabulary of SentencePiece
    assert lists <= theirs
    assert lists or theirs <= known
    assert known - theirs <= {*PIECES}


@pytest.mark.parametrize("kind", sorted(kind for kind, name in auto.TOKENIZER_MAPPING_NAMES.items() if name))
def test_the_class_of_a_model_type(kind):
    name = auto.TOKENIZER_MAPPING_NAMES[kind]
    known = {(each.key, each.token) for each in class_defaults({}, {"model_type": kind})}
    read = auto.tokenizer_class_from_name(name)
    if read is not None and inspect.isclass(read) and issubclass(read, TokenizersBackend) and read.__name__ in ALL:
        assert of(name) <= known
        assert (kind in FORCED) is (kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)
    else:
        assert kind not in FORCED


def test_every_model_type_of_the_table_is_one():
    """Those that are none of transformers 5 are some of transformers 4.57.6."""
    older = MODEL_TYPES.keys() - auto.TOKENIZER_MAPPING_NAMES.keys()
    assert MODEL_TYPES.keys() - older >= FORCED
    assert {"llama", "mixtral", "olmo2"} - auto.TOKENIZER_MAPPING_NAMES.keys() <= older
