"""Small files that are not carried are told: replaced by those of `--config BASE`, too large, in subfolders."""

from __future__ import annotations

import json
import shutil

import pytest

from converters.assets.left_behind import left_behind
from formats.checkpoint import Checkpoint, Settings
from formats.model.spec import Verbatim
from tests.chat import worlds


def changed(path, **values):
    """Change keys of a JSON file; None removes one."""
    document = (json.loads(path.read_text()) if path.is_file() else {}) | values
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def notes(run, base):
    spec = Verbatim("llama", {}, tied=False, vocab=None, why="")
    return list(left_behind(Checkpoint(run, run, "x", spec, (), (), (), assets=base, settings=Settings(config=base))))


@pytest.fixture
def folders(tmp_path):
    return [worlds.folder(tmp_path / name, worlds.tokenizer()) for name in ("run", "base")]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }} of the training"}),
        ("tokenizer_config.json", {"eos_token": "<pad>"}),
        ("tokenizer_config.json", {"unk_token": {"content": "<s>", "lstrip": False}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|im_end|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<|im_end|>"]}),
        ("chat_template.json", {"chat_template": "{{ messages }} of the training"}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<|im_end|>"]}),
        ("generation_config.json", {"eos_token_id": [1, 7]}),
        ("generation_config.json", {"temperature": 0.6}),
        ("generation_config.json", {"pad_token_id": 2}),
        ("tokenizer.json", {"truncation": {"max_length": 9}}),
        ("spiece.model", {"a": "piece"}),
    ],
)
def test_a_file_that_says_something_else_is_named(folders, name, values):
    run, base = folders
    changed(run / name, **values)
    assert notes(run, base) == [
        f"{name} of {run} are not carried, those of {base} are; `convert assets OUT --from {run}` puts them into OUT"
    ]
    assert notes(run.parent, base) == notes(base, base) == []


def test_settings_that_the_training_took_out_are_told(folders):
    run, base = folders
    changed(base / "generation_config.json", do_sample=True, temperature=0.6)
    assert "generation_config.json of " in notes(run, base)[0]


def test_tokens_that_were_added_to_a_tokenizer_of_another_kind(folders):
    for folder in folders:
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    changed(folders[0] / "added_tokens.json", **{"<|im_end|>": 300})
    assert "added_tokens.json of " in notes(*folders)[0]
    changed(folders[1] / "added_tokens.json", **{"<|im_end|>": 300, "<|im_start|>": 301})
    assert notes(*folders) == []


def test_ids_of_its_config(folders):
    run, base = folders
    changed(run / "config.json", eos_token_id=[1, 7], pad_token_id=2, decoder_start_token_id=0)
    (said,) = notes(run, base)
    ids = "eos_token_id [1, 7] (carried: 1), pad_token_id 2 (carried: None), decoder_start_token_id 0 (carried: None)"
    assert said.startswith(f"{run / 'config.json'} says {ids}: if the training changed that, change it in OUT")
    changed(base / "config.json", text_config={"decoder_start_token_id": 0, "pad_token_id": 2}, eos_token_id=[1, 7])
    assert notes(run, base) == []


def test_the_same_in_another_spelling_is_no_difference(folders):
    """As transformers 4 and 5 save one model."""
    run, base = folders
    (run / "chat_template.jinja").write_text("{{ messages }}")
    changed(base / "tokenizer_config.json", chat_template="{{ messages }}", additional_special_tokens=["b", "a"])
    changed(run / "tokenizer_config.json", extra_special_tokens=["a", "b"], tokenizer_class="Else", eos_token=None)
    changed(run / "special_tokens_map.json", eos_token={"content": "</s>", "lstrip": False})
    changed(run / "added_tokens.json", **{"<pad>": 2})
    changed(run / "generation_config.json", eos_token_id=[1], transformers_version="4.57", use_cache=False, top_k=None)
    changed(run / "config.json", eos_token_id=[1], transformers_version="4.57", pad_token_id=None)
    assert notes(run, base) == []
    (base / "generation_config.json").unlink()  # then its config.json says the same
    assert notes(run, base) == []


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_what_is_no_json_does_not_stop_a_conversion(folders, name):
    """A run's config.json may be of another program."""
    run, base = folders
    (run / name).write_text("{ // a comment")
    assert len(notes(run, base)) == (name != "config.json")


@pytest.mark.parametrize(
    ("there", "back", "inside"),
    [
        (["hf2fsdp"], ["fsdp2hf"], "."),
        (["hf2megatron"], ["megatron2hf"], "huggingface"),
        (["hf2megatron", "--format", "torch_dist"], ["megatron2hf"], "huggingface"),
        (["hf2neox"], ["neox2hf"], "huggingface"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_of_every_format_that_carries_them(model, convert, tmp_path, there, back, inside):
    base, run = shutil.copytree(model("llama"), tmp_path / "base"), tmp_path / "run"
    assert convert(there[0], base, run, *there[1:]).code == 0
    changed(run / inside / "generation_config.json", eos_token_id=[2, 7])
    (run / inside / "chat_template.jinja").write_text("{{ messages }} of the training")
    changed(run / inside / "config.json", eos_token_id=7)
    ran = convert(back[0], run, tmp_path / "out", "--config", base)
    assert ran.code == 0, ran.err
    place = run / inside
    assert (
        f"note: chat_template.jinja, generation_config.json of {place} are not carried, those of {base} are" in ran.err
    )
    assert f"note: {place / 'config.json'} says eos_token_id 7 (carried: " in ran.err
    assert convert("assets", tmp_path / "out", "--from", place, "--dry-run").out.count("chat_template.jinja") == 1
    assert f"of {place} are not carried" not in convert(back[0], run, tmp_path / "own").err


def test_files_above_the_folder_of_the_weights(folders):
    """As a Trainer with FSDP leaves them; what lies above a folder with a config of its own is of another model."""
    run, base = folders
    changed(run / "generation_config.json", temperature=0.6)
    weights = run / "pytorch_model_fsdp_0"
    weights.mkdir()
    assert f"generation_config.json of {run} are not carried" in notes(weights, base)[0]
    changed(weights / "config.json", eos_token_id=1)
    assert notes(weights, base) == []


def test_what_is_too_large_or_in_a_subfolder_is_named(model, convert, tmp_path):
    """sentence-transformers' modules.json names subfolders; those of a training are no part of the model."""
    source = shutil.copytree(model("llama"), tmp_path / "source")
    for name, most in (("tokenizer.json", 64 << 20), ("vocab.txt", (64 << 20) + 1), ("data.parquet", 65 << 20)):
        with (source / name).open("wb") as file:
            file.truncate(most)
            file.seek(most - 1)
            file.write(b"}")
    files = (
        "1_Pooling/config.json", "runs/events.out.tfevents.1", "checkpoint-5/config.json", "huggingface/config.json",
        "custom_generate/generate.py", "custom_generate/notes.rst", "custom_generate/inner/code.py",
    )  # fmt: skip
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    (source / "modules.json").write_text('[{"path": "1_Pooling"}]')
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    large = "data.parquet (68,157,440 bytes), vocab.txt (67,108,865 bytes)"
    assert [line for line in ran.err.splitlines() if "are not carried" in line] == [
        f"note: 1_Pooling/, custom_generate/inner/ in {source} are not carried: subfolders, of which only those for "
        "chat templates and `generate` are",
        f"note: {large} in {source} are not carried: more than 64 MiB that are no safetensors",
        f"note: custom_generate/notes.rst in {source} are not carried: not names of model files",
    ]
    assert (tmp_path / "out/tokenizer.json").stat().st_size == 64 << 20
    assert not (tmp_path / "out/vocab.txt").exists()
