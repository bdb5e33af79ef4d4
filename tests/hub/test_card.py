"""The model card: what is generated, and that a card which exists is only completed."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import yaml

from converters.hub.files import File
from converters.hub.model_card import BEGIN, END, write_card
from converters.hub.push_plan import plan_push
from formats.errors import SourceError, UsageError
from tests.hub.server import Fault


@pytest.fixture
def tiny(tmp_path):
    """What plan_push asks of a folder, and no more."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def front(text):
    """The metadata of a card, and its body."""
    assert text.startswith("---\n")
    head, _, body = text[4:].partition("\n---\n")
    return yaml.safe_load(head), body


def card(folder, base_model=None, files=()):
    return write_card(folder, "acme/m", list(files), base_model)


def test_a_generated_card(converted):
    plan = plan_push(converted, "acme/m", base_model="meta-llama/Llama-3.1-8B")
    metadata, body = front(plan.card)
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "meta-llama/Llama-3.1-8B",
        "tags": ["vitruvian"],
    }
    digest = json.loads((converted / "vitruvian.json").read_text())["digest"]
    assert f"`{digest}`" in body
    for path in converted.iterdir():
        content = path.read_bytes()
        assert f"| {path.name} | {len(content)} | `{hashlib.sha256(content).hexdigest()}` |" in body
    assert "apply_chat_template" in body
    assert any("no licence" in note or "licence" in note for note in plan.notes)


def test_nothing_is_invented(tiny):
    metadata, body = front(card(tiny)[0])
    assert not metadata.keys() & {"license", "base_model", "language", "datasets"}
    assert "Digest" not in body
    assert "Tokenizer" not in body
    (tiny / "config.json").write_text('{"architectures": ["LlamaModel"]}')
    assert "pipeline_tag" not in front(card(tiny)[0])[0]


def test_the_source_is_told_where_the_manifest_tells_it(tiny):
    source = {"format": "megatron", "topology": {"tp": 2, "pp": 4, "bad|": 1, "worse": "<script>"}}
    (tiny / "vitruvian.json").write_text(json.dumps({"source": source, "digest": "not a digest"}))
    text, _ = card(tiny)
    assert "Converted from: megatron (tp 2, pp 4, bad\\| 1)." in text
    assert "script" not in text
    assert "not a digest" not in text
    (tiny / "vitruvian.json").write_text(json.dumps({"source": {"format": "[x](y)"}}))
    assert "Converted" not in card(tiny)[0]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_card_that_exists_keeps_its_text_and_gets_what_it_lacks(tiny, ending):
    lines = [
        "---",
        "license: llama3.1",
        "language: [de, no]  # a comment",
        "tags:",
        "- chat",
        "---",
        "# Old",
        "---",
        "",
    ]
    existing = ending.join(lines)
    (tiny / "README.md").write_bytes(existing.encode())
    text, notes = card(tiny, "acme/base")
    front_before, _, body = existing.partition(f"{ending}---{ending}")
    assert text.startswith(front_before.replace("---\r\n", "---\n"))
    assert text.endswith(f"---\n{body}")
    metadata, _ = front(text)
    assert metadata["tags"] == ["chat"]
    assert metadata["license"] == "llama3.1"
    assert metadata["base_model"] == "acme/base"
    assert metadata["library_name"] == "transformers"
    assert "its text is kept" in notes[0]


@pytest.mark.parametrize(
    ("existing", "kept"),
    [
        ("# Just text\n", {}),
        ("", {}),
        ("---\n---\n# Empty\n", {}),
        ("---\n{license: mit, tags: [x]}\n---\n# Flow\n", {"license": "mit", "tags": ["x"]}),
        ("---\n# only a comment\n---\nbody\n", {}),
        ("---\na: &one [1]\nb: *one\n---\nbody", {"a": [1], "b": [1]}),
        ("---\ndate: 2026-01-01\nlicense: mit\n...\n---\nbody", {"license": "mit"}),
        ("text\n---\nlicense: mit\n---\n", {}),
    ],
)
def test_metadata_in_every_shape(tiny, existing, kept):
    (tiny / "README.md").write_text(existing)
    text, _ = card(tiny)
    metadata, body = front(text)
    assert metadata["library_name"] == "transformers"
    assert {name: metadata[name] for name in kept} == kept
    expected = existing.partition("\n---\n")[2] if existing.startswith("---") else existing
    assert body.lstrip("\n") == expected.lstrip("\n")
    (tiny / "README.md").write_text(text)
    assert card(tiny)[0] == text, "nothing is missing any more"


def test_a_base_model_that_is_named_already_is_kept_and_said(tiny):
    (tiny / "README.md").write_text("---\nbase_model: acme/first\n---\n")
    text, notes = card(tiny, "acme/second")
    assert front(text)[0]["base_model"] == "acme/first"
    assert any("--base-model acme/second is not written" in note for note in notes)


