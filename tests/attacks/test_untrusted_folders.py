"""A folder from elsewhere: no link or name in it lets a file of the user's out, and nothing in it is waited for."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from converters.assets import files as assets
from converters.assets.trusted import refusal_reason, require_inside
from formats.errors import SourceError
from tests.models import files

SECRET = b'{"secret": "of the user"}'
ASSETS = (
    "NOTICE", "LICENSE.txt", "README.md", "generation_config.json", "special_tokens_map.json", "modeling_x.py",
    "chat_template.jinja", "train_results.json", "family.toml",
)  # fmt: skip
WAYS = {
    "hf2hf": ("hf2hf", "{src}", "{out}"),
    "hf2megatron": ("hf2megatron", "{src}", "{out}", "--tp", "2"),
    "hf2fsdp": ("hf2fsdp", "{src}", "{out}"),
    "hf2neox": ("hf2neox", "{src}", "{out}"),
    "assets": ("assets", "{out}", "--from", "{src}"),
    "push": ("push", "{src}", "acme/m", "-n"),
}


@pytest.fixture
def hostile(model, tmp_path) -> Path:
    return Path(shutil.copytree(model("llama"), tmp_path / "hf"))


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "home" / "secret.json"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def words(way: str, folder: Path, out: Path) -> list[str]:
    return [word.format(src=folder, out=out) for word in WAYS[way]]


def leaked(folder: Path) -> list[str]:
    return [name for name, content in files(folder).items() if SECRET in content] if folder.exists() else []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["NOTICE", "generation_config.json", "additional_chat_templates"])
def test_what_is_copied_or_sent_is_in_the_folder(model, hostile, secret, convert, tmp_path, way, name):
    out = tmp_path / "out"
    if way == "assets":
        shutil.copytree(model("llama"), out)
    (hostile / name).unlink(missing_ok=True)
    if "." not in name and name.islower():
        (secret.parent / "x.jinja").write_bytes(SECRET)
        (hostile / name).symlink_to(secret.parent)
    else:
        (hostile / name).symlink_to(secret)
    ran = convert(*words(way, hostile, out))
    if not (way == "push" and name.islower() and "." not in name):  # a linked folder is left out, and listed
        assert ran.code == 3, ran.out
        assert "is a link to" in ran.err
        assert "hint: cp --remove-destination" in ran.err
    assert not leaked(out)
    assert not leaked(tmp_path / "out.partial")
    assert "x.jinja" not in ran.out


@pytest.mark.parametrize("name", ASSETS)
@pytest.mark.parametrize("chain", [1, 3])
def test_every_kind_of_small_file(hostile, secret, name, chain):
    last = secret
    for step in range(chain - 1):
        (hostile / f".step{step}").symlink_to(last)
        last = hostile / f".step{step}"
    (hostile / name).unlink(missing_ok=True)
    (hostile / name).symlink_to(last)
    with pytest.raises(SourceError, match="is a link to"):
        require_inside(hostile / name, hostile)


def test_a_link_within_the_folder(hostile):
    (hostile / ".env").write_bytes(SECRET)
    (hostile / "LICENSE").write_text("terms")
    (hostile / "LICENSE.txt").symlink_to("../hf/./LICENSE")
    (hostile / "NOTICE").symlink_to(".env")
    (hostile / "COPYING").symlink_to("COPYING")
    assert require_inside(hostile / "LICENSE.txt", hostile)
    for name, message in (("NOTICE", "does not travel"), ("COPYING", "broken link")):
        with pytest.raises(SourceError, match=message):
            require_inside(hostile / name, hostile)


def test_a_model_in_the_cache_of_the_hub(model, convert, tmp_path):
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(model("llama").iterdir())):
        shutil.copy(path, cache / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    (tmp_path / "link").symlink_to(snapshot)  # the user's own
    for number, folder in enumerate((snapshot, tmp_path / "link")):
        assert convert("hf2hf", folder, tmp_path / f"out{number}").code == 0
        assert (tmp_path / f"out{number}" / "tokenizer.model").read_bytes() == (
            model("llama") / "tokenizer.model"
        ).read_bytes()
    other = tmp_path / "models--org--other" / "blobs" / "ab"
    other.parent.mkdir(parents=True)
    other.write_bytes(SECRET)
    (snapshot / "NOTICE").symlink_to("../../../models--org--other/blobs/ab")
    assert convert("hf2hf", snapshot, tmp_path / "out").code == 3


def test_weights_may_lie_on_another_file_system(hostile, convert, tmp_path):
    (hostile / "model.safetensors").rename(tmp_path / "scratch.safetensors")
    (hostile / "model.safetensors").symlink_to(tmp_path / "scratch.safetensors")
    assert convert("hf2hf", hostile, tmp_path / "out").code == 0
    assert convert("push", hostile, "acme/m", "-n").code == 3  # byte for byte
    assert " model.safetensors\n" in convert("push", tmp_path / "out", "acme/m", "-n").out


@pytest.mark.parametrize("format_", ["hf2megatron", "hf2neox"])
def test_the_assets_of_a_run_are_in_it(model, secret, convert, tmp_path, format_):
    run = tmp_path / "run"
    assert convert(format_, model("llama"), run).code == 0
    back = "megatron2hf" if format_ == "hf2megatron" else "neox2hf"
    (run / "huggingface" / "NOTICE").symlink_to(secret)
    assert convert(back, run, tmp_path / "out").code == 3
    (run / "huggingface" / "NOTICE").unlink()
    (run / "huggingface").rename(tmp_path / "elsewhere")
    (run / "huggingface").symlink_to(tmp_path / "elsewhere")
    ran = convert(back, run, tmp_path / "out")
    assert (ran.code, f"hint: if it is meant: --config {tmp_path / 'elsewhere'}" in ran.err) == (3, True)
    assert convert(back, run, tmp_path / "out", "--config", tmp_path / "elsewhere").code == 0


STRANGE = (
    "token", "Token", ".ENV", ".env", "credentials.json", "token.json", "kaggle.json", "id_rsa", "key.pem",
    "id_rsa.pub", "secrets.yaml", "secrets.txt", "client_secret.json", "core", "wandb.log", "license.key",
    "passwords.csv", "x.ipynb", "OPTIMIZER.json", "tokens.json", "README", "a.sh", "notes.docx",
)  # fmt: skip


@pytest.mark.parametrize("way", ["hf2hf", "hf2megatron", "push"])
def test_what_is_no_file_of_a_model_stays_behind_and_is_named(hostile, convert, tmp_path, way):
    for name in STRANGE:
        (hostile / name).write_bytes(SECRET)
    ran = convert(*words(way, hostile, tmp_path / "out"))
    assert ran.code == (5 if way == "push" else 0)  # its tokenizer is a stand-in
    assert leaked(tmp_path / "out") in ([], ["README"], ["huggingface/README"])
    if way == "push":
        sent = ran.out.partition("not sent")[0]
        assert not [name for name in STRANGE if f" {name}\n" in sent and name != "README"]
        assert "not sent: token (not the name of a model file)" in ran.out
    else:
        assert "are not carried: not names of model files" in ran.out + ran.err


NAMES = """
config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
vocab.json merges.txt vocab.txt tokenizer.model tokenizer.model.v3 spiece.model sentencepiece.bpe.model qwen.tiktoken
tekken.json params.json chat_template.jinja chat_template.json preprocessor_config.json processor_config.json
video_preprocessor_config.json config_sentence_transformers.json modules.json configuration.json hf_quant_config.json
quantize_config.json modeling_deepseek.py configuration_deepseek.py tokenization_kimi.py LICENSE LICENSE.txt LICENSE.md
LICENSE-CODE LICENSE-MODEL Notice NOTICE.txt USE_POLICY.md README.md THIRD_PARTY_NOTICES.txt figures.png logo.svg
model-00001-of-00002.safetensors model.safetensors.index.json vitruvian.json all_results.json train_results.json
evaluation_results.json benchmark_results.json train_params.yaml mergekit_config.yml family.toml CITATION.cff dict.txt
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", NAMES)
def test_files_of_the_hub_travel(tmp_path, name):
    (tmp_path / name).touch()
    assert refusal_reason(tmp_path / name) == ""


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a pipe", "/dev/zero"])
@pytest.mark.parametrize("way", ["hf", "megatron", "torch_dist", "fsdp", "neox"])
def test_what_is_no_regular_file_is_not_waited_for(model, convert, tmp_path, monkeypatch, way, kind):
    """Each file of a checkpoint in turn."""
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    made = tmp_path / "made"
    command = {
        "megatron": ("hf2megatron",), "torch_dist": ("hf2megatron", "--format", "torch_dist"), "fsdp": ("hf2fsdp",),
        "neox": ("hf2neox",),
    }.get(way)  # fmt: skip
    if command:
        assert convert(command[0], model("llama"), made, *command[1:]).code == 0
    else:
        shutil.copytree(model("llama"), made)
    os.mkfifo("elsewhere")

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    try:
        for path in sorted(path for path in made.rglob("*") if path.is_file()):
            path.rename("kept")
            listener = socket.socket(socket.AF_UNIX)
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "socket":
                listener.bind(str(path.relative_to(tmp_path)))
            else:
                path.symlink_to("/dev/zero" if kind.startswith("/") else tmp_path / "elsewhere")
            signal.alarm(20)
            for ran in (convert("inspect", made), convert("digest", made), convert("verify", made)):
                assert ran.code in (0, 2, 3, 4, 5, 6), (path, ran.err)
            signal.alarm(0)
            listener.close()
            path.unlink()
            Path("kept").rename(path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_file_that_grows_is_not_copied_for_ever(tmp_path):
    path = tmp_path / "merges.txt"
    path.write_bytes(b"x" * 3_000_000)

    class Growing(io.BytesIO):
        def write(self, piece: object) -> int:
            with path.open("ab") as file:
                file.write(b"x" * 3_000_000)
            return super().write(piece)

    with path.open("rb") as reader:
        assert not assets._copied(reader, Growing(), path.stat().st_size)
    with path.open("rb") as reader:
        assert assets._copied(reader, io.BytesIO(), path.stat().st_size)


@pytest.mark.parametrize("size", [None, "100KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("command", ["digest", "inspect"])
def test_weights_that_are_a_broken_link_are_named(model, convert, tmp_path, command, size):
    """A snapshot of the Hub's cache whose blob is gone."""
    folder = tmp_path / "hf"
    assert convert("hf2hf", model("llama"), folder, *(("--shard-size", size) if size else ())).code == 0
    (folder / "vitruvian.json").unlink()
    weights = sorted(folder.glob("*.safetensors"))[-1]
    weights.unlink()
    weights.symlink_to("../../blobs/0123abcd")
    ran = convert(command, folder)
    assert ran.code == 3, ran
    assert f"{weights} is a link to ../../blobs/0123abcd, which is not there" in ran.err


@pytest.mark.parametrize("options", [(), ("--dtype", "fp16"), ("--verbatim",)], ids=str)
def test_a_config_elsewhere_is_read_and_not_carried(hostile, secret, convert, tmp_path, options):
    """Copied or written anew: what is in it would travel."""
    (hostile / "config.json").rename(secret)
    (hostile / "config.json").symlink_to(secret)
    ran = convert("hf2hf", hostile, tmp_path / "out", *options)
    assert (ran.code, f"{hostile / 'config.json'} is a link to" in ran.err) == (3, True), ran
    assert not (tmp_path / "out").exists()
    assert convert("digest", hostile).code == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_broken_link_is_no_absent_file(hostile, convert, tmp_path, name):
    """As a copy of half a cache of the Hub leaves it: the output would have no tokenizer, and nobody would know why."""
    (hostile / name).unlink(missing_ok=True)
    (hostile / name).symlink_to("../../blobs/abc")
    ran = convert("hf2hf", hostile, tmp_path / "out")
    assert (ran.code, f"{hostile / name} is a broken link" in ran.err) == (3, True), ran.err
