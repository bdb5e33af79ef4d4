"""Small files that are not carried are told: replaced by those of `--config BASE`, too large, in subfolders."""

from __future__ import annotations

import json
import shutil

import pytest

from converters.assets.files import not_carried
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
    instead = f"that of {base} is" if (base / name).is_file() else "and OUT gets none"
    assert notes(run, base) == [
        f"{name} of {run} is not carried, {instead}; `convert assets OUT --from {run}` puts it into OUT"
    ]
    assert notes(run.parent, base) == notes(base, base) == []


def test_what_has_to_go_before_another_tokenizer_comes(folders):
    """`convert assets` mixes no two: as transformers 4 saved the base, and transformers 5 the run."""
    run, base = folders
    changed(run / "tokenizer_config.json", eos_token="<pad>")
    (run / "tokenizer.json").rename(run / "kept")
    changed(base / "special_tokens_map.json", eos_token="</s>")
    (said,) = notes(run, base)
    assert said.endswith(f"`convert assets OUT --from {run}` puts it into OUT")
    (run / "kept").rename(run / "tokenizer.json")
    (said,) = notes(run, base)
    assert said.endswith(
        f"`convert assets OUT --from {run}` puts it into OUT once it is without special_tokens_map.json"
    )


def test_what_out_gets_instead(folders):
    """A template or a token may be in another file of BASE; of several files that are replaced, one note."""
    run, base = folders
    written(run / "chat_template.jinja", "{{ 1 }}")
    changed(run / "tokenizer_config.json", eos_token="<pad>")
    changed(run / "special_tokens_map.json", eos_token="<pad>")
    puts = f"`convert assets OUT --from {run}` puts"
    config, special = "tokenizer_config.json", "special_tokens_map.json"
    assert notes(run, base) == [
        f"{special}, {config} of {run} are not carried, those of {base} are; {puts} them into OUT",
        f"chat_template.jinja of {run} is not carried, and OUT gets none; {puts} it into OUT",
    ]
    changed(base / config, chat_template="{{ 2 }}")
    assert notes(run, base) == [
        f"{special}, {config}, chat_template.jinja of {run} are not carried, those of {base} are; {puts} them into OUT"
    ]


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


def test_the_longest_text_of_its_config(folders):
    run, base = folders
    changed(run / "config.json", max_position_embeddings=64)
    changed(base / "config.json", max_position_embeddings=4096)
    (said,) = notes(run, base)
    assert said.startswith(f"{run / 'config.json'} says max_position_embeddings 64 (carried: 4096): if the training")


@pytest.mark.parametrize("command", ["hf2hf", "hf2fsdp", "hf2megatron"])
def test_what_another_folder_says_than_a_hugging_face_folder_is_not_carried(model, convert, tmp_path, command):
    """The folder's own files are."""
    base = shutil.copytree(model(), tmp_path / "base")
    changed(base / "config.json", max_position_embeddings=4096)
    (base / "tokenizer.json").write_bytes(worlds.tokenizer().to_str().encode())
    ran = convert(command, model(), tmp_path / "out", "--config", base)
    assert ran.code == 0, ran.err
    puts = f"`convert assets OUT --from {base}` puts it into OUT"
    assert f"note: tokenizer.json of {base} is not carried, and OUT gets none; {puts}" in ran.err
    length = json.loads((model() / "config.json").read_text())["max_position_embeddings"]
    assert f"note: {base / 'config.json'} says max_position_embeddings 4096 (carried: {length})" in ran.err
    if command == "hf2hf":
        assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == length


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
    assert f"of {place} " not in convert(back[0], run, tmp_path / "own").err


def tokens(*entries):
    return {str(number): {"content": text, "special": True} for text, number in entries}


def written(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def named(run, base, *names):
    """That these files are named in one note, or that there is none."""
    heads = [note.split(" of ", 1)[0] for note in notes(run, base)]
    assert heads == ([", ".join(names)] if names else [])


def test_named_chat_templates(folders):
    """In files of their own as transformers 5 writes them, or in a list as 4 does."""
    run, base = folders
    for folder in folders:
        written(folder / "chat_template.jinja", "{{ 1 }}")
    written(run / "additional_chat_templates/tool_use.jinja", "{{ 2 }}")
    named(run, base, "additional_chat_templates/tool_use.jinja")
    several = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    changed(base / "tokenizer_config.json", chat_template=several)
    named(run, base)
    several[1]["template"] = "{{ 3 }}"
    changed(base / "tokenizer_config.json", chat_template=several)
    named(run, base, "additional_chat_templates/tool_use.jinja")
    shutil.rmtree(run / "additional_chat_templates")
    several[1]["template"] = "{{ 2 }}"
    changed(run / "tokenizer_config.json", chat_template=several)
    named(run, base, "tokenizer_config.json")


def test_a_run_without_a_chat_template(folders):
    run, base = folders
    written(base / "chat_template.jinja", "{{ 1 }}")
    assert notes(run, base) == [
        f"{run} has a tokenizer_config.json and no chat template, OUT gets the one of {base}: if the model was trained "
        "without, take it out of OUT, and record that with `convert assets OUT --from OUT`"
    ]
    written(run / "chat_template.jinja", "{{ 1 }}")
    named(run, base)
    (run / "chat_template.jinja").unlink()
    (run / "tokenizer_config.json").unlink()
    named(run, base)


def test_added_tokens_that_the_tokenizer_lacks_or_has_otherwise(folders):
    run, base = folders
    for entries in ([("<new>", 300)], [("<pad>", 3)]):
        changed(run / "tokenizer_config.json", added_tokens_decoder=tokens(*entries))
        named(run, base, "tokenizer_config.json")
        changed(run / "tokenizer_config.json", added_tokens_decoder=None)
        changed(run / "added_tokens.json", **dict(entries))
        named(run, base, "added_tokens.json")
        (run / "added_tokens.json").unlink()
    changed(run / "tokenizer_config.json", added_tokens_decoder=tokens(("<s>", 0), ("</s>", 1), ("<pad>", 2)))
    changed(run / "added_tokens.json", **{"<pad>": 2})
    named(run, base)
    for folder in folders:  # SentencePiece may have them
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
        (folder / "added_tokens.json").write_text('{"<pad>": 2}')
    named(run, base)


def test_special_tokens_that_are_null(folders):
    run, base = folders
    settings = json.loads((run / "tokenizer_config.json").read_text())
    (run / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None, "cls_token": None}))
    named(run, base, "tokenizer_config.json")
    changed(run / "special_tokens_map.json", pad_token="<pad>")
    named(run, base)


