"""`convert assets`: a model gets its small files, or nothing of it changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from converters.assets.chat_template import load_template
from converters.commands import assets as command
from converters.commands.assets import assets
from converters.common.atomic import sync_path
from converters.hub.preflight import embedding_rows
from formats.errors import RefusedError, SourceError, UsageError, VitruvianError
from tests.chat import worlds


def run(*argv):
    """Run the command: (stdout, stderr); errors are raised."""
    done = CliRunner().invoke(assets, [str(word) for word in argv], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout, done.stderr


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def world(tmp_path):
    """(OUT with weights and a config only, BASE with everything else)."""
    base = worlds.folder(tmp_path / "base", worlds.tokenizer(), 4)
    (base / "LICENSE").write_text("licence")
    (base / "README.md").write_text("card of the base model")
    (base / "model.safetensors").write_bytes(b"not to be copied")
    out = tmp_path / "out"
    out.mkdir()
    rows = worlds.length(worlds.tokenizer()) + 8
    (out / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | {"vocab_size": rows}))
    save_file({"model.embed_tokens.weight": np.zeros((rows, 16), "f4")}, out / "model.safetensors")
    return out, base


def test_a_model_becomes_one_that_chats(world):
    """transformers loads it, and its generation stops at the terminator."""
    from transformers import AutoTokenizer, GenerationConfig

    out, base = world
    config = (out / "config.json").read_bytes()
    printed, notes = run(out, "--from", base, "--chat-template", "chatml")
    assert set(snapshot(out)) == {
        "LICENSE", "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (out / "config.json").read_bytes() == config
    assert "new  chat_template.jinja" in printed
    assert "note: the tokenizer gets <|im_start|> (" in notes
    assert "train them" in notes
    tokenizer = AutoTokenizer.from_pretrained(out)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, stop]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], return_dict=False)[-2] == stop
    assert "LICENSE" in printed


def test_twice_is_once(world):
    out, base = world
    argv = (out, "--from", base, "--chat-template", "control")
    run(*argv)
    first, inodes = snapshot(out), {path.name: path.stat().st_ino for path in out.iterdir()}
    printed, _ = run(*argv)
    assert snapshot(out) == first
    assert {path.name: path.stat().st_ino for path in out.iterdir()} == inodes
    assert "new" not in printed
    assert "replaced" not in printed


def test_what_out_has_of_its_own_stays(world):
    out, base = world
    (out / "README.md").write_text("card of the tuned model")
    (out / "LICENSE").write_text("old")
    printed, _ = run(out, "--from", base)
    assert (out / "README.md").read_text() == "card of the tuned model"
    assert (out / "LICENSE").read_text() == "licence"
    assert "replaced  LICENSE" in printed
    assert (out / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()


def test_the_template_of_base_is_that_of_out(world):
    """transformers takes that of a chat_template.jinja before that of a tokenizer_config.json."""
    from transformers import AutoTokenizer

    out, base = world
    named = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    (out / "chat_template.jinja").write_text("{% for message in messages %}old{% endfor %}")
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates/tool_use.jinja").write_text("old")
    printed, _ = run(out, "--from", base)
    assert AutoTokenizer.from_pretrained(out).chat_template == named
    assert "removed  additional_chat_templates/tool_use.jinja" in printed
    assert not [*out.rglob("*.jinja")]


def test_settings_of_an_adapter_stay_with_it(world):
    """transformers would load the model that they name, not OUT. `convert merge` names this command."""
    out, base = world
    (base / "adapter_config.json").write_text('{"base_model_name_or_path": "another"}')
    printed, _ = run(out, "--from", base)
    assert "adapter_config.json" not in {*printed.split(), *snapshot(out)}


def test_without_a_template_of_base_that_of_out_stays(world):
    out, base = world
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    (out / "chat_template.jinja").write_text(load_template("chatml"))
    run(out, "--from", base)
    assert (out / "chat_template.jinja").read_text() == load_template("chatml")


@pytest.mark.parametrize("form", [str, list])
def test_a_template_in_the_file_that_base_replaces_is_not_lost(world, form):
    out, base = world
    config = json.loads((base / "tokenizer_config.json").read_text()) | {"chat_template": None}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_template("chatml")
    of_out = text if form is str else [{"name": "default", "template": text}, {"name": "rag", "template": text}]
    (out / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": of_out}))
    before = snapshot(out)
    with pytest.raises(RefusedError, match=r"holds a chat template \(default.* has none: it would be lost"):
        run(out, "--from", base)
    assert snapshot(out) == before
    (out / "FILE.jinja").write_text(text)
    run(out, "--from", base, "--chat-template", out / "FILE.jinja")
    assert (out / "chat_template.jinja").read_text() == text


def test_dry_run_writes_nothing(world):
    out, base = world
    before = snapshot(out)
    printed, _ = run(out, "--from", base, "--chat-template", "llama3", "-n", "--json")
    report = json.loads(printed)
    assert snapshot(out) == before
    assert report["files"]["tokenizer.json"] == "new"
    assert report["added"] == list(worlds.NEEDED["llama3"])
    assert (report["rows"], report["rows_needed"], report["terminator"]) == (embedding_rows(out),) * 2 + ("<|eot_id|>",)
    assert report["problems"] == []


def test_rows_that_lack_are_refused_and_nothing_changes(world):
    out, base = world
    rows = worlds.length(worlds.tokenizer()) + 1
    save_file({"model.embed_tokens.weight": np.zeros((rows, 16), "f4")}, out / "model.safetensors")
    before = snapshot(out)
    with pytest.raises(RefusedError, match=f"{rows + 1} rows are needed, the embedding has {rows}") as raised:
        run(out, "--from", base, "--chat-template", "chatml")
    assert "--chat-template chatml" in raised.value.hint
    assert raised.value.exit_code == 5
    assert snapshot(out) == before
    assert not list(out.glob(".*"))


def test_a_model_that_could_not_be_served_is_refused(world):
    out, base = world
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["FSDPLlama"], "bos_token_id": 10**6}))
    before = snapshot(out)
    with pytest.raises(RefusedError, match=r"could not be served: .*FSDPLlama.*, and 1 more"):
        run(out, "--from", base)
    assert snapshot(out) == before


def test_a_poor_template_of_the_base_model_is_a_note_unless_it_is_asked_for(world):
    """Nobody asked for it: many base models have one whose terminator is no eos."""
    out, base = world
    template = load_template("chatml")
    (base / "chat_template.jinja").write_text(template)
    _, notes = run(out, "--from", base)
    assert "note: <|im_end|>, which ends a reply, is not a single special token" in notes
    run(out, "--chat-template", base / "chat_template.jinja")
    _, notes = run(out, "--from", out, "--chat-template", "chatml")
    assert "not a single" not in notes


def test_parts_of_two_tokenizers_are_refused(world):
    out, base = world
    (out / "tokenizer.model").write_bytes(b"of another model")
    with pytest.raises(RefusedError, match=r"holds tokenizer\.model, which .*base lacks") as raised:
        run(out, "--from", base)
    assert raised.value.hint == f"if it is not needed: rm {out / 'tokenizer.model'}"
    (out / "special_tokens_map.json").write_text("{}")
    with pytest.raises(RefusedError, match=r"holds tokenizer\.model, special_tokens_map\.json, which") as raised:
        run(out, "--from", base)
    assert raised.value.hint.endswith(f"rm {out / 'tokenizer.model'} {out / 'special_tokens_map.json'}")


def test_old_templates_go(world):
    out, base = world
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("x")
    run(out, "--from", base)
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "x"
    (out / "chat_template.json").write_text("{}")
    printed, _ = run(out, "--from", base, "--chat-template", "chatml")
    assert "removed   chat_template.json\n" in printed
    assert not (out / "chat_template.json").exists()
    assert not (out / "additional_chat_templates" / "tools.jinja").exists()


def test_a_failure_half_way_leaves_out_as_it_was(world, monkeypatch):
    """Nothing is renamed before everything is ready, and a killed run's folder does not stop the next."""
    out, base = world
    before = snapshot(out)
    written = []

    def fail(path):
        written.append(path)
        if len(written) == 4:
            raise OSError(28, "No space left on device", str(path))
        sync_path(path)

    monkeypatch.setattr(command, "sync_path", fail)
    with pytest.raises(OSError, match="No space left"):
        run(out, "--from", base, "--chat-template", "chatml")
    assert snapshot(out) == before
    monkeypatch.undo()
    (out / command.STAGING).mkdir()
    (out / command.STAGING / "left").write_text("by a run that was killed")
    run(out, "--from", base, "--chat-template", "chatml")
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("key", ["wte.weight", "gpt_neox.embed_in.weight", "transformer.word_embeddings.weight"])
def test_rows_of_an_embedding_by_any_name(tmp_path, key):
    save_file({"wpe.weight": np.zeros((3, 2), "f4"), key: np.zeros((9, 2), "f4")}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert embedding_rows(tmp_path) == 9


def test_rows_of_sharded_weights_and_without_weights(world, tmp_path):
    out, _ = world
    (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
    weight_map = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "x": "model-00002-of-00002.safetensors",
    }
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rows = worlds.length(worlds.tokenizer()) + 8
    (out / "config.json").write_text('{"vocab_size": 7}')
    assert embedding_rows(out) == rows
    (out / "model.safetensors.index.json").unlink()
    assert embedding_rows(out) == 7
    (out / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(SourceError, match="no safetensors file"):
        embedding_rows(out)
    with pytest.raises(UsageError, match="is no Hugging Face model"):
        embedding_rows(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["OUT"], "nothing to do"),
        (["OUT", "--from", "OUT/nowhere"], "is not a folder"),
        (["OUT", "--chat-template", "chatlm"], "neither a shipped chat template nor a file"),
        (["OUT", "--chat-template", "OUT/"], "is a folder, and a chat template is a file"),
        (["OUT/nowhere", "--chat-template", "chatml"], "is no Hugging Face model"),
        (["OUT", "--chat-template", "chatml"], "no tokenizer at all"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(world, argv, sentence):
    with pytest.raises(VitruvianError, match=sentence):
        run(*(word.replace("OUT", str(world[0])) for word in argv))
    assert not list(world[0].glob(".*"))


def test_a_base_without_small_files_is_refused(world, tmp_path):
    """The run folder of Megatron has them one folder below."""
    out, base = world
    megatron = tmp_path / "megatron"
    (megatron / "iter_0000001").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no tokenizer, config or card"):
        run(out, "--from", megatron)
    base.rename(megatron / "huggingface")
    with pytest.raises(UsageError) as refused:
        run(out, "--from", megatron)
    assert refused.value.hint == f"--from {megatron / 'huggingface'}"
