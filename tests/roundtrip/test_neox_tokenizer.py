"""The tokenizer of a GPT-NeoX run: the user's, that of its Hugging Face folder, or the file that its yml names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.dcp_tools import refused

SPM = Path(__file__).parents[1] / "golden/neox/spm101.model"
WEIGHTS = "model.safetensors"
SPECIAL = ("<|endoftext|>", "<|padding|>", "<|im_end|>")


def spoken(path: Path, size: int, special: tuple[str, ...] = SPECIAL) -> Path:
    """A tokenizer.json of so many tokens, the special ones first."""
    from tokenizers import AddedToken, Tokenizer, models

    vocab = {token: number for number, token in enumerate([*special, *(f"t{i}" for i in range(size - len(special)))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture
def run(model: Callable[..., Path], convert: Any, tmp_path: Path) -> Path:
    """A run with the small files of its model: 211 tokens, a licence, a chat template, settings of generation."""
    source = shutil.copytree(model("llama-mha"), tmp_path / "hf")
    (source / "LICENSE").write_text("L")
    settings = {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(settings))
    assert convert("hf2neox", source, tmp_path / "run").code == 0
    return tmp_path / "run"


def with_yml(run: Path, **keys: str) -> Path:
    """The run with further keys in its yml."""
    path = run / "global_step0/configs/model.yml"
    path.write_text(path.read_text() + "".join(f"{key}: {value}\n" for key, value in keys.items()))
    return run


def bare(run: Path, *, manifest: bool = False) -> Path:
    """The run as a training leaves it: no Hugging Face folder, manifest or record of a conversion."""
    import torch

    shutil.rmtree(run / "huggingface")
    if not manifest:
        (run / "global_step0/vitruvian.json").unlink()
    path = run / "global_step0/mp_rank_00_model_states.pt"
    torch.save({name: value for name, value in torch.load(path).items() if name != "vitruvian"}, path)
    return run


# --- a tokenizer that the user names ---------------------------------------------------------------------------------


def test_only_what_is_of_the_tokenizer_is_replaced(run, convert, tmp_path):
    folder, out = spoken(tmp_path / "tok/tokenizer.json", 211).parent, tmp_path / "out"
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool.jinja").write_text("tool")
    ran = convert("neox2hf", run, out, "--tokenizer", folder)
    assert ran.code == 0, ran.err
    assert (out / "LICENSE").read_text() == "L"
    assert (out / "chat_template.jinja").read_text() == "new"
    assert (out / "additional_chat_templates/tool.jinja").read_text() == "tool"
    assert not (out / "tokenizer.model").exists()
    ids = {"eos_token_id": 0, "pad_token_id": 1}
    assert read(out / "generation_config.json") == {"do_sample": True, "temperature": 0.6, **ids}
    assert {**read(run / "huggingface/config.json"), **ids} == read(out / "config.json")
    assert f"note: the chat template of {run / 'huggingface'} is not carried" in ran.err
    assert "eos_token_id 2 of config.json is now 0, eos_token_id [2, 3] of generation_config.json is now 0" in ran.err
    assert "does not name these tokens, whose ids are the run's: bos_token_id 1 of config.json" in ran.err
    assert "vocabulary" not in ran.err.replace("rows of vocabulary padding", "")
    assert "(carried: " not in ran.err
    assert "--from" not in ran.err


def test_settings_of_generation_that_another_folder_replaces_are_told(run, convert, tmp_path):
    base = shutil.copytree(run / "huggingface", tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 1.5}))
    folder = spoken(tmp_path / "tok/tokenizer.json", 211).parent
    ran = convert("neox2hf", run, tmp_path / "out", "--config", base, "--tokenizer", folder)
    assert ran.code == 0, ran.err
    assert f"note: {run / 'huggingface/generation_config.json'} is not carried, another is: if the training" in ran.err
    assert "(carried: " not in ran.err


def test_a_template_that_is_the_same_is_carried_without_a_note(run, convert, tmp_path):
    folder = spoken(tmp_path / "tok/tokenizer.json", 211).parent
    shutil.copy(run / "huggingface/chat_template.jinja", folder)
    ran = convert("neox2hf", run, tmp_path / "out", "--tokenizer", folder)
    assert (ran.code, "chat template" in ran.err) == (0, False), ran.err


def test_ids_that_the_tokenizer_does_not_tell_stay(run, convert, tmp_path):
    alone = spoken(tmp_path / "tok/tokenizer.json", 211, ())
    ran = convert("neox2hf", run, tmp_path / "out", "--tokenizer", alone)
    assert ran.code == 0, ran.err
    for name in ("config.json", "generation_config.json"):
        assert read(tmp_path / "out" / name) == read(run / "huggingface" / name)
    assert "bos_token_id 1 of config.json, eos_token_id 2 of config.json, eos_token_id [2, 3] of gen" in ran.err
    assert "nothing stops generation" not in ran.err


def test_an_end_that_nobody_names_is_told(run, convert, tmp_path):
    alone = spoken(tmp_path / "tok/tokenizer.json", 211, ())
    ran = convert("neox2hf", bare(run), tmp_path / "out", "--tokenizer", alone)
    assert ran.code == 0, ran.err
    assert f"note: {alone} names no token that ends a text, so that nothing stops generation" in ran.err
    assert read(tmp_path / "out/config.json")["eos_token_id"] is None


def test_settings_of_generation_in_the_config_stay_there(run, convert, tmp_path):
    """Beside a generation_config.json transformers would not read them."""
    (run / "huggingface/generation_config.json").unlink()
    path = run / "huggingface/config.json"
    path.write_text(json.dumps({**read(path), "temperature": 0.3}))
    folder = spoken(tmp_path / "tok/tokenizer.json", 211).parent
    assert convert("neox2hf", run, tmp_path / "out", "--tokenizer", folder).code == 0
    assert not (tmp_path / "out/generation_config.json").exists()
    config = read(tmp_path / "out/config.json")
    assert (config["temperature"], config["eos_token_id"]) == (0.3, 0)


@pytest.mark.parametrize(("special", "pad"), [(("<|endoftext|>", "<|padding|>"), 1), (("<|pad|>", "<|endoftext|>"), 0)])
def test_the_names_of_neox(run, convert, tmp_path, special, pad):
    """That of 20B_tokenizer.json, and that of SentencePiece models which were made for it."""
    path = spoken(tmp_path / "tok/20B_tokenizer.json", 211, special)
    assert convert("neox2hf", bare(run), tmp_path / "out", "--tokenizer", path).code == 0
    ids = {"bos_token_id": None, "eos_token_id": 1 - pad, "pad_token_id": pad}
    assert read(tmp_path / "out/config.json").items() >= ids.items()
    assert read(tmp_path / "out/tokenizer_config.json")["pad_token"] == special[pad]


# --- its size and the vocabulary -------------------------------------------------------------------------------------


def test_a_smaller_tokenizer_cuts_no_rows(run, convert, tmp_path):
    path, plain = spoken(tmp_path / "tok/tokenizer.json", 94), tmp_path / "plain"
    ran = convert("neox2hf", run, tmp_path / "out", "--tokenizer", path)
    assert ran.code == 0, ran.err
    assert f"note: {path} has 94 tokens, the vocabulary of {run} 211: the other 117 rows are carried too" in ran.err
    assert convert("neox2hf", run, plain).code == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (plain / WEIGHTS).read_bytes()


def test_a_training_starts_with_all_rows(run, tmp_path):
    from train.start.start_weights import opened

    for name in ("tokenizer.model", "tokenizer_config.json"):
        (run / "huggingface" / name).unlink()
    path = spoken(tmp_path / "tok/tokenizer.json", 94)
    config: Any = SimpleNamespace(model=SimpleNamespace(config=None, gqa_layout="auto", tokenizer=path))
    (tmp_path / "scratch").mkdir()
    source = opened(run, config, tmp_path / "scratch")
    assert (source.spec.vocab, source.assets) == (211, tmp_path / "scratch")
    assert f"{path} has 94 tokens, the vocabulary of {run} 211: the other 117 rows are carried too" in source.notes


def test_a_larger_tokenizer_is_refused(run, convert, tmp_path):
    path = spoken(tmp_path / "tok/tokenizer.json", 212)
    ran = convert("neox2hf", run, tmp_path / "out", "--tokenizer", path)
    refused(ran, 5, f"{path} has 212 tokens, the vocabulary of {run} 211: they contradict", "--vocab-size 212")
    kept = shutil.copytree(run / "huggingface", tmp_path / "kept")
    bare(run)
    for number, flags in enumerate([(), ("--config", kept, "--vocab-size", 212)]):
        assert convert("neox2hf", run, tmp_path / f"{number}", "--tokenizer", path, *flags).code == 0
        assert read(tmp_path / f"{number}/config.json")["vocab_size"] == 212


def test_a_vocabulary_that_contradicts_the_record(run, convert, tmp_path):
    file = run / "global_step0/mp_rank_00_model_states.pt"
    words = f"{file} says a vocabulary of 211, --vocab-size 94: they contradict each other"
    refused(convert("neox2hf", run, tmp_path / "out", "--vocab-size", 94), 5, words, "--set vocab=94")
    shutil.rmtree(run / "huggingface")
    refused(convert("neox2hf", run, tmp_path / "out", "--vocab-size", 94), 5, words)
    assert convert("neox2hf", run, tmp_path / "out", "--vocab-size", 211).code == 0


def test_a_vocabulary_that_contradicts_the_manifest(run, convert, tmp_path):
    path = spoken(tmp_path / "tok/tokenizer.json", 200)
    bare(run, manifest=True)
    for flags in (("--vocab-size", 200), ("--tokenizer", path)):
        ran = convert("neox2hf", run, tmp_path / "out", *flags)
        refused(ran, 6, "differ in settings (here | there): vocab: 200 | 211", "--set vocab=200")
    assert convert("neox2hf", run, tmp_path / "out", "--vocab-size", 211).code == 0


# --- a tokenizer that the yml names ----------------------------------------------------------------------------------


def test_the_hugging_face_folder_outranks_the_yml(run, convert, tmp_path, monkeypatch):
    spoken(tmp_path / "cwd/20B_tokenizer.json", 94)
    monkeypatch.chdir(tmp_path / "cwd")
    assert convert("neox2hf", run, tmp_path / "plain").code == 0
    with_yml(run, tokenizer_type="HFTokenizer", vocab_file="20B_tokenizer.json")
    ran = convert("neox2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name


def test_a_tokenizer_of_the_yml_that_the_config_contradicts(run, convert, tmp_path):
    path = spoken(tmp_path / "tok/tokenizer.json", 213)
    with_yml(run, tokenizer_type="HFTokenizer", vocab_file=str(path))
    words = f"{path}, the vocab_file of the yml of {run}, has 213 tokens, the config in {run / 'huggingface'} 211"
    refused(convert("neox2hf", run, tmp_path / "out"), 5, words, "--vocab-size 211")
    assert convert("neox2hf", run, tmp_path / "out", "--vocab-size", 211).code == 0


def test_a_tokenizer_of_the_yml_is_named(run, convert, tmp_path, monkeypatch):
    path = spoken(tmp_path / "cwd/20B_tokenizer.json", 200)
    monkeypatch.chdir(path.parent)
    with_yml(bare(run), tokenizer_type="HFTokenizer", vocab_file=path.name)
    ran = convert("neox2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"note: the tokenizer is {path}, which the yml of {run} names (vocab_file)" in ran.err
    assert read(tmp_path / "out/config.json").items() >= {"vocab_size": 200, "pad_token_id": 1}.items()


def test_the_record_of_a_conversion_outranks_the_yml(run, convert, tmp_path):
    path = spoken(tmp_path / "tok/tokenizer.json", 94)
    with_yml(run, tokenizer_type="HFTokenizer", vocab_file=str(path))
    shutil.rmtree(run / "huggingface")
    ran = convert("neox2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert read(tmp_path / "out/config.json")["vocab_size"] == 211
    assert "the other 117 rows are carried too" in ran.err


def test_a_sentencepiece_model_of_the_yml_is_named(run, convert, tmp_path):
    path = shutil.copy(SPM, tmp_path)
    with_yml(bare(run), tokenizer_type="SPMTokenizer", vocab_file=str(path))
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 211)
    assert ran.code == 0, ran.err
    assert f"note: the tokenizer is {path}, which the yml of {run} names (vocab_file)" in ran.err
    assert (tmp_path / "out/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (None, "gpt2-vocab.json"),  # as in configs/local_setup.yml of GPT-NeoX
        (None, "20B_tokenizer.json"),
        ("GPT2BPETokenizer", "gpt2-vocab.json"),
        ("HFGPT2Tokenizer", "folder"),
        ("CharLevelTokenizer", "20B_tokenizer.json"),
        ("TiktokenTokenizer", "20B_tokenizer.json"),
        ("SPMTokenizer", "20B_tokenizer.json"),
        ("HFTokenizer", "spm101.model"),
        ("HFTokenizer", "folder"),
    ],
)
def test_a_file_that_is_no_tokenizer_of_the_type_is_not_taken(run, convert, tmp_path, kind, name):
    """Neither refused nor carried: the training had another tokenizer, or this one in a form that is not read."""
    path = tmp_path / name
    (tmp_path / "gpt2-vocab.json").write_text('{"a": 0, "b": 1}')
    shutil.copy(SPM, tmp_path)
    spoken(tmp_path / "20B_tokenizer.json", 200)
    spoken(tmp_path / "folder/tokenizer.json", 200)
    keys = {} if kind is None else {"tokenizer_type": kind}
    plain, out = tmp_path / "plain", tmp_path / "out"
    assert convert("neox2hf", bare(run), plain, "--vocab-size", 211).code == 0
    ran = convert("neox2hf", with_yml(run, **keys, vocab_file=str(path)), out, "--vocab-size", 211)
    assert ran.code == 0, ran.err
    kind = kind or "GPT2BPETokenizer, the default"
    words = f"note: {path}, the vocab_file of the yml of {run}, is not taken: it is not read as a tokenizer of "
    assert f"{words}tokenizer_type {kind}; `--tokenizer FOLDER` gives one\n" in ran.err
    assert ran.err.count("vocab_file") == 1
    assert {file.name: file.read_bytes() for file in out.iterdir()}.items() >= {
        file.name: file.read_bytes() for file in plain.iterdir() if file.name != "vitruvian.json"
    }.items()
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in plain.iterdir())


def test_a_file_that_is_not_taken_is_told_where_it_is_missed(run, convert, tmp_path):
    path = spoken(tmp_path / "20B_tokenizer.json", 200)
    with_yml(bare(run), tokenizer_type="GPT2BPETokenizer", vocab_file=str(path))
    ran = convert("neox2hf", run, tmp_path / "out")
    hint = f"hint: add --vocab-size N, or --config with the model's Hugging Face folder; {path}, the vocab_file of"
    refused(ran, 5, f"the true vocabulary of {run} is unknown", hint, "is not taken", "`--tokenizer FOLDER` gives one")


def test_a_training_starts_without_a_file_that_is_no_tokenizer_of_the_type(run, tmp_path):
    from train.start.start_weights import opened

    path = spoken(tmp_path / "20B_tokenizer.json", 200)
    with_yml(bare(run), tokenizer_type="CharLevelTokenizer", vocab_file=str(path))
    config: Any = SimpleNamespace(model=SimpleNamespace(config=None, gqa_layout="auto", tokenizer=None))
    source = opened(run, config, tmp_path / "scratch")
    assert (source.spec.vocab, source.assets) == (None, None)
    assert f"{path}, the vocab_file of the yml" in source.notes[-1]
    assert source.notes[-1].endswith("tokenizer_type CharLevelTokenizer; `--model.tokenizer FILE` gives one")


@pytest.mark.parametrize("text", ['{"a": 0, "b": 1}', '{"model": {"ty', "version https://git-lfs"])
def test_a_tokenizer_of_the_yml_that_is_damaged(run, convert, tmp_path, text):
    path = tmp_path / "20B_tokenizer.json"
    path.write_text(text)
    with_yml(bare(run), tokenizer_type="HFTokenizer", vocab_file=str(path))
    ran = convert("neox2hf", run, tmp_path / "out")
    refused(ran, 3, f"vocab_file of the yml of {run}: {path} is no tokenizer.json", "--tokenizer FOLDER")
    folder = spoken(tmp_path / "tok/tokenizer.json", 211).parent
    assert convert("neox2hf", run, tmp_path / "out", "--tokenizer", folder).code == 0


def test_a_vocabulary_of_gpt_2_beside_a_hugging_face_folder(run, convert, tmp_path):
    (tmp_path / "gpt2-vocab.json").write_text('{"a": 0, "b": 1}')
    with_yml(run, vocab_file=str(tmp_path / "gpt2-vocab.json"))
    assert convert("neox2hf", run, tmp_path / "out").code == 0