def test_special_tokens_by_name(folders):
    run, base = folders
    changed(run / "tokenizer_config.json", extra_special_tokens={"image_token": "<pad>"})
    named(run, base, "tokenizer_config.json")
    changed(base / "tokenizer_config.json", model_specific_special_tokens={"image_token": {"content": "<pad>"}})
    named(run, base)


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("LlamaTokenizer", "GemmaTokenizer", True),
        ("LlamaTokenizerFast", "LlamaTokenizer", False),
        ("LlamaTokenizer", "PreTrainedTokenizerFast", False),
        ("TokenizersBackend", "LlamaTokenizerFast", False),
        ("LlamaTokenizer", None, False),
    ],
)
def test_classes_of_tokenizers(folders, one, other, differ):
    for folder, kind in zip(folders, (one, other), strict=True):
        changed(folder / "tokenizer_config.json", tokenizer_class=kind)
    named(*folders, *(["tokenizer_config.json"] if differ else []))


def test_ids_that_are_null_in_its_config(folders):
    run, base = folders
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"pad_token_id": None, "bos_token_id": None}))
    (said,) = notes(run, base)
    assert said.startswith(f"{run / 'config.json'} says bos_token_id None (carried: 0): if the training")
    changed(run / "config.json", bos_token_id=None, pad_token_id=None)
    named(run, base)


def test_configs_of_processors(folders):
    """Those of transformers 5 have that of the images inside, and more keys."""
    run, base = folders
    images = {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 8, "width": 8}, "do_pad": None}
    changed(run / "preprocessor_config.json", **images)
    named(run, base, "preprocessor_config.json")
    changed(base / "preprocessor_config.json", **images, transformers_version="4.57")
    changed(base / "processor_config.json", processor_class="P", image_seq_length=4)
    named(run, base)
    changed(run / "preprocessor_config.json", do_rescale=False)
    named(run, base, "preprocessor_config.json")
    (run / "preprocessor_config.json").unlink()
    five = images | {"image_processor_type": "SiglipImageProcessor", "data_format": "channels_first"}
    changed(run / "processor_config.json", processor_class="P", image_seq_length=4, image_processor=five)
    named(run, base)
    changed(run / "processor_config.json", image_processor=five | {"size": {"height": 9, "width": 8}})
    named(run, base, "processor_config.json")
    spec = Verbatim("llama", {}, tied=False, vocab=None, why="")
    only = Checkpoint(run, run, "x", spec, (), (), (), assets=base, settings=Settings(config=base, only="text"))
    assert list(left_behind(only)) == []
    (run / "processor_config.json").write_text("{ // a comment")
    named(run, base, "processor_config.json")


def test_files_above_the_folder_of_the_weights(folders):
    """As a Trainer with FSDP leaves them; what lies above a folder with a config of its own is of another model."""
    run, base = folders
    changed(run / "generation_config.json", temperature=0.6)
    weights = run / "pytorch_model_fsdp_0"
    weights.mkdir()
    assert f"generation_config.json of {run} is not carried" in notes(weights, base)[0]
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


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("sub/LICENSE", True),
        ("sub/x.txt", True),
        ("a/b/tokenizer.json", True),
        ("a/.hidden/b/model.safetensors", False),
        ("onnx/model.onnx", True),
        ("figures/a.png", True),
        ("checkpoints/checkpoint-5/config.json", False),
        ("logs/one/run.log", False),
        ("wandb/latest-run/files/requirements.txt", False),
        ("code/__pycache__/a.pyc", False),
        (".cache/huggingface/config.json", False),
        ("pytorch_model_fsdp_0/__0_0.distcp", False),
        ("model/model_weight.safetensors", False),
    ],
)
def test_each_subfolder_with_more_than_a_training_leaves_is_named(tmp_path, name, is_named):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir(exist_ok=True)
    said = not_carried(tmp_path, [tmp_path / "model/model_weight.safetensors"])
    assert list(said.values()) == ([[f"{name.split('/')[0]}/"]] if is_named else [])


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/loop").symlink_to(tmp_path)
    assert list(not_carried(tmp_path, ()).values()) == [["sub/"]]