def test_a_card_of_ours_gets_new_digests(tiny):
    old = File("model.safetensors", 7, "0" * 64, None)
    text, _ = card(tiny, files=[old])
    (tiny / "README.md").write_text(text.replace("## Usage", "Written by hand.\n\n## Usage"))
    renewed, _ = card(tiny, files=[File("model.safetensors", 7, "1" * 64, None)])
    assert "0" * 64 not in renewed
    assert "1" * 64 in renewed
    assert "Written by hand." in renewed
    assert renewed.count(BEGIN) == renewed.count(END) == 1
    assert renewed.replace("1" * 64, "0" * 64).replace("Written by hand.\n\n", "") == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"---\nlicense: [\n---\n", "is no YAML"),
        (b"---\n- a list\n---\n", "is no mapping"),
        (b"---\n!!python/object/apply:os.system [echo]\n---\n", "is no YAML"),
        (b"\xff\xfe", "is no UTF-8 text"),
        (b"x" * (2 << 20), "too many for a card"),
    ],
)
def test_a_card_that_cannot_be_read_is_refused(tiny, content, message):
    (tiny / "README.md").write_bytes(content)
    with pytest.raises(SourceError, match=message):
        card(tiny)


def test_a_bomb_of_aliases_is_no_trouble(tiny):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    (tiny / "README.md").write_text("---\n" + "\n".join(lines) + "\n---\nbody\n")
    assert "library_name: transformers" in card(tiny)[0]


def test_names_do_not_break_the_table(tiny):
    (tiny / "a|b`c.md").write_text("x")
    plan = plan_push(tiny, "acme/m")
    assert "| a\\|b\\`c.md | 1 |" in plan.card


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a/b/c", "-a/b", "a/b.", "a/b..c", "a/b.git", "a/" + "b" * 97, "ä/b", "a b/c", "", "a/"]
)
def test_names_of_repositories(tiny, name):
    with pytest.raises(UsageError):
        plan_push(tiny, name)
    with pytest.raises(UsageError):
        plan_push(tiny, "acme/m", base_model=name)


@pytest.mark.parametrize("name", ["a/b", "acme/Llama-3.1_8B", "a/" + "b" * 96, "a1/1.5"])
def test_names_that_huggingface_hub_takes(tiny, name):
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(name)
    assert plan_push(tiny, name).repo == name


def test_what_cannot_be_sent_is_said(tiny, tmp_path):
    (tiny / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"tokenizer\.json is a broken link"):
        plan_push(tiny, "acme/m")
    (tiny / "tokenizer.json").unlink()
    (tiny / "two\nlines.md").write_text("")
    with pytest.raises(SourceError, match="name cannot be sent"):
        plan_push(tiny, "acme/m")
    (tiny / "two\nlines.md").unlink()
    (tiny / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"no \*\.safetensors"):
        plan_push(tiny, "acme/m")


def test_weights_of_another_model_are_not_sent(tiny):
    """Whoever loads all of `*.safetensors` would take both."""
    shutil.copy(tiny / "model.safetensors", tiny / "model-00001-of-00002.safetensors")
    plan = plan_push(tiny, "acme/m")
    assert dict(plan.left_out)["model-00001-of-00002.safetensors"] == "the model is in other files"
    assert [file.name for file in plan.files if file.name.endswith(".safetensors")] == ["model.safetensors"]


def test_what_is_left_out_is_listed(tiny):
    import os

    os.mkfifo(tiny / "pipe")
    for name in (".hidden", "optimizer.bin", "trainer_state.json", "model-1.safetensors.partial", "latest", "rust.ot"):
        (tiny / name).write_text("")
    with (tiny / "model.llamafile").open("wb") as file:
        file.truncate((64 << 20) + 1)
    (tiny / "checkpoint-10").mkdir()
    (tiny / "elsewhere").symlink_to("/")
    left = dict(plan_push(tiny, "acme/m").left_out)
    assert left == {
        ".hidden": "hidden",
        "checkpoint-10/": "a state of training",
        "elsewhere/": "a link to a folder",
        "latest": "a state of training",
        "model-1.safetensors.partial": "unfinished",
        "model.llamafile": "more than 64 MiB that are no safetensors",
        "optimizer.bin": "a state of training",
        "pipe": "no regular file",
        "rust.ot": "weights in another format",
        "trainer_state.json": "a state of training",
    }


def test_a_card_that_the_hub_refuses(hub, push, converted):
    hub.faults.append(Fault("/validate-yaml", status=400))
    ran = push(converted, "acme/m")
    assert ran.code == 5
    assert "the Hub does not accept the card" in ran.err
    assert not hub.asked("PUT|/commit/")


def test_a_dry_run_prints_nothing_that_a_terminal_obeys(push, folder):
    (folder / "README.md").write_text("\x1b[2J\x07 red")
    ran = push(folder, "acme/m", "-n")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "\\x1b[2J\\x07 red" in ran.out
